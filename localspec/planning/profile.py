"""What is known of a pair on this machine: what a pass costs, and what drafting has brought so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.planning.ngram import Echoes

Floats = NDArray[np.float64]

MEMORY = 0.97  # weight of the past per round: a half-life of 23 rounds
PRIOR = 2.0  # rounds' worth of belief in what is promised
TRIAL = 8  # rounds that decide whether drafting pays
REST, LONGEST_REST = 32, 4096  # rounds the drafter then rests, doubled each time it fails again
LISTEN = 256  # rounds before its next trial in which it takes the text in
SETTLED_S = 0.05  # seconds of passes over one token, until they are as fast as ever again
DOUBT = 512  # rounds before the first trial of a drafter that cannot pay by its own figures
WHOLE = 8  # of so many blocks one is drafted whole, to see what more slots would bring
FORGET = 0.9  # weight of the past per block drafted whole


class Staircase:
    """Seconds of a pass: `verify[n]` for the target over n tokens, `draft[n]` for a block of n slots (index 0: 0).

    `verify` is with nothing in memory; with `attention` = (a, b) a pass over n tokens takes a + b · n seconds more for
    each token there. After a pass over several tokens some CPUs take a while until passes over one are as fast as
    before: `settle` seconds more, summed up. `learn` corrects the figures by what rounds really took, passes apart for
    texts of up to 512, 1,024, 2,048, … tokens.
    """

    def __init__(
        self,
        verify: Sequence[float],
        draft: Sequence[float],
        settle: float = 0.0,
        attention: tuple[float, float] = (0.0, 0.0),
        corrections: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self.verify, self.draft, self.settle = np.array(verify, np.float64), np.array(draft, np.float64), float(settle)
        a, b = self._attention = (float(attention[0]), float(attention[1]))
        self._deeper = a + b * np.arange(len(self.verify))  # seconds of a pass over n tokens per token in memory
        self._corrections = {int(level): np.array(row, np.float64) for level, row in (corrections or {}).items()}

    @property
    def most(self) -> int:
        """The longest draft it knows the cost of."""
        return len(self.verify) - 2

    def at(self, depth: int) -> Floats:
        """`verify` with `depth` tokens in memory."""
        return (self.verify + depth * self._deeper) * self._correction(depth)

    def learn(self, n: int, depth: int, seconds: float) -> None:
        """A pass over `n` tokens took `seconds`. What is far off was disturbed and teaches nothing."""
        if n >= len(self.verify):
            return
        row = self._correction(depth)
        ratio = seconds / float((self.verify[n] + depth * self._deeper[n]) * row[n])
        if 0.4 < ratio < 2.5:
            row *= ratio**0.01
            row[n] *= ratio**0.04

    def learn_draft(self, n_slots: int, seconds: float) -> None:
        """Drafting, selecting and injecting took `seconds` in a round, all that is not the target's pass."""
        self.draft *= min(max(seconds / self.draft[n_slots], 0.4), 2.5) ** 0.05

    def _correction(self, depth: int) -> Floats:
        """Factors for texts about as long; at first those for the longest shorter ones that are known."""
        level = max(0, (depth - 1).bit_length() - 9)
        if level not in self._corrections:
            below = [known for known in self._corrections if known < level]
            self._corrections[level] = (
                self._corrections[max(below)].copy() if below else np.ones(len(self.verify), np.float64)
            )
        return self._corrections[level]

    def to_json(self) -> dict[str, Any]:
        corrections = {str(level): row.tolist() for level, row in self._corrections.items()}
        costs = {"verify": self.verify.tolist(), "draft": self.draft.tolist(), "settle": self.settle}
        return costs | {"attention": self._attention, "corrections": corrections}


class Trust:
    """How far promises were kept, per slot: sums of promised probabilities of survival, and how often it survived."""

    def __init__(self, promised: Sequence[float], survived: Sequence[float]) -> None:
        self.promised, self.survived = np.array(promised, np.float64), np.array(survived, np.float64)

    @classmethod
    def fresh(cls, n_slots: int) -> Trust:
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


class Slots:
    """How many slots of a block to draft: the tokens and seconds [n_slots] of rounds with so many, by `learn`.

    Fewer slots cost less, more bring something only where long drafts pay. Every `WHOLE`th block is drafted whole, and
    tells what each smaller one would have brought.
    """

    def __init__(self, tokens: Sequence[float], seconds: Sequence[float], turn: int = 0) -> None:
        self.tokens, self.seconds = np.array(tokens, np.float64), np.array(seconds, np.float64)
        self._turn = int(turn)

    @classmethod
    def expecting(cls, staircase: Staircase, chance: float) -> Slots:
        """Nothing drafted yet, where each slot is right with `chance` if the one before is."""
        n_slots = len(staircase.draft) - 1
        slots = cls([0.0] * n_slots, [0.0] * n_slots)
        gains = np.concatenate(([0.0], np.cumprod(np.full(n_slots, chance)).cumsum()))
        slots.learn([gains[: n + 1] for n in range(1, n_slots + 1)], staircase.draft, staircase.verify[1:])
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


class Record:
    """All of it, for one pair with these files, this build and these settings; ready for JSON."""

    def __init__(self, staircase: Staircase, n_slots: int) -> None:
        self.staircase = staircase
        self.trust = Trust.fresh(n_slots)
        self.slots = Slots.expecting(staircase, 1.0)
        self.echoes = Echoes.fresh()
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
        stairs = self.staircase
        self.slots = Slots.expecting(stairs, 1 - 1 / acceptance_length)
        n = np.arange(1, stairs.most + 1)
        costs = stairs.draft[np.minimum(n, len(stairs.draft) - 1)] + stairs.verify[2:]
        if (np.minimum(acceptance_length, n + 1) * stairs.verify[1] < costs).all():
            self._n_rest, self._rest = DOUBT, 2 * DOUBT

    def rested(self) -> None:
        """A round without the drafter has passed."""
        self._n_rest -= 1

    def to_json(self) -> dict[str, Any]:
        trust = {"trust": [self.trust.promised.tolist(), self.trust.survived.tolist()]}
        echoes = {"echoes": [self.echoes.right.tolist(), self.echoes.tried.tolist()]}
        state = {name: getattr(self, name) for name in STATE}
        return {"staircase": self.staircase.to_json(), "slots": self.slots.to_json(), **trust, **echoes, **state}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Record:
        """What `to_json` wrote; KeyError, TypeError or ValueError for anything else."""
        record = cls(Staircase(**raw["staircase"]), len(raw["trust"][0]))
        if min(*record.staircase.verify[1:], *record.staircase.draft[1:]) <= 0:
            raise ValueError("a pass takes no time")
        record.trust = Trust(*raw["trust"])
        record.slots = Slots(*raw["slots"])
        record.echoes = Echoes(*np.array(raw["echoes"], np.float64).reshape(2, *record.echoes.tried.shape))
        for name in STATE:
            setattr(record, name, type(getattr(record, name))(raw[name]))
        return record


STATE = ("_tokens", "_seconds", "_n_trial", "_n_rest", "_rest")
