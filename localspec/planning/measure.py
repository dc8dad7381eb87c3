"""Measures what target passes and drafts cost on this machine."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localspec.engine.drafter import Drafter
from localspec.engine.paths import Chain
from localspec.engine.target import N_BATCH, Target
from localspec.planning.cost_model import SETTLED_S, CostModel

DEPTHS = (128, 640)  # tokens in memory while measuring: first the one, then the other
BUDGET_S = 1.8  # seconds for each depth; once through all widths it takes, however long
READING_S = 2.0  # if filling the memory for the second depth would take longer, it is left out
MOST = 9  # repeats
DRAFTS = 3  # rounds of drafting a repeat, with one slot and with all
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 33)  # tokens of a pass that are timed


def measure(target: Target, drafter: Drafter) -> CostModel:
    """Time passes of all widths and the narrowest and widest draft with little in memory, passes then with more.

    Empties both memories.

    Needs a context of two of the longest passes. Every pass leaves its first token in memory: a recurrent memory cannot
    forget a whole pass. A draft is timed with the injection of one position, which each kept token costs.
    """
    most, began = target.draft_max + 1, perf_counter()
    stages = [_Stage(target, drafter, min(DEPTHS[0], target.n_ctx - 2 * most + 1))]
    reading_s = stages[0].filling_s * DEPTHS[1] / DEPTHS[0]
    is_quick = reading_s < READING_S and perf_counter() - began < 2 * BUDGET_S  # not so on a slow or a busy machine
    if is_quick and DEPTHS[1] <= target.n_ctx - 2 * most:
        stages.append(_Stage(target, drafter, DEPTHS[1]))
    target.forget()
    drafter.forget()
    first, last = stages[0], stages[-1]
    widths = np.array(list(first.verify))
    a, b = _attention(first, last) if last is not first else (0.0, 0.0)
    empty = np.array([median(times) for times in first.verify.values()]) - first.mean_depth * (a + b * widths)
    rising = np.minimum.accumulate(np.maximum(empty, 1e-9)[::-1])[::-1]  # what disturbed one must not lift the wider
    verify = [0.0, *np.interp(np.arange(1, most + 1), widths, rising).tolist()]
    few, *whole = (median(times) for times in first.draft.values())
    draft = np.interp(np.arange(1, drafter.block_size), list(first.draft), [min([few, *whole]), *whole])
    return CostModel(verify, [0.0, *draft.tolist()], max(0.0, median(first.settle or [0.0])), (a, b))


class _Stage:
    """All widths, timed with about `depth` tokens in memory, again and again until `BUDGET_S` are spent."""

    def __init__(self, target: Target, drafter: Drafter, depth: int) -> None:
        self._target, self._drafter, self._depth = target, drafter, depth
        self._most = target.draft_max + 1
        self._tokens = np.random.default_rng(0).integers(0, target.model.vocab.n_tokens, self._most).tolist()
        self.verify: dict[int, list[float]] = {n: [] for n in sorted({min(n, self._most) for n in WIDTHS})}
        self.draft: dict[int, list[float]] = {n: [] for n in sorted({1, drafter.block_size - 1})}  # by slots
        self.settle: list[float] = []
        began = perf_counter()
        self._features = self._fill()
        self.filling_s = perf_counter() - began
        for n in (self._most, 2, 1):  # the first passes of their kind are slow
            self._pass(n)
        began = perf_counter()
        while len(self.draft[1]) < DRAFTS * MOST and (not self.draft[1] or perf_counter() - began < BUDGET_S):
            self._repeat()
        self.mean_depth = (depth + target.n_past) / 2

    def _repeat(self) -> None:
        """Every width once, between passes over one token, as it comes in an answer; then a draft."""
        if self._target.rewind(self._depth) < self._depth:  # a recurrent memory
            self._fill()
        self._singles()
        self.verify[1].append(median(self._singles()))
        for n in list(self.verify)[1:]:
            if self._target.can_branch:
                self._target.rewind(self._depth)
            self.verify[n].append(self._pass(n))
            if self.verify[1][-1] < SETTLED_S:
                times = self._singles()
                self.settle.append(sum(times) - len(times) * self.verify[1][-1])
        for n in (n for n in self.draft for _ in range(DRAFTS)):  # the first of a kind are slow
            self._pass(n + 1)
            began = perf_counter()
            self._drafter.inject(self._features)
            self._drafter.draft(self._tokens[0], n)
            self.draft[n].append(perf_counter() - began)
            self._drafter.rewind(self._depth)

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
        """Put a text into both memories and nothing else; the features of one position."""
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
    """(a, b) such that a pass over n tokens takes a + b · n seconds more for each token in memory."""
    widths = np.array(list(shallow.verify), np.float64)
    rises = [median(deep.verify[n]) - median(shallow.verify[n]) for n in shallow.verify]
    b, a = np.polyfit(widths, np.array(rises) / (deep.mean_depth - shallow.mean_depth), 1, w=1 / widths)
    return max(0.0, float(a)), max(0.0, float(b))


def _timed(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began
