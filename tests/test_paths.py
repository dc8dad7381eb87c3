"""Walking through hand-made lattices."""

from __future__ import annotations

import itertools

import numpy as np

from localspec import paths
from localspec.lattice import Lattice, from_logits


def pool(ids: list[list[int]], scores: list[list[list[float]]]) -> Lattice:
    return Lattice(np.array(ids, np.int32), np.array(scores, np.float32))


def test_greedy_follows_the_row_of_the_candidate_it_picked() -> None:
    """Slot 1 picks its index 1, so only row 1 of slot 2 counts, though row 0 has the highest score of all."""
    two = pool([[10, 11], [20, 21]], [[[0, 5], [0, 5]], [[99, 0], [1, 2]]])
    assert paths.greedy(two).tokens == [11, 21]


def test_greedy_takes_the_best_score_not_the_first_index() -> None:
    assert paths.greedy(pool([[4, 8, 6]], [[[-3, -1, -2]] * 3])).tokens == [8]


def test_greedy_of_an_empty_lattice_is_empty() -> None:
    assert paths.greedy(Lattice(np.zeros((0, 4), np.int32), np.zeros((0, 4, 4), np.float32))).tokens == []


def test_greedy_gives_plain_integers() -> None:
    assert all(type(token) is int for token in paths.greedy(pool([[1, 2]], [[[0, 1], [0, 1]]])).tokens)


def test_greedy_on_logits_is_the_argmax_of_each_slot() -> None:
    logits = np.random.default_rng(1).standard_normal((7, 100)).astype(np.float32)
    assert paths.greedy(from_logits(logits, 16)).tokens == logits.argmax(axis=1).tolist()


def test_greedy_does_not_depend_on_the_order_of_the_candidates() -> None:
    rng = np.random.default_rng(2)
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    scores = rng.standard_normal((3, 4, 4)).astype(np.float32)
    scores[0] = scores[0, 0]
    walk = paths.greedy(Lattice(ids, scores)).tokens
    for order in itertools.permutations(range(4)):
        turned_ids, turned = ids.copy(), scores.copy()
        turned_ids[1], turned[1], turned[2] = ids[1, order], scores[1][:, order], scores[2][order, :]
        assert paths.greedy(Lattice(turned_ids, turned)).tokens == walk
