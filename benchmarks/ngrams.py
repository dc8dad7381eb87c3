"""How often what followed an earlier place that ends alike follows again, in greedy answers of the default target.

One column where one earlier place is known, one where the latest two agree (where they do not, nothing is sent). These
figures are where `localspec.planning.ngram.NgramStatistics` begins.
"""

from __future__ import annotations

from collections import Counter

from common import arguments, load_pair, read_set

from localspec.planning.ngram import LONGEST, NgramIndex

WIDTHS = {3: "3", 4: "4", 5: "5", **dict.fromkeys(range(6, 10), "6 … 9"), **dict.fromkeys(range(10, 16), "10 … 15")}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", default="mt_bench,humaneval")
    parser.add_argument("--count", type=int, default=30, help="prompts of each set")
    parser.add_argument("--predict", type=int, default=200)
    args = parser.parse_args()
    right: Counter[tuple[str, bool]] = Counter()
    tried: Counter[tuple[str, bool]] = Counter()
    with load_pair(args) as pair:
        for prompt in (text for name in args.sets.split(",") for text in read_set(args, name, args.count)):
            ids = pair.encode(prompt)
            text = ids + pair.generate(ids, max_tokens=args.predict, spec=False).tokens
            index = NgramIndex()
            for n in range(len(ids), len(text)):
                match = index.propose(text[:n], 1)
                if match.tokens:
                    kind = WIDTHS.get(match.matched, f"{LONGEST} or more"), match.agreed > 0
                    tried[kind] += 1
                    right[kind] += match.tokens[0] == text[n]
    print("| tokens matched | one place | two that agree |\n|---|---|---|")
    for width in dict.fromkeys([*WIDTHS.values(), f"{LONGEST} or more"]):
        cells = [f"{right[width, two]} of {tried[width, two]}" for two in (False, True)]
        print(f"| {width} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
