"""How a token comes about: draft, select, verify, accept, roll back, inject. Nothing here knows of files or users."""
