"""Selecting from a lattice what to send to verification: a chain, or a tree.

Everything here works on P [n_slots, K, K] from `probabilities`: P[t, a, b] is the probability that candidate b is right
in slot t when a was right in slot t - 1. Slot 0's predecessor is the anchor; its K rows are equal, row 0 serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from localspec.engine.lattice import Lattice

Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """A chain of tokens, and for each the probability that it and all before it survive verification.

    `q`: where the tokens were drawn, the candidates of each slot and the probabilities they were drawn with.
    """

    tokens: list[int]
    survival: list[float]
    q: Sequence[tuple[NDArray[np.int32], Probabilities]] | None = None

    @property
    def parents(self) -> list[int]:
        return list(range(-1, len(self.tokens) - 1))

    def head(self, n: int) -> Chain:
        """Its first `n` tokens."""
        return self if n >= len(self.tokens) else Chain(self.tokens[:n], self.survival[:n], self.q and self.q[:n])


@dataclass(frozen=True)
class Tree:
    """Tokens with `parents`: the index of each token's predecessor, -1 for the anchor; `survival` as in `Chain`.

    In preorder: a token stands behind its parent, and behind all of its elder siblings' descendants.
    """

    tokens: list[int]
    parents: list[int]
    survival: list[float]

    def head(self, n: int) -> Tree:
        """Its first `n` tokens."""
        return self if n >= len(self.tokens) else Tree(self.tokens[:n], self.parents[:n], self.survival[:n])


Draft = Chain | Tree
NOTHING = Chain([], [])


def depths(draft: Draft) -> list[int]:
    """Distance of each token from the anchor, 1 for those right behind it."""
    out: list[int] = []
    for parent in draft.parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out


def probabilities(lattice: Lattice, temperature: NDArray[np.float64] | float = 1.0) -> Probabilities:
    """P_t(b|a), the row softmax of the scores; a `temperature` (one, or one a slot) above 1 tempers over-confidence."""
    scores = lattice.scores / np.reshape(temperature, (-1, 1, 1))
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True)  # type: ignore[no-any-return]


# -- chains -----------------------------------------------------------------------------------------------------------


def greedy(lattice: Lattice, p: Probabilities | None = None) -> Chain:
    """The greedy walk: in each slot the best candidate behind the one just picked."""
    p = probabilities(lattice) if p is None else p
    picks, row = [], 0
    for behind in p:
        row = int(behind[row].argmax())
        picks.append(row)
    return _chain(lattice, p, picks)


class Expected:
    """For every length the chain of the most expected accepted tokens, all at once and exactly.

    Verification keeps a prefix, so what counts is the sum of the prefix probabilities, not the sum of scores that
    Viterbi maximises. With r slots left from slot t on, V_r(t, a) = max_b P_t(b|a) · (1 + V_{r-1}(t + 1, b)), V_0 = 0.
    """

    def __init__(self, lattice: Lattice, p: Probabilities) -> None:
        self._lattice, self._p = lattice, p
        n, k = len(p), p.shape[1]
        self._best = np.zeros((n, n, k), np.intp)  # [slot, slots left behind it, predecessor]
        value = np.zeros((1, k))  # V of the next slot: [slots left, predecessor]
        for t in reversed(range(n)):
            gains = p[t] * (1.0 + value[:, None, :])
            self._best[t, : n - t] = gains.argmax(axis=2)
            value = np.concatenate((np.zeros((1, k)), gains.max(axis=2)))
        self.gains: Probabilities = value[:, 0]  # expected accepted tokens of the best chain of length 0 … n_slots

    def path(self, length: int) -> Chain:
        """The best chain of `length` slots."""
        picks, row = [], 0
        for t in range(length):
            row = int(self._best[t, length - 1 - t, row])
            picks.append(row)
        return _chain(self._lattice, self._p, picks)


def expected(lattice: Lattice, p: Probabilities | None = None) -> Chain:
    """The chain through all slots of the most expected accepted tokens."""
    return Expected(lattice, probabilities(lattice) if p is None else p).path(len(lattice))


def sampled(
    lattice: Lattice, n: int, weigh: Callable[[NDArray[np.float32]], Probabilities], random: np.random.Generator
) -> Chain:
    """A chain of up to `n` tokens drawn slot by slot from q = `weigh(scores)` [K], for rejection sampling.

    `n` must not depend on what is drawn: a token that is kept because of what it is is no longer distributed as q.
    """
    tokens: list[int] = []
    survival: list[float] = []
    q, row = [], 0
    for ids, scores in zip(lattice.ids[:n], lattice.scores[:n], strict=True):
        weights = weigh(scores[row])
        upto = weights.cumsum()
        row = int(np.searchsorted(upto, random.random() * upto[-1], side="right"))
        tokens.append(int(ids[row]))
        survival.append(float(weights.max()) * (survival[-1] if survival else 1.0))
        q.append((ids, weights))
    return Chain(tokens, survival, q)


def _chain(lattice: Lattice, p: Probabilities, picks: Sequence[int]) -> Chain:
    """The candidates `picks`, one a slot, as tokens and prefix probabilities."""
    tokens, survival, row, alive = [], [], 0, 1.0
    for t, pick in enumerate(picks):
        alive *= float(p[t, row, pick])
        tokens.append(int(lattice.ids[t, pick]))
        survival.append(alive)
        row = pick
    return Chain(tokens, survival)


# -- trees ------------------------------------------------------------------------------------------------------------


class BestFirst:
    """The nodes of largest prefix probability, best first; the first n are the best tree of n nodes.

    A node is never better than its parent, so any number of the best is closed under ancestors. `survival` falls.
    """

    def __init__(self, lattice: Lattice, p: Probabilities, n: int, *, max_leaves: int = 1 << 30) -> None:
        self._lattice = lattice
        self.survival: list[float] = []
        self._nodes: list[tuple[int, int, int]] = []  # parent node, slot, candidate
        chances: list[list[list[float]]] = p.tolist()
        ranked: dict[tuple[int, int], list[int]] = {}  # slot, predecessor -> candidates, best first; few are asked for
        # Who waits for admission: -survival, tie-break, parent's survival, slot, predecessor, rank, parent node.
        heap: list[tuple[float, int, float, int, int, int, int]] = []

        def wait(alive: float, slot: int, row: int, rank: int, parent: int) -> None:
            if slot == len(chances) or rank == len(chances[slot][row]):
                return
            chance = chances[slot][row]
            if (slot, row) not in ranked:
                ranked[slot, row] = sorted(range(len(chance)), key=chance.__getitem__, reverse=True)
            survival = alive * chance[ranked[slot, row][rank]]
            heappush(heap, (-survival, len(heap), alive, slot, row, rank, parent))

        wait(1.0, 0, 0, 0, -1)
        inner, n_leaves = {-1}, 0
        while heap and len(self._nodes) < n:
            negative, _, alive, slot, row, rank, parent = heappop(heap)
            if parent in inner:
                if n_leaves == max_leaves:
                    continue
                n_leaves += 1
            inner.add(parent)
            candidate = ranked[slot, row][rank]
            wait(alive, slot, row, rank + 1, parent)
            wait(-negative, slot + 1, candidate, 0, len(self._nodes))
            self._nodes.append((parent, slot, candidate))
            self.survival.append(-negative)

    def gains(self, n_slots: int) -> Probabilities:
        """Expected accepted tokens of the best trees of 0, 1, 2, … nodes in the first `n_slots` slots."""
        alive = [s for s, (_, slot, _) in zip(self.survival, self._nodes, strict=True) if slot < n_slots]
        return np.concatenate(([0.0], np.cumsum(alive)))

    def tree(self, n: int) -> Tree:
        """The best tree of `n` nodes, in preorder with likelier children first."""
        children: dict[int, list[int]] = {}
        for node, (parent, _, _) in enumerate(self._nodes[:n]):
            children.setdefault(parent, []).append(node)
        tokens, parents, survival = [], [], []
        stack = [(node, -1) for node in reversed(children.get(-1, []))]
        while stack:
            node, parent = stack.pop()
            _, slot, candidate = self._nodes[node]
            tokens.append(int(self._lattice.ids[slot, candidate]))
            parents.append(parent)
            survival.append(self.survival[node])
            stack += [(child, len(tokens) - 1) for child in reversed(children.get(node, []))]
        return Tree(tokens, parents, survival)


def tree(lattice: Lattice, n: int, p: Probabilities | None = None, *, max_leaves: int = 1 << 30) -> Tree:
    """The tree of `n` nodes with the most expected accepted tokens."""
    return BestFirst(lattice, probabilities(lattice) if p is None else p, n, max_leaves=max_leaves).tree(n)


def leaves(parents: Sequence[int]) -> list[list[int]]:
    """For each node of a preorder tree the leaves at or under it; leaf i is the i-th node without a child."""
    inner = set(parents)
    under: list[list[int]] = [[] for _ in parents]
    leaf = 0
    for node in range(len(parents)):
        if node in inner:
            continue
        at = node
        while at >= 0:
            under[at].append(leaf)
            at = parents[at]
        leaf += 1
    return under
