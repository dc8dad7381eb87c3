"""The planner, against a simulated machine and drafter: it never loses much, and takes what there is to win."""

from __future__ import annotations

import numpy as np
import pytest

from localspec.lattice import Lattice
from localspec.planner import Auto, Fixed, Staircase
from localspec.stats import Round

N_SLOTS, K = 7, 4
FLAT = Staircase([0, *[1.0 + 0.02 * n for n in range(8)]], [0, *[0.1 + 0.01 * m for m in range(7)]])  # like a GPU
STEEP = Staircase([0, *[1.0 + 0.7 * n for n in range(8)]], [0, *[0.5 + 0.05 * m for m in range(7)]])  # like a weak CPU


def pool(confidence: float, n: int = N_SLOTS) -> Lattice:
    """A lattice whose greedy step has probability `confidence` in each slot."""
    scores = np.zeros((n, K, K), np.float32)
    scores[:, :, 0] = np.log(confidence / ((1 - confidence) / (K - 1)))
    return Lattice(np.arange(n * K, dtype=np.int32).reshape(n, K), scores)


def seconds(
    cost: Staircase, said: float, right: float, n_tokens: int, plan: Auto | None = None, seed: int = 0
) -> float:
    """Seconds a token for `n_tokens` tokens, with a drafter that claims `said` a slot and is right with `right`."""
    plan, rng = plan or Auto(cost, N_SLOTS), np.random.default_rng(seed)
    spent, emitted = 0.0, 0
    while emitted < n_tokens:
        n_slots = plan.n_slots
        draft = plan.select(pool(said, n_slots)) if n_slots else []
        n = int(np.argmin([*(rng.random(len(draft)) < right), False]))
        spent += cost.draft[n_slots] + cost.verify[len(draft) + 1]
        emitted += n + 1
        plan.learn(Round(tokens=list(range(n + 1)), n_drafted=len(draft), n_accepted=n))
    return spent / emitted


def test_a_sure_drafter_on_a_flat_staircase_sends_everything() -> None:
    assert len(Auto(FLAT, N_SLOTS).select(pool(0.99))) == N_SLOTS


def test_an_unsure_drafter_on_a_steep_staircase_sends_nothing() -> None:
    assert Auto(STEEP, N_SLOTS).select(pool(0.3)) == []


def test_what_is_sent_is_the_greedy_chain() -> None:
    lattice = pool(0.7)
    sent = Auto(FLAT, N_SLOTS).select(lattice)
    assert sent == Fixed(N_SLOTS).select(lattice)[: len(sent)]
    assert sent


@pytest.mark.parametrize("cost", [FLAT, STEEP])
@pytest.mark.parametrize("said", [0.5, 0.99])
def test_a_useless_drafter_costs_next_to_nothing(cost: Staircase, said: float) -> None:
    assert seconds(cost, said, 0.0, 5000) < 1.03 * cost.verify[1]


def test_it_parks_and_tries_again() -> None:
    plan = Auto(STEEP, N_SLOTS)
    seconds(STEEP, 0.99, 0.0, 300, plan)
    assert plan.is_parked
    assert plan.n_slots == 0
    good = seconds(STEEP, 0.99, 0.99, 3000, plan)
    assert not plan.is_parked
    assert good < 0.95 * STEEP.verify[1]


@pytest.mark.parametrize(("said", "right", "slack"), [(0.9, 0.9, 1.1), (0.95, 0.6, 1.1), (0.5, 0.8, 1.2)])
def test_it_comes_close_to_the_best_fixed_length(said: float, right: float, slack: float) -> None:
    def fixed(n: int) -> float:
        expected = 1 + sum(right**k for k in range(1, n + 1))
        return (FLAT.draft[n] + FLAT.verify[n + 1]) / expected

    assert seconds(FLAT, said, right, 5000) < slack * min(fixed(n) for n in range(1, N_SLOTS + 1))


def test_over_confidence_is_learnt() -> None:
    plan = Auto(STEEP, N_SLOTS)
    seconds(STEEP, 0.95, 0.2, 60, plan)
    assert len(plan.select(pool(0.95))) < len(Auto(STEEP, N_SLOTS).select(pool(0.95)))


def test_a_fixed_plan_is_fixed() -> None:
    plan = Fixed(3)
    plan.learn(Round([1], 3, 0))
    assert (plan.n_slots, plan.is_parked, len(plan.select(pool(0.5, 3)))) == (3, False, 3)
