"""Three ways of attention on this machine, plain, flash, and exact (flash with V in bf16): exactness and cost.

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

from localspec.hub import registry
from localspec.llama import Context, Model

WIDTHS = (1, 4, 8)


def largest_difference(context: Context, tokens: NDArray[np.int32], depth: int) -> float:
    """Largest logit difference between batches of 1 and of 2, 3, 4, 8 tokens, at 16 positions behind `depth`."""
    rows: dict[int, list[NDArray[np.float32]]] = {}
    for width in (1, 2, 3, 4, 8):
        context.clear()
        for start in range(0, depth, 300):
            context.decode(tokens[start : min(start + 300, depth)], start, output=False)
        rows[width] = []
        for start in range(depth, depth + 16, width):
            n = min(width, depth + 16 - start)
            context.decode(tokens[start : start + n], start)
            rows[width].append(context.logits(n).copy())
    single = np.concatenate(rows.pop(1))
    return max(float(abs(np.concatenate(other) - single).max()) for other in rows.values())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--depths", default="200,600,1500")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    path = args.model or registry.get(registry.DEFAULT).target_path()
    tokens = np.random.default_rng(0).integers(100, 40_000, 4096).astype(np.int32)
    with Model(path) as model:
        ways = {"plain": {"flash": False}, "flash": {"flash": True}, "exact": {"exact": True}}
        contexts = {
            name: Context(model, n_ctx=4096, n_batch=512, n_threads=args.threads, **way) for name, way in ways.items()
        }
        for name, context in contexts.items():
            differences = [largest_difference(context, tokens, depth) for depth in (64, 600)]
            print(f"{name}: largest logit difference {max(differences):.4g}", flush=True)
        for depth in map(int, args.depths.split(",")):
            times: dict[tuple[str, int], list[float]] = {(way, n): [] for way in contexts for n in WIDTHS}
            reading = {}
            for name, context in contexts.items():
                context.clear()
                began = perf_counter()
                for start in range(0, depth, 500):
                    context.decode(tokens[start : min(start + 500, depth)], start, output=False)
                context.synchronize()
                reading[name] = perf_counter() - began
            for _ in range(args.repeats):
                for (name, n), taken in times.items():
                    context = contexts[name]
                    began = perf_counter()
                    context.decode(tokens[:n], depth)
                    context.logits(n)
                    taken.append(1e3 * (perf_counter() - began))
                    context.remove(depth)
            for name in contexts:
                figures = ", ".join(f"{n} tokens {median(times[name, n]):.1f} ms" for n in WIDTHS)
                print(f"behind {depth}, {name}: {figures}, read in {reading[name]:.2f} s", flush=True)
        for context in contexts.values():
            context.close()


if __name__ == "__main__":
    main()
