"""Growth of the process over 10,000 rounds in one process, after the first 500. Aim: less than 2 MB."""

from __future__ import annotations

import os
from pathlib import Path

from common import arguments, load_pair, read_set


def resident() -> int:
    """Resident memory, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--path", default="tree", help="how to choose from the pool: auto, greedy, tree")
    args = parser.parse_args()
    prompts = read_set(args, "mt_bench")
    n, start, at = 0, 0, 500
    with load_pair(args) as pair:
        long = pair.vocab.tokenize("\n\n".join(prompts))[:3000]
        pair.generate(long, max_tokens=20)  # the system hands out the context's memory when it is first written
        while n < args.rounds:
            for prompt in prompts:
                n += pair.generate(prompt, max_tokens=300, path=args.path).stats.n_rounds
                if not start and n >= 500:
                    start, at = resident(), n
                if n >= args.rounds:
                    break
        grown = (resident() - start) / 1e6
    print(f"{n} rounds: {start / 1e6:.1f} MB after {at}, grown by {grown:+.2f} MB since")


if __name__ == "__main__":
    main()
