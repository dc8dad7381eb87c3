"""Plain against speculative decoding on real prompt sets, for draft lengths 1 … block - 1. Prints one line each."""

from __future__ import annotations

from common import arguments, load_pair, read_set

from localspec.bench import bench


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", default="mt_bench,humaneval")
    parser.add_argument("--count", type=int, default=20, help="prompts of each set")
    parser.add_argument("--predict", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft-max", default="1,2,3,4,5,7,auto")
    args = parser.parse_args()
    with load_pair(args) as pair:
        for name in args.sets.split(","):
            prompts = read_set(args, name, args.count)
            for length in args.draft_max.split(","):
                draft_max = None if length == "auto" else int(length)
                figures = bench(pair, prompts, repeats=args.repeats, max_tokens=args.predict, draft_max=draft_max)
                spec = figures["spec"]
                slots = " ".join(f"{share:.0%}" for share in spec["accepted_per_slot"])
                print(
                    f"{name}, draft-max {length}: ratio {figures['ratio']:.3f}, "
                    f"plain {figures['plain']['predicted_per_second']:.1f}, spec {spec['predicted_per_second']:.1f} "
                    f"tokens/s, acceptance length {spec['acceptance_length']:.3f}, kept {slots}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
