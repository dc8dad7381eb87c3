"""Walking through lattices: hand-made ones, and random ones against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from localspec.engine import paths
from localspec.engine.lattice import Lattice, from_logits


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


# --- against brute force


def random_pool(seed: int, n: int = 4, k: int = 3, spread: float = 2.0) -> Lattice:
    rng = np.random.default_rng(seed)
    scores = (spread * rng.standard_normal((n, k, k))).astype(np.float32)
    scores[0] = scores[0, 0]
    return Lattice(rng.permutation(200)[: n * k].reshape(n, k).astype(np.int32), scores)


def ways(lattice: Lattice, p: np.ndarray, length: int) -> dict[tuple[int, ...], list[float]]:
    """Every chain of `length` tokens, with its prefix probabilities."""
    found = {}
    for picks in itertools.product(range(lattice.ids.shape[1]), repeat=length):
        steps = [p[t, a, b] for t, (a, b) in enumerate(zip([0, *picks], picks, strict=False))]
        found[tuple(int(lattice.ids[t, pick]) for t, pick in enumerate(picks))] = np.cumprod(steps).tolist()
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_expected_chain_is_the_best_of_all_at_every_length(seed: int) -> None:
    pool = random_pool(seed)
    p = paths.probabilities(pool)
    chains = paths.Expected(pool, p)
    assert chains.path(0) == paths.NOTHING
    for length in range(1, 5):
        every = ways(pool, p, length)
        best = max(sum(survival) for survival in every.values())
        chosen = chains.path(length)
        assert sum(chosen.survival) == pytest.approx(best)
        assert chains.gains[length] == pytest.approx(best)
        assert every[tuple(chosen.tokens)] == pytest.approx(chosen.survival)
        assert sum(paths.greedy(pool, p).head(length).survival) <= best + 1e-12


def test_the_expected_chain_beats_the_greedy_one_where_the_best_start_leads_nowhere() -> None:
    """A start of 0.55 with nothing sure behind it loses to one of 0.45 that is sure for three tokens."""
    p = np.full((4, 2, 2), 0.5)
    p[0] = [0.55, 0.45]
    p[1:, 1] = [0.0, 1.0]
    two = Lattice(np.arange(8, dtype=np.int32).reshape(4, 2), np.log(np.maximum(p, 1e-9)).astype(np.float32))
    assert paths.greedy(two).tokens[0] == 0
    assert paths.expected(two).tokens == [1, 3, 5, 7]
    assert paths.Expected(two, p).path(1).tokens == [0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_the_tree_has_the_likeliest_prefixes_of_all(seed: int, n: int) -> None:
    pool = random_pool(seed)
    p = paths.probabilities(pool)
    prefixes = [(survival[-1], tokens) for length in range(1, 5) for tokens, survival in ways(pool, p, length).items()]
    best = sorted(prefixes, reverse=True)[:n]
    tree = paths.tree(pool, n, p)
    walked = []
    for node, parent in enumerate(tree.parents):
        walked.append((*(walked[parent] if parent >= 0 else ()), tree.tokens[node]))
    assert sum(tree.survival) == pytest.approx(sum(chance for chance, _ in best))
    assert set(walked) == {tokens for _, tokens in best}
    assert tree.parents[0] == -1
    before = [-1]  # preorder: a parent is on the way to the node before
    for node, parent in enumerate(tree.parents):
        assert parent in before
        before = [*before[: before.index(parent) + 1], node]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_tree_has_no_more_leaves_than_allowed(most: int) -> None:
    pool = random_pool(3, n=7, k=16, spread=0.5)
    tree = paths.tree(pool, 24, max_leaves=most)
    n_leaves = len(set(range(len(tree.tokens))) - set(tree.parents))
    assert n_leaves <= most
    assert len(tree.tokens) == (7 if most == 1 else 24 if most == 5 else len(tree.tokens))


def test_leaves_under_each_node() -> None:
    assert paths.leaves([-1, 0, 0, 2, -1]) == [[0, 1], [0], [1], [1], [2]]
    assert paths.depths(paths.Tree([1, 2, 3, 4, 5], [-1, 0, 0, 2, -1], [0.1] * 5)) == [1, 2, 2, 3, 1]
    assert paths.leaves([]) == []


def test_a_temperature_a_slot_tempers_each() -> None:
    pool = random_pool(1)
    p, mild = paths.probabilities(pool), paths.probabilities(pool, np.array([1.0, 1.0, 4.0, 4.0]))
    np.testing.assert_allclose(p[:2], mild[:2])
    assert (mild[2:].max(axis=2) < p[2:].max(axis=2)).all()
    np.testing.assert_allclose(mild.sum(axis=2), 1)


def test_a_drawn_chain_follows_q() -> None:
    pool, random = random_pool(2, n=2), np.random.default_rng(0)
    p = paths.probabilities(pool)
    drawn = [paths.sampled(pool, 2, lambda row: np.exp(row) / np.exp(row).sum(), random) for _ in range(4000)]
    for tokens, survival in ways(pool, p, 2).items():
        share = np.mean([path.tokens == list(tokens) for path in drawn])
        assert share == pytest.approx(survival[-1], abs=0.04)
    one = drawn[0]
    assert one.q is not None
    np.testing.assert_allclose(one.q[0][1], p[0, 0], atol=1e-6)


def test_a_drawn_chain_ends_where_it_is_told() -> None:
    pool = random_pool(2)
    path = paths.sampled(pool, 2, lambda row: np.full(3, 1 / 3), np.random.default_rng(0))
    assert (len(path.tokens), len(path.survival), len(path.q or [])) == (2, 2, 2)
    assert path.head(1).q is not None
    assert len(path.head(1).q or []) == 1
