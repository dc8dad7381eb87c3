"""Which encoding should the default target run in? Perplexity, seconds of verify by width, tokens/s with the drafter.

Re-encodes the target as shipped (Q4_1) with llama.cpp's quantiser and measures each encoding: perplexity on the text
of the prompt sets, the cost of verifying 1 … 8 tokens, and spec and plain tokens/s on a few prompts, alternating
between encodings.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from common import arguments, read_set

from localspec.llama import Context, Model, quantize
from localspec.pair import Pair
from localspec.paths import Path as Chain
from localspec.stats import total

WIDTHS = (1, 2, 3, 4, 6, 8)


def perplexity(model: Model, ids: list[int], n_threads: int | None, window: int = 512) -> float:
    """exp of the mean negative log-likelihood of `ids`, in windows of which the second half counts."""
    nll: list[float] = []
    with Context(model, n_ctx=window, n_batch=window, n_threads=n_threads) as context:
        for start in range(0, len(ids) - window, window):
            context.clear()
            chunk = ids[start : start + window]
            context.decode(chunk, 0)
            half = window // 2
            rows = context.logits(window)[half:-1].astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            picked = rows[np.arange(len(rows)), chunk[half + 1 :]]
            nll += list(np.log(np.exp(rows).sum(axis=1)) - picked)
    return float(np.exp(np.mean(nll)))


def staircase(pair: Pair, ids: list[int], repeats: int = 15) -> dict[int, float]:
    """Median ms to verify 1 … 8 tokens behind a prompt of 200."""
    target = pair.engine.target
    out: dict[int, list[float]] = {n: [] for n in WIDTHS}
    pair.engine.start(ids[:200], spec=True)
    for _ in range(repeats):
        for n in WIDTHS:
            began = perf_counter()
            target.verify(ids[200], Chain(ids[201 : 200 + n], []))
            out[n].append(1e3 * (perf_counter() - began))
            target.keep([0])
            target.rewind(199)
    return {n: median(times) for n, times in out.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--encodings", default="q4_1,q8_0,q4_0,f16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft-max", default="1,2,3")
    args = parser.parse_args()
    if not (args.model and args.model_draft):
        parser.error("give the target as shipped with -m and the drafter with -md")
    shipped = Path(args.model)
    prompts = read_set(args, "mt_bench", 5) + read_set(args, "humaneval", 5)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.gguf" for name in args.encodings.split(",")}
        pairs: dict[str, Pair] = {}
        for name, path in files.items():
            if name == "q4_1":
                files[name] = path = shipped
            else:
                quantize(shipped, path, name)
            with Model(path) as model:
                ids = model.vocab.tokenize("\n\n".join(p for s in ("mt_bench", "humaneval") for p in read_set(args, s)))
                value = perplexity(model, ids, args.threads)
            pairs[name] = Pair(path, Path(args.model_draft), n_ctx=2048, n_threads=args.threads)
            stairs = staircase(pairs[name], ids)
            relative = " ".join(f"{n}: {stairs[n] / stairs[1]:.2f}" for n in WIDTHS)
            print(f"{name}: perplexity {value:.3f} on {len(ids)} tokens; {stairs[1]:.2f} ms a token, verify {relative}")
        best: dict[str, float] = {}
        for draft_max in map(int, args.draft_max.split(",")):
            speeds: dict[str, list[float]] = {name: [] for name in pairs}
            for _ in range(args.repeats):
                for name, pair in pairs.items():
                    runs = [pair.generate(p, max_tokens=100, path="greedy", draft_max=draft_max).stats for p in prompts]
                    speeds[name].append(total(runs).predicted_per_second)
            for name in pairs:
                best[name] = max(best.get(name, 0), median(speeds[name]))
            print(f"draft-max {draft_max}: " + ", ".join(f"{n} {median(s):.1f} tokens/s" for n, s in speeds.items()))
        print("best with drafter: " + ", ".join(f"{name} {speed:.1f} tokens/s" for name, speed in best.items()))
        for pair in pairs.values():
            pair.close()


if __name__ == "__main__":
    main()
