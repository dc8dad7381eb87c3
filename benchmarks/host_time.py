"""Share of a round spent outside llama.cpp: selection, acceptance, text, bookkeeping. Aim: at most 3 %."""

from __future__ import annotations

from common import arguments, load_pair, read_set

from localspec.engine.stats import total


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--path", default="auto", help="how to choose from the pool: auto, greedy, expected, tree")
    args = parser.parse_args()
    with load_pair(args) as pair:
        prompts = read_set(args, "mt_bench", 10)
        stats = total(pair.generate(prompt, max_tokens=100, path=args.path).stats for prompt in prompts)
    per_round = {
        name: 1e3 * getattr(stats, f"{name}_s") / stats.n_rounds for name in ("draft", "verify", "inject", "predicted")
    }
    print(f"{stats.n_rounds} rounds; ms a round: " + ", ".join(f"{k} {v:.2f}" for k, v in per_round.items()))
    print(
        f"outside llama.cpp: {1e3 * stats.host_share * stats.predicted_s / stats.n_rounds:.3f} ms a round, "
        f"{stats.host_share:.2%} of it"
    )


if __name__ == "__main__":
    main()
