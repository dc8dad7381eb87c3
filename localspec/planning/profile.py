"""What is known of a pair on this machine: what a pass costs, and what drafting has brought so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.planning.cost_model import CostModel
from localspec.planning.ngram import NgramStatistics
from localspec.planning.parking import Parking, State

Floats = NDArray[np.float64]

DECAY = 0.97  # weight of the past per round: a half-life of 23 rounds
PRIOR = 2.0  # rounds' worth of weight of the drafter's own probabilities
TRIAL = 8  # rounds that drafted before their own rate counts, not the expected one
WHOLE = 8  # of so many blocks one is drafted whole, to see what more slots would bring
FORGET = 0.9  # weight of the past per block drafted whole


class AcceptanceCalibration:
    """How well predicted acceptance holds, per slot: sums of predicted probabilities that its token is accepted, and
    how often one was.
    """

    def __init__(self, promised: Sequence[float], survived: Sequence[float]) -> None:
        self.promised, self.survived = np.array(promised, np.float64), np.array(survived, np.float64)

    @classmethod
    def fresh(cls, n_slots: int) -> AcceptanceCalibration:
        return cls([PRIOR] * n_slots, [PRIOR] * n_slots)

    def ratio(self) -> Floats:
        """Multipliers of predicted probabilities [n_slots]; they never rise after a slot whose own is below 1."""
        ratio = self.survived / self.promised
        least = np.minimum.accumulate(ratio)
        return np.where(least < 1, least, ratio)

    def learn(self, promised: Floats, n_survived: int) -> None:
        """Slots with probabilities `promised` [n] were sent, the first `n_survived` of them accepted. Multipliers of
        slots that are not sent drift back to 1."""
        for sums in (self.promised, self.survived):
            sums *= DECAY
            sums += (1 - DECAY) * PRIOR
        self.promised[: len(promised)] += promised
        self.survived[:n_survived] += 1


class DraftLength:
    """How many slots of a block to draft: the tokens and seconds [n_slots] of rounds with so many, by `learn`.

    Fewer slots cost less, more bring something only where long drafts pay. Every `WHOLE`th block is drafted whole, and
    tells what each smaller one would have brought.
    """

    def __init__(self, tokens: Sequence[float], seconds: Sequence[float], turn: int = 0) -> None:
        self.tokens, self.seconds = np.array(tokens, np.float64), np.array(seconds, np.float64)
        self._turn = int(turn)

    @classmethod
    def expecting(cls, costs: CostModel, chance: float) -> DraftLength:
        """Nothing drafted yet, where each slot is right with `chance` if the one before is."""
        n_slots = len(costs.draft) - 1
        slots = cls([0.0] * n_slots, [0.0] * n_slots)
        gains = np.concatenate(([0.0], np.cumprod(np.full(n_slots, chance)).cumsum()))
        slots.learn([gains[: n + 1] for n in range(1, n_slots + 1)], costs.draft, costs.verify[1:])
        return slots

    @property
    def n_slots(self) -> int:
        """How many to draft now."""
        return int((self.tokens / self.seconds).argmax()) + 1 if self._turn else len(self.tokens)

    @property
    def rate(self) -> float:
        """Expected tokens a second of rounds with the best number of slots."""
        return float((self.tokens / self.seconds).max())

    def drafted(self) -> None:
        """A block has been drafted: the next one's turn."""
        self._turn = (self._turn + 1) % WHOLE

    def learn(self, gains: Sequence[Floats], draft: Floats, verify: Floats) -> None:
        """Of n slots `gains[n - 1][m]` tokens are expected to be accepted if m are sent; a pass over those and the
        anchor takes `verify[m]` seconds, the draft `draft[n]`."""
        for n, gained in enumerate(gains, 1):
            tokens = 1 + gained[: len(verify)]
            seconds = draft[n] + verify[: len(tokens)]
            best = (tokens / seconds).argmax()
            self.tokens[n - 1] = FORGET * self.tokens[n - 1] + tokens[best]
            self.seconds[n - 1] = FORGET * self.seconds[n - 1] + seconds[best]

    def to_json(self) -> list[Any]:
        return [self.tokens.tolist(), self.seconds.tolist(), self._turn]


