"""How much to draft, and from where, so that it pays on this machine."""
