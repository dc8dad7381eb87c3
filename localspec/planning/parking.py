"""Whether the drafter is asked at all: an account of what it has saved and cost, and the states that follow from it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

CREDIT = 10.0  # rounds of plain decoding that a drafter nothing is known of may cost
MOST = 64.0  # savings beyond this are not kept: so much a drafter that no longer pays may cost before it rests
REFILL = 0.01  # of the time spent without the drafter; it may be lost again on trying it
PRICE = 8.0  # what the account must hold before a drafter that rests is tried again
TAUGHT, LONGEST = 4, 24  # a control ends after so many rounds that told what a plain one takes, or that many in all
SHARE, RARE = 16, 8  # so many times as many rounds as a control had draft before the next one, or `RARE` times that
CLEAR = 0.25  # where rounds save more than this, a plain one's time matters less: controls are rarer


class State(StrEnum):
    CONTROL = "control"  # a few rounds without the drafter, to see what they take now
    DRAFTING = "drafting"  # the drafter is asked
    RESTING = "resting"  # it does not pay


class Parking:
    """When to draft, from an account in rounds of plain decoding.

    Rounds that drafted pay in what they saved (or lost) against the same text without the drafter. Below 0 the drafter
    rests. Time without it adds `REFILL` of itself, and at `PRICE` there is enough for another trial. So whatever the
    drafter does and however the text changes, drafting costs at most `CREDIT` rounds and `REFILL` of the whole time.
    Savings are only as right as what a plain round is known to take, so now and then some are made.
    """

    def __init__(
        self,
        state: str = State.CONTROL,
        balance: float = CREDIT,
        n_rounds: int = 0,
        n_taught: int = 0,
        n_control: int = LONGEST,
        saved: float = 0.0,
    ) -> None:
        self.state, self.balance = State(state), float(balance)
        self._n_rounds, self._n_taught = int(n_rounds), int(n_taught)  # in this state
        self._n_control, self._saved = int(n_control), float(saved)  # rounds the last control had; since then

    @property
    def drafts(self) -> bool:
        """Whether the drafter is to be asked in the next round."""
        return self.state is State.DRAFTING

    @property
    def is_resting(self) -> bool:
        return self.state is State.RESTING

    @property
    def is_control(self) -> bool:
        return self.state is State.CONTROL

    def admits(self, catch_up: float) -> bool:
        """Whether an answer may use the drafter, where it costs `catch_up` plain rounds to bring it up to date."""
        return self.balance - catch_up >= (PRICE if self.is_resting else 0.0)

    def admit(self, catch_up: float) -> None:
        """Use it in an answer, and pay for that; one that rested is tried again."""
        self.balance -= catch_up
        if self.is_resting:
            self._enter(State.DRAFTING)

    def drafted(self, saved: float) -> None:
        """A round that drafted saved so many rounds of plain decoding."""
        self.balance = min(self.balance + saved, MOST)
        self._n_rounds += 1
        self._saved += saved
        if self.balance < 0:
            self._enter(State.RESTING)
        elif self._needs_control:
            self._enter(State.CONTROL)

    @property
    def _needs_control(self) -> bool:
        often = SHARE * self._n_control
        clear = max(0.0, self._saved / max(self._n_rounds, 1) - CLEAR)
        return self._n_rounds >= often * min(1 + RARE * clear, RARE)

    def passed(self, n: float, *, taught: bool) -> None:
        """A round without the drafter took as long as `n` plain ones; `taught`: it told what one takes."""
        self.balance = min(self.balance + REFILL * n, MOST)
        if self.is_control:
            self._n_rounds += 1
            self._n_taught += taught
            if self._n_taught >= TAUGHT or self._n_rounds >= LONGEST:
                self._n_control = self._n_rounds
                self._enter(State.DRAFTING)

    def _enter(self, state: State) -> None:
        self.state, self._n_rounds, self._n_taught, self._saved = state, 0, 0, 0.0

    def to_json(self) -> list[Any]:
        return [self.state.value, self.balance, self._n_rounds, self._n_taught, self._n_control, self._saved]
