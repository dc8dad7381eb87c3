"""What one round did, and the fold over rounds. Counters carry llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

SOME_GAIN = 1.05  # tokens a round; with fewer nobody notices


@dataclass(frozen=True)
class Round:
    """One round of the loop: `tokens` were emitted, the first `n_accepted` of them drafted. Seconds per step.

    `n_drafted` tokens were verified, up to `n_deep` of them behind each other (all of them, if the draft was a chain).
    """

    tokens: list[int]
    n_drafted: int
    n_accepted: int
    n_deep: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    inject_s: float = 0.0
    total_s: float = 0.0

    @property
    def host_s(self) -> float:
        """Seconds spent outside calls to llama.cpp."""
        return self.total_s - self.draft_s - self.verify_s - self.inject_s


@dataclass
class Stats:
    """Figures of one answer.

    `prompt_n` tokens were prefilled in `prompt_s` seconds, `cached_n` more were in the KV cache. `predicted_n` tokens
    were emitted in `predicted_s` seconds and `n_rounds` rounds, `n_parked` of them while drafting did not pay.
    `draft_n` were drafted, `draft_n_accepted` kept. `drafted_per_slot[k]` counts the rounds that drafted slot k + 1,
    `accepted_per_slot[k]` those that kept it.
    """

    prompt_n: int = 0
    cached_n: int = 0
    prompt_s: float = 0.0
    predicted_n: int = 0
    predicted_s: float = 0.0
    n_rounds: int = 0
    n_parked: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    inject_s: float = 0.0
    drafted_per_slot: list[int] = field(default_factory=list)
    accepted_per_slot: list[int] = field(default_factory=list)

    def add(self, round: Round) -> None:
        """Fold one round in."""
        self.n_rounds += 1
        self.predicted_n += len(round.tokens)
        self.predicted_s += round.total_s
        self.draft_n += round.n_drafted
        self.draft_n_accepted += round.n_accepted
        self.draft_s += round.draft_s
        self.verify_s += round.verify_s
        self.inject_s += round.inject_s
        _count(self.drafted_per_slot, round.n_deep)
        _count(self.accepted_per_slot, round.n_accepted)

    def merge(self, other: Stats) -> None:
        """Add another answer's figures."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, _sum(mine, value) if isinstance(value, list) else mine + value)

    @property
    def acceptance_length(self) -> float:
        """Tokens a round, the bonus included (the papers' τ); 0 before the first round."""
        return self.predicted_n / self.n_rounds if self.n_rounds else 0.0

    @property
    def rests(self) -> bool:
        """Whether drafting rested in most rounds and what was drafted, n-grams too, brought next to nothing."""
        return 2 * self.n_parked > self.n_rounds and self.acceptance_length < SOME_GAIN

    @property
    def accepted_share(self) -> float:
        """Share of the drafted tokens that were kept."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else 0.0

    @property
    def predicted_per_second(self) -> float:
        return self.predicted_n / self.predicted_s if self.predicted_s else 0.0

    @property
    def prompt_per_second(self) -> float:
        return self.prompt_n / self.prompt_s if self.prompt_s else 0.0

    @property
    def host_share(self) -> float:
        """Share of the time spent outside calls to llama.cpp."""
        inside = self.draft_s + self.verify_s + self.inject_s
        return 1 - inside / self.predicted_s if self.predicted_s else 0.0

    @property
    def acceptance_per_slot(self) -> list[float]:
        """For each slot, the share of rounds that drafted it and kept it."""
        kept = self.accepted_per_slot + [0] * len(self.drafted_per_slot)
        return [k / drafted for k, drafted in zip(kept, self.drafted_per_slot, strict=False)]

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived figures, ready for JSON."""
        derived = (
            "acceptance_length",
            "accepted_share",
            "predicted_per_second",
            "prompt_per_second",
            "host_share",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}


def total(stats: Iterable[Stats]) -> Stats:
    """The figures of several answers as one."""
    out = Stats()
    for one in stats:
        out.merge(one)
    return out


def _count(slots: list[int], n: int) -> None:
    slots.extend([0] * (n - len(slots)))
    for k in range(n):
        slots[k] += 1


def _sum(a: list[int], b: list[int]) -> list[int]:
    n = max(len(a), len(b))
    return [x + y for x, y in zip(a + [0] * (n - len(a)), b + [0] * (n - len(b)), strict=True)]
