"""Which pairs there are, where their files come from, and fetching them: the only code that touches the network."""
