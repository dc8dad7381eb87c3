"""From two files to a loaded pair: what fits into memory, and a first try in a child process."""
