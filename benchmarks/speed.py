"""Ways of decoding on real prompt sets, alternating: speed over plain decoding, acceptance, by mode and set."""

from __future__ import annotations

import json

from common import arguments, load_pair, read_set

from localspec.evaluation.bench import MODES, bench


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", default="mt_bench,humaneval")
    parser.add_argument("--count", type=int, default=20, help="prompts of each set")
    parser.add_argument("--predict", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", default="plain,greedy,tree,ngram,auto", help=f"of {', '.join(MODES)}")
    parser.add_argument("--draft-max", type=int, help="most tokens drafted a round, in every mode")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with load_pair(args) as pair:
        figures = bench(
            pair,
            {name: read_set(args, name, args.count) for name in args.sets.split(",")},
            modes=args.modes.split(","),
            repeats=args.repeats,
            max_tokens=args.predict,
            temperature=args.temp,
            draft_max=args.draft_max,
        )
    if args.json:
        print(json.dumps(figures))
        return
    for name, mode in figures["modes"].items():
        sets = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in mode["classes"].items())
        print(
            f"{name}: {mode['ratio']:.3f} of plain ({sets}), {mode['predicted_per_second']:.1f} tokens/s, acceptance "
            f"length {mode['acceptance_length']:.3f}, kept {mode['accepted_share']:.0%} of {mode['draft_n']}, outside "
            f"llama.cpp {mode['host_share']:.2%}"
        )


if __name__ == "__main__":
    main()
