"""Is the output with the drafter the output without it? Every prompt both ways, token by token.

Where every pass was exact (see `planning.exactness`) bits are promised to be equal, and any difference is one.
Elsewhere two nearly equal logits may swap because a wider pass rounds differently, and that has to be shown: both
answers are decoded again up to the place where they part, one token at a time and in the very passes that were
verified, without accepting anything. At a near-tie the plain token is the best of what is computed alone, the other one
the best of what is computed in the pass. Behind it both go on with the plain answer: later places are judged, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.engine.paths import Draft
from localspec.engine.replay import Rounds
from localspec.pair import Pair
from localspec.planning.exactness import Promise

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """A place where two outputs part: `position` tokens are equal, then comes one or the other (-1: the end).

    `promised`: whether all passes up to there were exact. `width`: tokens of the pass that decided. `logits`: of the
    plain token and of the other one, each decoded alone; `logits_batched`: in that pass (None: it cannot be found).
    """

    prompt: int
    position: int
    plain_token: int
    spec_token: int
    promised: bool
    width: int | None
    logits: tuple[float, float] | None
    logits_batched: tuple[float, float] | None
    near_tie: bool


@dataclass(frozen=True)
class Checked:
    """One prompt: where its outputs part, and whether bits were promised to be equal all along."""

    differences: list[Difference]
    promised: bool

    @property
    def is_different(self) -> bool:
        return not all(d.near_tie for d in self.differences)


@dataclass(frozen=True)
class Report:
    """`identical + near_ties + different` = `prompts`; a prompt counts once, by the worst that was found.

    `promised` of them were promised to be identical to the last bit. `promise`: what holds at default settings.
    """

    promise: Promise
    checked: list[Checked]

    @property
    def prompts(self) -> int:
        return len(self.checked)

    @property
    def promised(self) -> int:
        return sum(one.promised for one in self.checked)

    @property
    def different(self) -> int:
        return sum(one.is_different for one in self.checked)

    @property
    def identical(self) -> int:
        return sum(not one.differences for one in self.checked)

    @property
    def near_ties(self) -> int:
        return self.prompts - self.identical - self.different

    @property
    def details(self) -> list[Difference]:
        return [difference for one in self.checked for difference in one.differences]

    def as_dict(self) -> dict[str, Any]:
        """Counts, every difference, and what was promised, ready for JSON."""
        names = ("prompts", "promised", "identical", "near_ties", "different")
        promise = asdict(self.promise.exactness) | {"default": str(self.promise)}
        return {name: getattr(self, name) for name in names} | {
            "promise": promise,
            "details": [asdict(d) for d in self.details],
        }


def check(
    pair: Pair,
    prompts: Iterable[str],
    *,
    max_tokens: int,
    path: str = "greedy",
    draft_max: int | None = None,
    each: Callable[[Checked], None] = lambda _: None,
) -> Report:
    """Answer every prompt greedily with and without the drafter; `each` follows the progress.

    `path` "auto" is little proof: a planner may draft nothing.
    """
    checked = []
    for n, prompt in enumerate(prompts):
        checked.append(compare(pair, n, prompt, max_tokens=max_tokens, path=path, draft_max=draft_max))
        each(checked[-1])
    return Report(pair.promise, checked)


def compare(
    pair: Pair, index: int, prompt: str, *, max_tokens: int, path: str = "greedy", draft_max: int | None = None
) -> Checked:
    """Prompt number `index` both ways, up to the first place where no near-tie explains why they part."""
    ids, said, promised = pair.encode(prompt), 0, True
    differences: list[Difference] = []
    while said < max_tokens:
        one = _Comparison(pair, ids, max_tokens=max_tokens - said, path=path, draft_max=draft_max)
        promised = promised and one.is_promised
        if one.at is None:
            break
        differences.append(one.judge(index, said))
        token = differences[-1].plain_token
        if not differences[-1].near_tie or token < 0 or pair.vocab.is_eog(token):
            break
        ids, said = ids + one.plain[: one.at + 1], said + one.at + 1
    return Checked(differences, promised)


class _Comparison:
    """One prompt answered both ways: `at` is where they part, None if they do not."""

    def __init__(self, pair: Pair, ids: list[int], **options: Any) -> None:
        self._pair, self._ids, self._exactness = pair, ids, pair.exactness
        draft_max = options.pop("draft_max")
        self._alone: Rounds = self._answer(spec=False, **options | {"path": None})
        self._drafted: Rounds = self._answer(draft_max=draft_max, **options)
        self.plain, spec = _tokens(self._alone), _tokens(self._drafted)
        ends = -1  # behind the last token
        parted = (i for i, (a, b) in enumerate(zip([*self.plain, ends], [*spec, ends], strict=False)) if a != b)
        self.at = next(parted, None)
        self._spec = spec

    @property
    def is_promised(self) -> bool:
        """Whether all passes were exact, up to the one that decided on the place where the outputs part."""
        drafts = [draft for draft, _ in self._drafted]
        return all(self._exactness.covers(draft) for draft in drafts[: self._n_rounds()])

    def judge(self, prompt: int, offset: int) -> Difference:
        """What happened at `at`, `offset` tokens behind the beginning of the answer to prompt number `prompt`."""
        assert self.at is not None
        tokens = ours, theirs = [(*said[self.at :], -1)[0] for said in (self.plain, self._spec)]
        alone, batched = self._row(self._alone), self._row(self._drafted)
        is_swap = _best(alone) == ours and _best(batched) == theirs
        decided = [draft for draft, _ in self._drafted][self._n_rounds() - 1 : self._n_rounds()]
        return Difference(
            prompt,
            self.at + offset,
            ours,
            theirs,
            promised=self.is_promised,
            width=len(decided[0].tokens) + 1 if decided else None,
            logits=_logits(alone, tokens),
            logits_batched=_logits(batched, tokens),
            near_tie=is_swap and not self.is_promised,
        )

    def _answer(self, **options: Any) -> list[tuple[Draft, Sequence[int]]]:
        if not self._exactness.reading:
            self._pair.forget()  # what `_row` does again must not depend on what was cached
        said = [chunk.tokens for chunk in self._pair.stream(self._ids, **options)]
        return list(zip(self._pair.drafts, said, strict=False))

    def _n_rounds(self) -> int:
        """Rounds of the drafted answer up to the one that decided on `at`."""
        n_said = 0
        for n, (_, said) in enumerate(self._drafted, 1):
            n_said += len(said)
            if self.at is not None and n_said > self.at:
                return n
        return len(self._drafted)

    def _row(self, rounds: Rounds) -> Floats | None:
        """Logits of the place `at`, by the passes of `rounds`; None where they do not come to it."""
        assert self.at is not None
        return self._pair.replay(self._ids, rounds, self.at)


def _tokens(rounds: Rounds) -> list[int]:
    return [token for _, said in rounds for token in said]


def _best(row: Floats | None) -> int | None:
    return None if row is None else int(row.argmax())


def _logits(row: Floats | None, tokens: Sequence[int]) -> tuple[float, float] | None:
    """Of two tokens; None where there is no row, or one of the tokens is none."""
    return (float(row[tokens[0]]), float(row[tokens[1]])) if row is not None and min(tokens) >= 0 else None
