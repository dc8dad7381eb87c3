"""The account that decides whether the drafter is asked, and the states that follow from it."""

from __future__ import annotations

import numpy as np
import pytest

from localspec.planning.parking import CREDIT, LONGEST, MOST, PRICE, REFILL, SHARE, TAUGHT, Parking, State


def test_a_plain_round_is_known_before_the_drafter_is_tried() -> None:
    parking = Parking()
    assert not parking.drafts
    for _ in range(TAUGHT):
        parking.passed(1.0, taught=True)
    assert parking.drafts
    parking = Parking()
    for _ in range(LONGEST):
        assert parking.is_control
        parking.passed(1.0, taught=False)
    assert parking.drafts


def test_losses_end_in_rest_and_rest_in_another_trial() -> None:
    parking = Parking(State.DRAFTING)
    n = 0
    while not parking.is_resting:
        parking.drafted(-0.5)
        n += 1
    assert n == pytest.approx(CREDIT / 0.5, abs=1)
    for _ in range(round(PRICE / REFILL)):
        assert not parking.admits(0.0)
        parking.passed(1.0, taught=True)
    for _ in range(round(1 / REFILL)):
        parking.passed(1.0, taught=True)
    assert parking.admits(0.0)
    parking.admit(0.0)
    assert parking.drafts


def test_catching_up_is_paid_for() -> None:
    parking = Parking(State.RESTING, PRICE + 5.0)
    assert not parking.admits(6.0)
    assert parking.admits(5.0)
    parking.admit(5.0)
    assert parking.balance == PRICE
    assert Parking(State.DRAFTING, 3.0).admits(3.0)
    assert not Parking(State.DRAFTING, 3.0).admits(4.0)


def test_savings_are_kept_up_to_a_limit() -> None:
    parking = Parking(State.DRAFTING)
    for _ in range(30):
        parking.drafted(10.0)
    assert parking.balance == MOST


@pytest.mark.parametrize(("saved", "most"), [(0.0, SHARE), (2.0, 8 * SHARE)])
def test_controls_come_back_more_seldom_where_the_gain_is_clear(saved: float, most: int) -> None:
    parking = Parking()
    for _ in range(TAUGHT):
        parking.passed(1.0, taught=True)
    n = 0
    while not parking.is_control:
        parking.drafted(saved)
        n += 1
    assert n == most * TAUGHT


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drift", [-1.0, -0.2, -0.02, 0.02])
def test_the_whole_loss_is_bounded_whatever_the_drafter_does(seed: int, drift: float) -> None:
    """Rounds save `drift` on average, with a spread of 1; the sum never falls below the credit and the refills."""
    rng = np.random.default_rng(seed)
    parking, saved, passed = Parking(), 0.0, 0
    for _ in range(20_000):
        if parking.admits(0.0):
            parking.admit(0.0)
        if parking.drafts:
            one = max(drift + rng.standard_normal(), -3.0)
            saved += one
            parking.drafted(one)
        else:
            passed += 1
            parking.passed(1.0, taught=True)
        assert saved >= -CREDIT - REFILL * passed - 3.0


def test_states_survive_the_session() -> None:
    parking = Parking()
    for step in range(60):
        parking.passed(1.0, taught=True) if step % 2 else parking.drafted(0.3)
        again = Parking(*parking.to_json())
        assert again.to_json() == parking.to_json()
        assert again.drafts == parking.drafts
    with pytest.raises(ValueError, match="asleep"):
        Parking("asleep")
