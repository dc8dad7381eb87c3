"""What the scripts of this folder share: where prompts come from, and how a figure is printed."""

from __future__ import annotations

import argparse
from pathlib import Path

import prompt_sets

from localspec.evaluation import prompts
from localspec.loading.load import load
from localspec.pair import Pair


def arguments(description: str) -> argparse.ArgumentParser:
    """Options every script takes: which pair, how many threads, where the prompt sets are."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-m", "--model", help="target GGUF (default: the default pair)")
    parser.add_argument("-md", "--model-draft", help="drafter GGUF")
    parser.add_argument("-t", "--threads", type=int, help="CPU threads (default: physical cores)")
    parser.add_argument("--data", type=Path, help="folder of prompt sets, NAME.jsonl (default: they are fetched once)")
    return parser


def load_pair(args: argparse.Namespace, *, n_ctx: int = 4096) -> Pair:
    return load(target=args.model, draft=args.model_draft, n_ctx=n_ctx, n_threads=args.threads)


def read_set(args: argparse.Namespace, name: str, count: int | None = None) -> list[str]:
    """The first `count` prompts of a set, e.g. `mt_bench`."""
    return prompts.read(prompt_sets.path_of(name, args.data))[:count]
