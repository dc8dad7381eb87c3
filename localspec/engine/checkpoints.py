"""Saved states of a sequence, for models that cannot go back token by token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_CHECKPOINTS = 4
MAX_BYTES = 512 * 2**20  # of all of them together

State = NDArray[np.uint8]


class Checkpoints:
    """A few states of one growing sequence, each at a number of positions; the latest one is always among them."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}  # ascending: a sequence only grows

    def __contains__(self, n: int) -> bool:
        return n in self._states

    def __getitem__(self, n: int) -> State:
        return self._states[n]

    def before(self, n: int) -> int:
        """Positions of the longest state that holds at most `n`; 0 if there is none."""
        return max((at for at in self._states if at <= n), default=0)

    def add(self, n: int, state: State) -> None:
        """Keep `state` of the first `n` positions, beyond all others; make room where there are too many.

        It must not be larger than `MAX_BYTES`.
        """
        self._states[n] = state
        while len(self._states) > MAX_CHECKPOINTS or self.n_bytes > MAX_BYTES:
            del self._states[self._cheapest()]

    def truncate(self, n: int) -> None:
        """Drop the states of more than `n` positions: what they hold has been taken back."""
        self._states = {at: state for at, state in self._states.items() if at <= n}

    @property
    def n_bytes(self) -> int:
        return sum(state.nbytes for state in self._states.values())

    def _cheapest(self) -> int:
        """The state whose loss costs the fewest tokens to read again; not the latest."""
        places = list(self._states)
        gaps = {at: at - before for before, at in zip([0, *places], places[:-1], strict=False)}
        return min(gaps, key=lambda at: gaps[at])
