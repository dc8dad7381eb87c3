"""Which encoding should the default target run in, and where does drafting pay?

Re-encodes the target as shipped (Q4_1) with llama.cpp's quantiser and measures each encoding: perplexity on the text
of the prompt sets, the cost of verifying 1 … 8 tokens, and tokens/s on a few prompts, plain and with the default
options, alternating between encodings. The weights of the larger encodings are those of the shipped one, written out:
they say the same and take longer to read, as those of a larger model would. "Echoes alone" never asks the drafter.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from common import arguments, read_set

from localspec.evaluation.bench import bench
from localspec.llama import Context, Model, quantize
from localspec.loading.open import open_pair
from localspec.pair import Pair

WIDTHS = (1, 2, 3, 4, 6, 8)
WAYS = ("plain", "ngram", "auto")


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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--encodings", default="q4_1,q4_0,q8_0,f16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", type=int, default=5, help="prompts of MT-Bench, and of HumanEval")
    parser.add_argument("--predict", type=int, default=200)
    args = parser.parse_args()
    if not (args.model and args.model_draft):
        parser.error("give the target as shipped with -m and the drafter with -md")
    shipped = Path(args.model)
    prompts = {name: read_set(args, name, args.count) for name in ("mt_bench", "humaneval")}
    text = "\n\n".join(prompt for name in prompts for prompt in read_set(args, name))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pairs: dict[str, Pair] = {}
        for name in args.encodings.split(","):
            path = shipped if name == "q4_1" else Path(folder) / f"{name}.gguf"
            if path != shipped:
                quantize(shipped, path, name)
            with Model(path) as model:
                ids = model.vocab.tokenize(text)
                value = perplexity(model, ids, args.threads)
            pair = open_pair(path, Path(args.model_draft), n_ctx=2048, n_threads=args.threads)
            pairs[name] = stack.enter_context(pair)
            costs = pair.tune().costs.verify
            relative = " ".join(f"{n}: {costs[n] / costs[1]:.2f}" for n in WIDTHS)
            one = f"{1e3 * costs[1]:.2f} ms a token"
            print(f"{name}: perplexity {value:.3f} on {len(ids)} tokens; {one}, verify {relative}")
        speeds: dict[str, list[list[float]]] = {name: [] for name in pairs}
        for _ in range(args.repeats):
            for name, pair in pairs.items():
                modes = bench(pair, prompts, modes=WAYS, repeats=1, max_tokens=args.predict)["modes"]
                speeds[name].append([modes[way]["predicted_per_second"] for way in WAYS])
        for name, rows in speeds.items():
            plain, ngram, auto = (median(column) for column in zip(*rows, strict=True))
            ratios = [median(row[i] / row[0] for row in rows) for i in (1, 2)]
            print(
                f"{name}: plain {plain:.1f}, n-grams alone {ngram:.1f} ({ratios[0]:.3f} of plain), with the drafter "
                f"{auto:.1f} tokens/s ({ratios[1]:.3f} of plain)"
            )


if __name__ == "__main__":
    main()
