"""What a long context costs on the CPU, with ggml's attention and with the native part's: the two alternate.

Prints the ms of a pass over 1, 4 and 8 tokens behind nothing, 500 and 2,000 tokens, medians, all else being the same;
and what the passes over 1 cost in those behind nothing, those over 8 in those over 1. `exact` is ggml's attention as
localspec uses it where it has no native part: F16 keys and BF16 values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
from common import arguments
from numpy.typing import NDArray

from localspec.hub import registry
from localspec.llama import Context, Model, native

DEPTHS, WIDTHS = (0, 500, 2000), (1, 4, 8)
WAYS = {"stock": (False, False), "exact": (False, True), "ours": (True, False)}  # name: our attention?, exact memory?


def prepared(model: Model, tokens: NDArray[np.int32], depth: int, exact: bool, n_threads: int | None) -> Context:
    """A context with `depth` tokens in memory."""
    context = Context(model, n_ctx=depth + 256, n_batch=256, n_threads=n_threads, flash=True, exact=exact)
    for start in range(0, depth, 256):
        context.decode(tokens[start : min(start + 256, depth)], start, output=False)
    return context


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true", help="of all threads: for machines that do other things too")
    args = parser.parse_args()
    library = native.state().library
    if library is None:
        parser.error(f"the native part is {native.state().detail}")
    clock = process_time if args.cpu_time else perf_counter
    with Model(Path(args.model) if args.model else registry.get(registry.DEFAULT).target_path()) as model:
        run(model, library.localspec_kernels_attention, args.depths, args.repeats, args.threads, clock)


def run(
    model: Model,
    switch: Callable[[int], int],
    depths: Sequence[int],
    repeats: int,
    n_threads: int | None,
    clock: Callable[[], float],
) -> None:
    tokens = np.random.default_rng(0).integers(1000, model.vocab.n_tokens, 8192).astype(np.int32)
    first: dict[str, float] = {}
    print(
        "behind   way     "
        + "".join(f"{f'over {n}':>10}" for n in WIDTHS)
        + "   over 1 / behind nothing   over 8 / over 1"
    )
    for depth in depths:
        contexts = {way: prepared(model, tokens, depth, exact, n_threads) for way, (_, exact) in WAYS.items()}
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(repeats):
            for way, context in contexts.items():
                switch(WAYS[way][0])
                for width in WIDTHS:
                    start = clock()
                    context.decode(tokens[depth : depth + width], depth)
                    times[way, width].append(1000 * (clock() - start))
                    context.remove(depth)
        switch(True)
        for way, context in contexts.items():
            context.close()
            of = [median(times[way, width]) for width in WIDTHS]
            first.setdefault(way, of[0])
            columns = "".join(f"{ms:>10.2f}" for ms in of)
            print(f"{depth:>6}   {way:<8}{columns}   {of[0] / first[way]:>23.2f}   {of[-1] / of[0]:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
