"""Measures what target passes and drafts cost on this machine, in bounded time."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localspec.engine.drafter import Drafter
from localspec.engine.paths import Chain
from localspec.engine.target import N_BATCH, Target
from localspec.planning.cost_model import SETTLED_S, CostModel
from localspec.planning.quiet import Others

DEPTHS = (128, 640)  # tokens in the KV cache while measuring: first the one, then the other
BUDGET_S = 1.8  # seconds for each depth; widths not reached by then the first time are extrapolated
FILLING_S = 2.0  # if filling the cache for the second depth would take longer, it is left out
MOST = 9  # repeats
DRAFTS = 3  # rounds of drafting a repeat, with one slot and with all
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 33)  # tokens of a pass that are timed
N_FIRST = 4  # of these at least
SPREAD = 0.15  # a quiet machine's repeats lie closer together


class Measurement(NamedTuple):
    """What passes and drafts cost, and whether nothing else ran meanwhile."""

    costs: CostModel
    is_quiet: bool


class Measuring:
    """Times passes of all widths and the narrowest and widest draft with little in the KV caches, then with more.

    Needs a context of two of the longest passes. Every pass leaves its first token in the cache: a recurrent state
    cannot go back over a whole pass. A draft is timed with the injection of one position, which each accepted token
    costs.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self._target, self._drafter = target, drafter
        self._stages: list[_Stage] = []
        self._others, self._is_done = Others(), False

    def run(self) -> None:
        """Measure; empties both caches."""
        target, began = self._target, perf_counter()
        most = target.draft_max + 1
        first = self._stage(min(DEPTHS[0], target.n_ctx - 2 * most + 1))
        filling_s = first.filling_s * DEPTHS[1] / DEPTHS[0]
        is_quick = filling_s < FILLING_S and perf_counter() - began < 2 * BUDGET_S  # not so on a slow or a busy machine
        if is_quick and DEPTHS[1] <= target.n_ctx - 2 * most:
            self._stage(DEPTHS[1])
        target.forget()
        self._drafter.forget()
        self._is_done = True

    def _stage(self, depth: int) -> _Stage:
        stage = _Stage(self._target, self._drafter, depth)
        self._stages.append(stage)
        stage.run()
        return stage

    def result(self) -> Measurement | None:
        """What is known by now: everything after `run`, something where that was interrupted, or nothing."""
        stages = [stage for stage in self._stages if stage.is_usable]
        if not stages:
            return None
        spread = median(stage.spread for stage in stages)
        return Measurement(
            _costs(self._target, self._drafter, stages),
            self._is_done and spread < SPREAD and not self._others.are_busy,
        )


def _costs(target: Target, drafter: Drafter, stages: list[_Stage]) -> CostModel:
    first, last = stages[0], stages[-1]
    widths = np.array(list(first.verify), np.float64)
    a, b = _attention(first, last) if last is not first else (0.0, 0.0)
    empty = np.array([median(times) for times in first.verify.values()]) - first.mean_depth * (a + b * widths)
    rising = np.minimum.accumulate(np.maximum(empty, 1e-9)[::-1])[::-1]  # what disturbed one must not lift the wider
    verify = [0.0, *_prolonged(widths, rising, target.draft_max + 1).tolist()]
    few, *whole = (median(times) for times in first.draft.values())
    draft = np.interp(np.arange(1, drafter.block_size), list(first.draft), [min([few, *whole]), *whole])
    return CostModel(verify, [0.0, *draft.tolist()], max(0.0, median(first.settle or [0.0])), (a, b))


