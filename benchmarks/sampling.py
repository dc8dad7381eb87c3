"""At a temperature: share of drafted tokens kept by rejection, by matching, and by matching with the target's noise.

The same prompts, the same number of tokens drafted a round. Matching draws the draft as llama.cpp does, along the most
likely tokens, and keeps it where the target draws the same.
"""

from __future__ import annotations

from common import arguments, load_pair, read_set

from localspec.engine import paths
from localspec.engine.stats import total
from localspec.options import Options

WAYS: dict[str, Options] = {
    "rejection against q (path sampled)": {"path": "sampled"},
    "matching, most likely chain": {"path": paths.greedy},
    "matching, chain with the target's noise (path greedy)": {"path": "greedy"},
    "matching, tree of 16 with the target's noise (path tree)": {"path": "tree"},
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", default="mt_bench,humaneval")
    parser.add_argument("--count", type=int, default=20, help="prompts of each set")
    parser.add_argument("--predict", type=int, default=200)
    parser.add_argument("--temp", type=float, default=0.8)
    args = parser.parse_args()
    with load_pair(args) as pair:
        for name in args.sets.split(","):
            prompts = read_set(args, name, args.count)
            for way, options in WAYS.items():
                shared: Options = {"max_tokens": args.predict, "temperature": args.temp}
                stats = total(
                    pair.generate(prompt, **(shared | options | {"seed": seed})).stats
                    for seed, prompt in enumerate(prompts)
                )
                print(
                    f"{name}, {way}: kept {stats.accepted_share:.1%} of {stats.draft_n}, "
                    f"acceptance length {stats.acceptance_length:.3f}, first token {stats.acceptance_per_slot[0]:.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
