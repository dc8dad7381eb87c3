"""How much to draft, so that drafting never costs more than it brings on this machine.

A round that drafts m slots and sends n of them to verification costs `draft[m] + verify[n + 1]` seconds and emits one
token plus those that are accepted. The planner sends as many as maximise expected tokens a second, none included, and
parks drafting altogether while plain decoding is the faster way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from localspec.lattice import Lattice
from localspec.paths import greedy
from localspec.stats import Round

MEMORY = 0.97  # weight of the past per round: a half-life of 23 rounds
PRIOR = 2.0  # rounds' worth of belief in the drafter's own probabilities
TRIAL = 8  # rounds that decide whether drafting pays
REST, LONGEST_REST = 32, 1024  # rounds it is then parked, doubled each time it fails again


@dataclass(frozen=True)
class Staircase:
    """Measured seconds: `verify[n]` for a target pass over n tokens, `draft[m]` for drafting m slots; index 0 is 0."""

    verify: Sequence[float]
    draft: Sequence[float]


class Plan(Protocol):
    """What the loop asks before, in and after each round."""

    n_slots: int  # how many slots to draft in the next round
    is_parked: bool  # True while drafting rests because it does not pay

    def select(self, lattice: Lattice) -> list[int]:
        """The tokens to send to verification."""

    def learn(self, round: Round) -> None:
        """Take in what became of the round."""


class Fixed:
    """A fixed number of slots, by default all of the greedy chain, as llama.cpp drafts; 0 is plain decoding."""

    is_parked = False

    def __init__(self, n_slots: int, select: Callable[[Lattice], list[int]] | None = None) -> None:
        self.n_slots, self._select = n_slots, select

    def select(self, lattice: Lattice) -> list[int]:
        return self._select(lattice) if self._select else greedy(lattice).tokens

    def learn(self, round: Round) -> None:
        """A fixed plan learns nothing."""


class Auto:
    """The greedy chain at the length that pays best, by the pool's probabilities and what became of earlier ones."""

    def __init__(self, staircase: Staircase, n_slots: int) -> None:
        self._cost, self._most = staircase, n_slots
        self._promised = np.full(n_slots, PRIOR)  # per slot: summed probabilities of survival, and how many survived
        self._survived = np.full(n_slots, PRIOR)
        self._sent: list[int] = []
        self._offered: list[float] = []
        self._tokens = self._seconds = 0.0  # of the drafting rounds, with `MEMORY`
        self._n_trial, self._n_rest, self._rest = 0, 0, REST
        self.n_slots, self.is_parked = n_slots, False

    def select(self, lattice: Lattice) -> list[int]:
        """As much of the greedy chain as maximises expected tokens a second."""
        path = greedy(lattice)
        self._offered = path.survival
        trust = (self._survived / self._promised)[: len(lattice)]
        least = np.minimum.accumulate(trust)  # behind a slot that promises too much, no slot deserves more trust
        trust = np.where(least < 1, least, trust)
        expected = np.cumsum(np.minimum(np.array(path.survival) * trust, 1.0))
        rates = [1 / self._seconds_of(len(lattice), 0)]
        rates += [(1 + gain) / self._seconds_of(len(lattice), n) for n, gain in enumerate(expected, 1)]
        return path.tokens[: int(np.argmax(rates))]

    def learn(self, round: Round) -> None:
        """Take in what became of a round."""
        if self.is_parked:
            self._n_rest -= 1
            if self._n_rest == 0:
                self.is_parked, self.n_slots = False, self._most
            return
        n = round.n_drafted
        for counts in (self._promised, self._survived):  # what is not sent drifts back to being believed
            counts *= MEMORY
            counts += (1 - MEMORY) * PRIOR
        self._promised[:n] += self._offered[:n]
        self._survived[: round.n_accepted] += 1
        self._tokens = MEMORY * self._tokens + len(round.tokens)
        self._seconds = MEMORY * self._seconds + self._seconds_of(self.n_slots, n)
        self._sent = [*self._sent[-15:], n]
        self.n_slots = min(self._most, max(self._sent) + 1)
        self._n_trial += 1
        if self._n_trial >= TRIAL:
            self._judge()

    def _judge(self) -> None:
        """Park if the latest drafting rounds were slower than plain decoding would have been."""
        if self._tokens / self._seconds >= 1 / self._cost.verify[1]:
            self._rest = REST
            return
        self._n_rest, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        self._n_trial, self._tokens, self._seconds, self._sent = 0, 0.0, 0.0, []
        self.is_parked, self.n_slots = True, 0

    def _seconds_of(self, n_slots: int, n_sent: int) -> float:
        return self._cost.draft[n_slots] + self._cost.verify[n_sent + 1]
