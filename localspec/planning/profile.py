"""What is known of a pair on this machine: what a pass costs, and what drafting has brought so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.planning.cost_model import CostModel
from localspec.planning.ngram import NgramStatistics

Floats = NDArray[np.float64]

MEMORY = 0.97  # weight of the past per round: a half-life of 23 rounds
PRIOR = 2.0  # rounds' worth of belief in what is promised
TRIAL = 8  # rounds that decide whether drafting pays
REST, LONGEST_REST = 32, 4096  # rounds the drafter then rests, doubled each time it fails again
LISTEN = 256  # rounds before its next trial in which it takes the text in
DOUBT = 512  # rounds before the first trial of a drafter that cannot pay by its own figures
WHOLE = 8  # of so many blocks one is drafted whole, to see what more slots would bring
FORGET = 0.9  # weight of the past per block drafted whole


class AcceptanceCalibration:
    """How far promises were kept, per slot: sums of promised probabilities of survival, and how often it survived."""

    def __init__(self, promised: Sequence[float], survived: Sequence[float]) -> None:
        self.promised, self.survived = np.array(promised, np.float64), np.array(survived, np.float64)

    @classmethod
    def fresh(cls, n_slots: int) -> AcceptanceCalibration:
        return cls([PRIOR] * n_slots, [PRIOR] * n_slots)

    def ratio(self) -> Floats:
        """By what to multiply promises [n_slots]. Behind a slot that promises too much none deserves more trust."""
        trust = self.survived / self.promised
        least = np.minimum.accumulate(trust)
        return np.where(least < 1, least, trust)

    def learn(self, promised: Floats, n_survived: int) -> None:
        """Slots with `promised` [n] were sent, `n_survived` of them kept. What is not sent drifts back to belief."""
        for sums in (self.promised, self.survived):
            sums *= MEMORY
            sums += (1 - MEMORY) * PRIOR
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

    def take(self) -> int:
        """How many to draft now."""
        is_whole, self._turn = self._turn == 0, (self._turn + 1) % WHOLE
        return len(self.tokens) if is_whole else int((self.tokens / self.seconds).argmax()) + 1

    def learn(self, gains: Sequence[Floats], draft: Floats, verify: Floats) -> None:
        """Of n slots `gains[n - 1][m]` tokens are expected to be kept if m are sent; a pass over those and the anchor
        takes `verify[m]` seconds, the draft `draft[n]`."""
        for n, gained in enumerate(gains, 1):
            tokens = 1 + gained[: len(verify)]
            seconds = draft[n] + verify[: len(tokens)]
            best = (tokens / seconds).argmax()
            self.tokens[n - 1] = FORGET * self.tokens[n - 1] + tokens[best]
            self.seconds[n - 1] = FORGET * self.seconds[n - 1] + seconds[best]

    def to_json(self) -> list[Any]:
        return [self.tokens.tolist(), self.seconds.tolist(), self._turn]


class PairProfile:
    """All of it, for one pair with these files, this build and these settings; ready for JSON."""

    def __init__(self, costs: CostModel, n_slots: int) -> None:
        self.costs = costs
        self.acceptance = AcceptanceCalibration.fresh(n_slots)
        self.draft_length = DraftLength.expecting(costs, 1.0)
        self.ngrams = NgramStatistics.fresh()
        self._tokens = self._seconds = 0.0  # of the rounds that drafted, with `MEMORY`
        self._n_trial, self._n_rest, self._rest = 0, 0, REST

    @property
    def is_parked(self) -> bool:
        return self._n_rest > 0

    @property
    def rests_long(self) -> bool:
        """Whether the next trial is so far off that the drafter need not even listen."""
        return self._n_rest > LISTEN

    @property
    def is_doubted(self) -> bool:
        """Whether it is on trial after it has failed again and again, or promised too little from the first."""
        return self._n_trial < TRIAL and self._rest > LISTEN

    @property
    def rate(self) -> float:
        """Tokens a second while drafting; infinite while that is on trial."""
        return self._tokens / self._seconds if self._n_trial >= TRIAL else np.inf

    def drafted(self, n_tokens: int, seconds: float, plain_s: float) -> None:
        """A round that drafted brought `n_tokens` in `seconds`; a plain one takes `plain_s` for one token."""
        self._tokens = MEMORY * self._tokens + n_tokens
        self._seconds = MEMORY * self._seconds + seconds
        self._n_trial += 1
        if self._n_trial < TRIAL:
            return
        if self._tokens * plain_s >= self._seconds:
            self._rest = REST
        else:
            self._n_rest, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
            self._n_trial, self._tokens, self._seconds = 0, 0.0, 0.0

    def expect(self, acceptance_length: float) -> None:
        """Expect this acceptance length, and begin at rest if it could not pay here, whatever a draft's length."""
        stairs = self.costs
        self.draft_length = DraftLength.expecting(stairs, 1 - 1 / acceptance_length)
        n = np.arange(1, stairs.most + 1)
        costs = stairs.draft[np.minimum(n, len(stairs.draft) - 1)] + stairs.verify[2:]
        if (np.minimum(acceptance_length, n + 1) * stairs.verify[1] < costs).all():
            self._n_rest, self._rest = DOUBT, 2 * DOUBT

    def rested(self) -> None:
        """A round without the drafter has passed."""
        self._n_rest -= 1

    def to_json(self) -> dict[str, Any]:
        trust = {"acceptance": [self.acceptance.promised.tolist(), self.acceptance.survived.tolist()]}
        echoes = {"ngrams": [self.ngrams.right.tolist(), self.ngrams.tried.tolist()]}
        state = {name: getattr(self, name) for name in STATE}
        return {"costs": self.costs.to_json(), "draft_length": self.draft_length.to_json(), **trust, **echoes, **state}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PairProfile:
        """What `to_json` wrote; KeyError, TypeError or ValueError for anything else."""
        profile = cls(CostModel(**raw["costs"]), len(raw["acceptance"][0]))
        if min(*profile.costs.verify[1:], *profile.costs.draft[1:]) <= 0:
            raise ValueError("a pass takes no time")
        profile.acceptance = AcceptanceCalibration(*raw["acceptance"])
        profile.draft_length = DraftLength(*raw["draft_length"])
        profile.ngrams = NgramStatistics(*np.array(raw["ngrams"], np.float64).reshape(2, *profile.ngrams.tried.shape))
        for name in STATE:
            setattr(profile, name, type(getattr(profile, name))(raw[name]))
        return profile


STATE = ("_tokens", "_seconds", "_n_trial", "_n_rest", "_rest")
