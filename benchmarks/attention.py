"""Flash attention against plain attention on this machine: exactness and cost.

Prints the largest difference of any logit between decoding 16 tokens one by one and in batches of 2 to 8, and the ms to
decode 1, 4 and 8 tokens behind a long context. A drafter keeps the words of its target to the letter only where the
first figure is 0.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np
from common import arguments
from numpy.typing import NDArray

from localspec import models
from localspec.llama import Context, Model

WIDTHS = (1, 4, 8)


def largest_difference(context: Context, tokens: NDArray[np.int32]) -> float:
    """Largest logit difference between batches of 1 and of 2, 3, 4, 8 tokens, at 16 positions behind 64."""
    rows: dict[int, list[NDArray[np.float32]]] = {}
    for width in (1, 2, 3, 4, 8):
        context.clear()
        context.decode(tokens[:64], 0, output=False)
        rows[width] = []
        for start in range(64, 80, width):
            n = min(width, 80 - start)
            context.decode(tokens[start : start + n], start)
            rows[width].append(context.logits(n).copy())
    single = np.concatenate(rows.pop(1))
    return max(float(abs(np.concatenate(other) - single).max()) for other in rows.values())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--depths", default="200,600,1500")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    path = args.model or models.get(models.DEFAULT).target_path()
    tokens = np.random.default_rng(0).integers(100, 40_000, 4096).astype(np.int32)
    with Model(path) as model:
        contexts = {
            flash: Context(model, n_ctx=4096, n_batch=512, n_threads=args.threads, flash=flash)
            for flash in (False, True)
        }
        for flash, name in ((False, "plain"), (True, "flash")):
            print(f"{name} attention: largest logit difference {largest_difference(contexts[flash], tokens):.4g}")
        for depth in map(int, args.depths.split(",")):
            times: dict[tuple[bool, int], list[float]] = {(f, n): [] for f in contexts for n in WIDTHS}
            for context in contexts.values():
                context.clear()
                for start in range(0, depth, 500):
                    context.decode(tokens[start : min(start + 500, depth)], start, output=False)
            for _ in range(args.repeats):
                for (flash, n), taken in times.items():
                    context = contexts[flash]
                    began = perf_counter()
                    context.decode(tokens[:n], depth)
                    context.logits(n)
                    taken.append(1e3 * (perf_counter() - began))
                    context.remove(depth)
            for flash, name in ((False, "plain"), (True, "flash")):
                figures = ", ".join(f"{n} tokens {median(times[flash, n]):.1f} ms" for n in WIDTHS)
                print(f"behind {depth}: {name} attention {figures}", flush=True)
        for context in contexts.values():
            context.close()


if __name__ == "__main__":
    main()
