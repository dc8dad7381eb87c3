"""Flash attention against plain attention on this machine: ms to decode 1, 4 and 8 tokens behind a long context."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np
from common import arguments

from localspec import models
from localspec.llama import Context, Model

WIDTHS = (1, 4, 8)


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
