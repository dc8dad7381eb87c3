"""The child process of `trial`: load, read a few tokens, one round."""

from __future__ import annotations

import sys
from pathlib import Path

from localspec.errors import LocalspecError
from localspec.loading.open import open_pair


def run(gpu_layers: int, target: Path, drafter: Path | None = None) -> None:
    """Load both files and decode two tokens; raises what a load raises."""
    with open_pair(target, drafter, n_ctx=256, gpu_layers=gpu_layers) as pair:
        pair.generate([0, 1, 2, 3], max_tokens=2, path="greedy" if drafter else None)


if __name__ == "__main__":
    try:
        run(int(sys.argv[1]), *map(Path, sys.argv[2:]))
    except LocalspecError as error:
        sys.exit(f"{error}")
