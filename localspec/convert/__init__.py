"""Hugging Face checkpoint -> GGUF, for targets and drafters: safetensors in, one file that llama.cpp runs out.

`checkpoint` reads (`shard` a single file), `tokenizer` makes the vocabulary, `target` and `drafter` know the
architectures, `writer` writes, `localspec/cli/convert.py` is the command.
"""