def _prolonged(widths: NDArray[np.float64], seconds: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Seconds of passes over 1 … `most` tokens from those of some `widths`: straight lines, the last one prolonged."""
    out = np.interp(np.arange(1, most + 1), widths, seconds)
    last = int(widths[-1])
    if last < most:
        slope = (seconds[-1] - seconds[0]) / max(last - 1, 1)
        out[last:] = seconds[-1] + slope * np.arange(1, most - last + 1)
    return out


class _Stage:
    """All widths, timed with about `depth` tokens in the cache, again and again until `BUDGET_S` are spent."""

    def __init__(self, target: Target, drafter: Drafter, depth: int) -> None:
        self._target, self._drafter, self._depth = target, drafter, depth
        self._most = target.draft_max + 1
        self._tokens = np.random.default_rng(0).integers(0, target.model.vocab.n_tokens, self._most).tolist()
        self.verify: dict[int, list[float]] = {n: [] for n in sorted({min(n, self._most) for n in WIDTHS})}
        self.draft: dict[int, list[float]] = {n: [] for n in sorted({1, drafter.block_size - 1})}  # by slots
        self.settle: list[float] = []
        self.filling_s, self.mean_depth = 0.0, float(depth)

    @property
    def is_usable(self) -> bool:
        """Whether everything has been timed once."""
        return all(self.draft.values())

    @property
    def spread(self) -> float:
        """How far repeats of the same pass lie apart: the middle half of them by their median, median over widths."""
        many = [times for times in self.verify.values() if len(times) > 2]
        return median((q[2] - q[0]) / q[1] for q in (quantiles(times, n=4) for times in many)) if many else 0.0

    def run(self) -> None:
        began = perf_counter()
        self._features = self._fill()
        self.filling_s = perf_counter() - began
        for n in (self._most, 2, 1):  # the first passes of their kind are slow
            self._pass(n)
        self._began = perf_counter()
        while len(self.draft[1]) < DRAFTS * MOST and (not self.is_usable or not self._is_late):
            self._repeat()
        self.mean_depth = (self._depth + self._target.n_past) / 2

    @property
    def _is_late(self) -> bool:
        return perf_counter() - self._began > BUDGET_S

    def _repeat(self) -> None:
        """Every width once, between passes over one token, as it comes in an answer; then a draft."""
        if self._target.rewind(self._depth) < self._depth:  # a recurrent state
            self._fill()
        self._singles()
        self.verify[1].append(median(self._singles()))
        for i, n in enumerate(list(self.verify)[1:], 2):
            if i > N_FIRST and not self.verify[n] and self._is_late:
                del self.verify[n]
                continue
            self._time(n)
        for n in (n for n in self.draft for _ in range(DRAFTS)):  # the first of a kind are slow
            self._pass(min(n + 1, self._most))
            began = perf_counter()
            self._drafter.inject(self._features)
            self._drafter.draft(self._tokens[0], n)
            self.draft[n].append(perf_counter() - began)
            self._drafter.rewind(self._depth)

    def _time(self, n: int) -> None:
        """A pass over `n` tokens, and how much longer passes over one take afterwards."""
        if self._target.can_branch:
            self._target.rewind(self._depth)
        self.verify[n].append(self._pass(n))
        if self.verify[1][-1] < SETTLED_S:
            times = self._singles()
            self.settle.append(sum(times) - len(times) * self.verify[1][-1])

    def _singles(self) -> list[float]:
        """Passes over one token for as long as a CPU may take to settle, one at least."""
        began, times = perf_counter(), list[float]()
        while not times or perf_counter() - began < SETTLED_S:
            times.append(self._pass(1))
        return times

    def _pass(self, n: int) -> float:
        if self._target.n_past + self._most > self._target.n_ctx:
            self._fill()
        seconds = _timed(lambda: self._target.verify(self._tokens[0], Chain(self._tokens[1:n], [])))
        self._target.commit([0])
        return seconds

    def _fill(self) -> NDArray[np.float32]:
        """Put a text into both caches and nothing else; the features of one position."""
        self._target.forget()
        self._drafter.forget()
        self._target.expose_features(True)
        text = np.random.default_rng(1).integers(0, self._target.model.vocab.n_tokens, self._depth).tolist()
        for start in range(0, self._depth, N_BATCH):
            chunk = text[start : start + N_BATCH]
            self._target.prefill(chunk)
            self._drafter.inject(self._target.features(slice(len(chunk))))
        return self._target.features(slice(1)).copy()


def _attention(shallow: _Stage, deep: _Stage) -> tuple[float, float]:
    """(a, b) such that a pass over n tokens takes a + b · n seconds more for each token in the KV cache."""
    both = [n for n in shallow.verify if n in deep.verify]
    widths = np.array(both, np.float64)
    rises = [median(deep.verify[n]) - median(shallow.verify[n]) for n in both]
    b, a = np.polyfit(widths, np.array(rises) / (deep.mean_depth - shallow.mean_depth), 1, w=1 / widths)
    return max(0.0, float(a)), max(0.0, float(b))


def _timed(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began
