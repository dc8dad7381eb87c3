"""Prefill of 2,000 tokens with the drafter attached over plain prefill, alternating. Aim: at most 1.25."""

from __future__ import annotations

from statistics import median

from common import arguments, load_pair, read_set


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with load_pair(args) as pair:
        ids = pair.vocab.tokenize("\n\n".join(read_set(args, "mt_bench")))[:2000]
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(2 * (args.repeats + 1)):
            spec = (repeat + repeat // 2) % 2 == 0  # A B B A …
            pair.forget()
            took = pair.generate(ids, max_tokens=1, spec=spec, path="greedy").stats.prompt_s
            if repeat >= 2:
                seconds[spec].append(took)
    plain, spec_s = median(seconds[False]), median(seconds[True])
    ratio = median(b / a for a, b in zip(seconds[False], seconds[True], strict=True))
    print(f"{len(ids)} tokens: plain {plain:.3f} s, with drafter {spec_s:.3f} s, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
