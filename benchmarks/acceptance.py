"""How well a drafter guesses, through llama.cpp: acceptance length, recall of its pool and share kept, slot by slot.

Every prompt is decoded greedily, one token a round, and at every token the drafter is asked for a whole block; so all
anchors count, and the rounds of any way of choosing from the pool can be replayed. Text that repeats itself (the last
4 tokens occurred before within the last 64) is easy to guess and told apart from fresh text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from common import arguments, load_pair, read_set
from numpy.typing import NDArray

from localspec.engine import paths
from localspec.engine.lattice import Lattice
from localspec.engine.target import MAX_LEAVES
from localspec.pair import Pair
from localspec.planning.ngram import repeats


@dataclass
class Anchors:
    """What was drafted at each anchor of one answer, beside what the target said."""

    tokens: list[int]
    pools: list[Lattice] = field(default_factory=list)

    def kept(self, i: int, n_slots: int) -> int:
        """How many tokens of the greedy walk at anchor i the target agrees with."""
        said = self.tokens[i + 1 : i + 1 + n_slots]
        walk = paths.greedy(self.pools[i]).tokens
        return next((k for k, (a, b) in enumerate(zip(walk, said, strict=False)) if a != b), min(len(walk), len(said)))

    def repeats(self, i: int) -> bool:
        return repeats(self.tokens[: i + 1])


def collect(pair: Pair, prompt: str, max_tokens: int) -> tuple[Anchors, int]:
    """Decode one prompt and keep every pool; also the number of prompt tokens."""
    ids, pools = pair.encode(prompt), list[Lattice]()

    def watch(pool: Lattice) -> paths.Chain:
        pools.append(pool)
        return paths.NOTHING

    n = len(ids)
    answer = Anchors(ids + pair.generate(ids, max_tokens=max_tokens, path=watch).tokens)
    answer.pools = [None] * (n - 1) + pools  # type: ignore[list-item]
    return answer, n


def report(name: str, answers: list[tuple[Anchors, int]], n_slots: int) -> None:
    """Print one line of figures for all anchors, and for fresh and repeating text."""
    anchors = [(a, i) for a, n in answers for i in range(n - 1, len(a.tokens) - n_slots - 1)]
    for kind, wanted in (("all", None), ("fresh", False), ("repeating", True)):
        some = [(a, i) for a, i in anchors if wanted is None or a.repeats(i) == wanted]
        if not some:
            continue
        hit = np.array([[a.tokens[i + 1 + k] in a.pools[i].ids[k] for k in range(n_slots)] for a, i in some])
        kept = np.array([a.kept(i, n_slots) for a, i in some])
        slots = " ".join(f"{(kept > k).mean():.0%}" for k in range(n_slots))
        print(
            f"{name}, {kind}: {len(some)} anchors, acceptance length {1 + kept.mean():.2f}, "
            f"pool recall per slot {' '.join(f'{x:.0%}' for x in hit.mean(axis=0))}, kept per slot {slots}"
        )


def replay(answers: list[tuple[Anchors, int]], choose: Callable[[Lattice], paths.Draft]) -> float:
    """Acceptance length of the rounds that verify what `choose` takes from each pool."""
    rounds = said = 0
    for a, n in answers:
        i = n - 1
        while i < len(a.pools):
            step = 1 + followed(choose(a.pools[i]), a.tokens[i + 1 :])
            rounds, said, i = rounds + 1, said + step, i + step
    return said / rounds


def followed(draft: paths.Draft, said: list[int]) -> int:
    """How many tokens of `said` the draft holds on one way down from the anchor."""
    node, n = -1, 0
    for token in said:
        children = [k for k, parent in enumerate(draft.parents) if parent == node and draft.tokens[k] == token]
        if not children:
            break
        node, n = children[0], n + 1
    return n


def oracle(pool: Lattice, said: list[int]) -> int:
    return next((k for k, (ids, token) in enumerate(zip(pool.ids, said, strict=False)) if token not in ids), len(pool))


def compare(name: str, answers: list[tuple[Anchors, int]], n_slots: int, calibration: NDArray[np.float64]) -> None:
    """Print a line for each way of choosing, beside the greedy chain of the same length."""

    def p(pool: Lattice) -> NDArray[np.float64]:
        return paths.probabilities(pool, calibration[: len(pool)])

    greedy = {n: replay(answers, lambda pool, n=n: paths.greedy(pool).head(n)) for n in range(1, n_slots + 1)}
    for n, length in greedy.items():
        chain = replay(answers, lambda pool, n=n: paths.Expected(pool, p(pool)).path(min(n, len(pool))))
        print(f"{name}, {n} tokens: greedy {length:.3f}, expected {chain:.3f} ({chain / length:.3f})")
    for n in (n_slots, 16, 32):
        length = replay(answers, lambda pool, n=n: paths.tree(pool, n, p(pool), max_leaves=MAX_LEAVES))
        print(f"{name}, tree of {n}: {length:.3f}, over the greedy chain of {n_slots}: {length / greedy[n_slots]:.3f}")
    best = [1 + oracle(a.pools[i], a.tokens[i + 1 :]) for a, n in answers for i in range(n - 1, len(a.pools))]
    print(f"{name}, oracle: {np.mean(best):.3f} (mean over all anchors)")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", default="mt_bench,vicuna_bench,humaneval")
    parser.add_argument("--count", type=int, default=20, help="prompts of each set")
    parser.add_argument("--predict", type=int, default=200)
    args = parser.parse_args()
    with load_pair(args) as pair:
        for name in args.sets.split(","):
            answers = [collect(pair, prompt, args.predict) for prompt in read_set(args, name, args.count)]
            report(name, answers, pair.block_size - 1)
            compare(name, answers, pair.block_size - 1, pair.drafting.calibration)


if __name__ == "__main__":
    main()
