"""The child process that tries the native part: a tiny model, by ggml's own kernels and then by ours."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from localspec.llama import native
from localspec.llama.context import Context
from localspec.llama.model import Model
from localspec.llama.selftest import WRONG
from localspec.llama.selftest_child import write_model

ENCODINGS = ("Q4_0", "Q4_1", "Q8_0")
FURTHEST = 0.1  # of the largest logit; activations in 8 bits differ by about 0.01


def logits(path: Path, *, repack: bool) -> NDArray[np.float32]:
    """Those of 1, of 2 and of 33 tokens."""
    rows = []
    with Model(path, repack=repack) as model, Context(model, n_ctx=64, n_batch=64, n_threads=2, exact=True) as context:
        for n in (1, 2, 33):
            context.decode(range(n), 0)
            rows.append(context.logits(n).copy())
            context.clear()
    return np.concatenate(rows)


def _compare() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{name}.gguf") for name in ENCODINGS]
        for name, path in zip(ENCODINGS, paths, strict=True):
            write_model(path, gguf.GGMLQuantizationType[name])
        theirs = [logits(path, repack=False) for path in paths]
        try:
            native.load()
        except native.UnusableError as off:
            sys.exit(str(off))
        for name, path, expected in zip(ENCODINGS, paths, theirs, strict=True):
            difference = np.abs(logits(path, repack=True) - expected).max() / np.abs(expected).max()
            if not difference < FURTHEST:
                print(f"{name} is off by {difference:.2g} of the largest logit", file=sys.stderr)
                sys.exit(WRONG)


if __name__ == "__main__":
    _compare()
