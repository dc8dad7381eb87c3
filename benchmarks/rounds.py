"""What the planner expects of a round and what it really takes, by kind of round.

Predicted are the seconds of the cost model at the time of each round, real are the whole rounds. A line's ratio away
from that of plain rounds says that the planner weighs this kind wrongly.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import ClassVar

from common import arguments, load_pair, read_set

from localspec.engine.stats import Round
from localspec.planning.auto import Auto
from localspec.planning.proposal import AutoChoice

Line = tuple[float, float, int]  # predicted and real seconds, tokens


class Watched(Auto):
    """Notes what became of every round."""

    lines: ClassVar[dict[str, list[Line]]] = defaultdict(list)

    def learn(self, choice: AutoChoice, round: Round) -> None:
        predicted = float(choice.proposal.costs[len(choice.draft.tokens)])
        sent = "nothing" if not choice.draft.tokens else "pool" if choice.promised is not None else "n-gram"
        kind = f"{'drafted' if choice.proposal.n_slots else 'not drafted'}, sent {sent}"
        self.lines[kind].append((predicted, round.total_s, len(round.tokens)))
        super().learn(choice, round)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", default="mt_bench,humaneval")
    parser.add_argument("--count", type=int, default=10, help="prompts of each set")
    parser.add_argument("--predict", type=int, default=200)
    args = parser.parse_args()
    import localspec.planning.plans as plans

    plans.Auto = Watched  # type: ignore[misc]
    with load_pair(args) as pair:
        pair.settle()
        for prompt in (text for name in args.sets.split(",") for text in read_set(args, name, args.count)):
            pair.generate(prompt, max_tokens=args.predict, path="auto")
        assert pair.profile is not None
        print(f"parking: {pair.profile.parking.state}, balance {pair.profile.parking.balance:.1f} plain rounds")
    print("| kind of round | rounds | tokens a round | predicted ms | real ms, median | real / predicted, median |")
    print("|---|---|---|---|---|---|")
    for kind, lines in sorted(Watched.lines.items()):
        predicted, real, tokens = zip(*lines, strict=True)
        ratio = median(b / a for a, b in zip(predicted, real, strict=True))
        print(
            f"| {kind} | {len(lines)} | {sum(tokens) / len(lines):.2f} | {1e3 * sum(predicted) / len(lines):.2f} | "
            f"{1e3 * median(real):.2f} | {ratio:.2f} |"
        )


if __name__ == "__main__":
    main()
