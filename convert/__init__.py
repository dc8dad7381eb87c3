"""Hugging Face checkpoint -> GGUF, for targets and drafters."""