class Source(StrEnum):
    """Where the costs come from."""

    PRIOR = "prior"  # nothing has been measured yet
    BUSY = "busy"  # measured while something else ran
    QUIET = "quiet"


class PairProfile:
    """All of it, for one pair with these files, this build and these settings; ready for JSON.

    Costs are provisional until they are measured on a quiet machine; `unmeasured_s` seconds of answers have passed
    since the last attempt, `n_attempts` have been made.
    """

    def __init__(self, costs: CostModel, n_slots: int, source: Source = Source.QUIET) -> None:
        self.costs, self.source = costs, source
        self.acceptance = AcceptanceCalibration.fresh(n_slots)
        self.draft_length = DraftLength.expecting(costs, 1.0)
        self.ngrams = NgramStatistics.fresh()
        self.parking = Parking()
        self.unmeasured_s, self.n_attempts = 0.0, 0
        self._tokens = self._seconds = 0.0  # of the rounds that drafted, with `DECAY`
        self._n_drafted = 0  # such rounds since the drafter was last tried

    @property
    def is_provisional(self) -> bool:
        return self.source is not Source.QUIET

    @property
    def rate(self) -> float:
        """Tokens a second while drafting; at first what is expected."""
        return self._tokens / self._seconds if self._n_drafted >= TRIAL else self.draft_length.rate

    def drafted(self, n_tokens: int, seconds: float, saved: float) -> None:
        """A round that drafted brought `n_tokens` in `seconds`, and saved so many rounds of plain decoding."""
        self._tokens = DECAY * self._tokens + n_tokens
        self._seconds = DECAY * self._seconds + seconds
        self._n_drafted += 1
        self.draft_length.drafted()
        self.parking.drafted(saved)
        if self.parking.is_resting:
            self._tokens, self._seconds, self._n_drafted = 0.0, 0.0, 0

    def expect(self, acceptance_length: float) -> None:
        """Expect this acceptance length, and begin at rest if it could not pay here, whatever a draft's length."""
        costs = self.costs
        self.draft_length = DraftLength.expecting(costs, 1 - 1 / acceptance_length)
        n = np.arange(1, costs.most + 1)
        seconds = costs.draft[np.minimum(n, len(costs.draft) - 1)] + costs.verify[2:]
        if (np.minimum(acceptance_length, n + 1) * costs.verify[1] < seconds).all():
            self.parking = Parking(State.RESTING, 0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "costs": self.costs.to_json(),
            "source": self.source.value,
            "draft_length": self.draft_length.to_json(),
            "acceptance": [self.acceptance.promised.tolist(), self.acceptance.survived.tolist()],
            "ngrams": [self.ngrams.right.tolist(), self.ngrams.tried.tolist()],
            "parking": self.parking.to_json(),
            "rate": [self._tokens, self._seconds, self._n_drafted],
            "attempts": [self.unmeasured_s, self.n_attempts],
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PairProfile:
        """What `to_json` wrote; KeyError, TypeError or ValueError for anything else."""
        profile = cls(CostModel(**raw["costs"]), len(raw["acceptance"][0]), Source(raw["source"]))
        if min(*profile.costs.verify[1:], *profile.costs.draft[1:]) <= 0:
            raise ValueError("a pass takes no time")
        profile.acceptance = AcceptanceCalibration(*raw["acceptance"])
        profile.draft_length = DraftLength(*raw["draft_length"])
        profile.ngrams = NgramStatistics(*np.array(raw["ngrams"], np.float64).reshape(2, *profile.ngrams.tried.shape))
        profile.parking = Parking(*raw["parking"])
        tokens, seconds, n_drafted = raw["rate"]
        profile._tokens, profile._seconds, profile._n_drafted = float(tokens), float(seconds), int(n_drafted)
        profile.unmeasured_s, profile.n_attempts = float(raw["attempts"][0]), int(raw["attempts"][1])
        return profile
