"""Is the output with the drafter the output without it? Every prompt both ways, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from localspec.pair import Pair

NEAR_TIE = 1e-2  # relative distance of the two best logits below which batch width may decide


@dataclass(frozen=True)
class Difference:
    """The first position where two outputs part, and the plain decoder's two best logits there."""

    prompt: int
    position: int
    plain_token: int
    spec_token: int
    best: tuple[int, int]
    logits: tuple[float, float]
    near_tie: bool


@dataclass(frozen=True)
class Report:
    """`identical + near_ties + different` = `prompts`."""

    prompts: int
    details: list[Difference]

    @property
    def near_ties(self) -> int:
        return sum(d.near_tie for d in self.details)

    @property
    def different(self) -> int:
        return len(self.details) - self.near_ties

    @property
    def identical(self) -> int:
        return self.prompts - len(self.details)

    def as_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("prompts", "identical", "near_ties", "different")}
        return counts | {"details": [asdict(d) for d in self.details]}


def check(
    pair: Pair,
    prompts: Iterable[str],
    *,
    max_tokens: int,
    path: str = "greedy",
    draft_max: int | None = None,
    each: Callable[[int, Difference | None], None] = lambda *_: None,
) -> Report:
    """Answer every prompt greedily with and without the drafter; `each(index, difference)` follows the progress.

    `path` "auto" is little proof: a planner may draft nothing.
    """
    details, n = [], 0
    for n, prompt in enumerate(prompts, 1):
        difference = compare(pair, n - 1, prompt, max_tokens=max_tokens, path=path, draft_max=draft_max)
        if difference:
            details.append(difference)
        each(n, difference)
    return Report(n, details)


def compare(
    pair: Pair, index: int, prompt: str, *, max_tokens: int, path: str = "greedy", draft_max: int | None = None
) -> Difference | None:
    """The first difference between plain and speculative output for one prompt, or None."""
    ids = pair.encode(prompt)
    plain = pair.generate(ids, max_tokens=max_tokens, spec=False).tokens
    spec = pair.generate(ids, max_tokens=max_tokens, path=path, draft_max=draft_max).tokens
    if plain == spec:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, spec, strict=False)) if a != b), min(len(plain), len(spec)))
    best, logits = _two_best(pair, ids + plain[:at])
    tied = abs(logits[0] - logits[1]) <= NEAR_TIE * max(abs(logits[0]), abs(logits[1]))
    ours, theirs = _at(plain, at), _at(spec, at)
    return Difference(index, at, ours, theirs, best, logits, tied and {ours, theirs} == set(best))


def _two_best(pair: Pair, ids: list[int]) -> tuple[tuple[int, int], tuple[float, float]]:
    """The plain decoder's two best tokens after `ids`, and their logits."""
    row = pair.logits(ids)
    first, second = (int(i) for i in np.argsort(row)[:-3:-1])
    return (first, second), (float(row[first]), float(row[second]))


def _at(tokens: list[int], position: int) -> int:
    """A token, or -1 behind the end."""
    return tokens[position] if position < len(tokens) else -1
