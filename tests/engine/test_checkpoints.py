"""Which states of a sequence are kept."""

from __future__ import annotations

import numpy as np
import pytest

from localspec.engine import checkpoints
from localspec.engine.checkpoints import MAX_CHECKPOINTS, Checkpoints


def kept(*places: int, n_bytes: int = 8) -> tuple[Checkpoints, list[int]]:
    made = Checkpoints()
    for n in places:
        made.add(n, np.full(n_bytes, n % 256, np.uint8))
    return made, [n for n in range(max(places) + 1) if n in made]


def test_the_longest_state_that_fits_is_found() -> None:
    made, _ = kept(10, 30, 70)
    assert [made.before(n) for n in (0, 9, 10, 29, 30, 69, 70, 1000)] == [0, 0, 10, 10, 30, 30, 70, 70]
    assert made[30][0] == 30


def test_what_is_taken_back_is_gone() -> None:
    made, _ = kept(10, 30, 70)
    made.truncate(30)
    assert made.before(1000) == 30
    made.truncate(0)
    assert (made.before(1000), made.n_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("places", "left"),
    [
        ((100, 200, 300, 400), [100, 200, 300, 400]),
        ((100, 110, 300, 400, 500), [100, 300, 400, 500]),
        ((10, 110, 300, 400, 500), [110, 300, 400, 500]),
        ((100, 200, 300, 400, 401), [200, 300, 400, 401]),
        ((1000, 1010, 1020, 1030, 1040, 1050), [1000, 1020, 1040, 1050]),
    ],
)
def test_there_is_room_for_a_few_and_the_one_that_saves_least_goes(places: tuple[int, ...], left: list[int]) -> None:
    """The latest stays, and a long beginning that several prompts share outlasts the turns behind it."""
    assert kept(*places)[1] == left
    assert len(left) == MAX_CHECKPOINTS


def test_they_take_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MAX_BYTES", 100)
    made, left = kept(10, 30, 70, 200, n_bytes=45)
    assert left == [70, 200]
    assert made.n_bytes == 90
