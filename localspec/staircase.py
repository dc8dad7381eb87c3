"""Measures what a target pass over n tokens and a drafted block cost on this machine; keeps what a pair has learnt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from localspec.cache import cache_dir
from localspec.drafter import Drafter
from localspec.paths import Path as Chain
from localspec.record import Record, Staircase
from localspec.target import Target

DEPTH = 128  # tokens in memory while measuring
BUDGET_S = 4.0
FEWEST, MOST = 1, 9  # repeats; the first is cold
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 33)  # tokens of a pass that are timed


class Shelf:
    """Where the record of one `key` (files, build, threads) lies between sessions."""

    def __init__(self, key: str) -> None:
        self.path = cache_dir() / "staircase" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def load(self, target: Target, drafter: Drafter) -> Record | None:
        """What is kept, if it fits this pair."""
        try:
            record = Record.from_json(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        fits = record.staircase.most == target.draft_max and len(record.trust.promised) == drafter.block_size - 1
        return record if fits else None

    def keep(self, record: Record) -> None:
        """Write it down; a cache that cannot be written costs a measurement next time, no more."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(record.to_json()), encoding="utf-8")
            part.replace(self.path)
        except OSError:
            pass


def measure(target: Target, drafter: Drafter) -> Staircase:
    """Time the widths again and again until `BUDGET_S` are spent; medians, made monotone. Empties both memories.

    Needs a context of two of the longest passes. Every pass leaves its first token in memory: a recurrent memory cannot
    forget a whole pass. A draft is timed with the injection of one position, which each kept token costs.
    """
    most = target.draft_max + 1
    tokens = np.random.default_rng(0).integers(0, target.model.vocab.n_tokens, most).tolist()
    widths = sorted({min(n, most) for n in WIDTHS})
    verify: dict[int, list[float]] = {n: [] for n in widths}
    draft: list[float] = []
    began = perf_counter()
    depth = min(DEPTH, target.n_ctx - 2 * most + 1)
    features = _fill(target, drafter, depth)
    for repeat in range(MOST + 1):
        if repeat > FEWEST and perf_counter() - began > BUDGET_S:
            break
        for n in widths:
            if target.n_past + most > target.n_ctx:
                _fill(target, drafter, depth)
            chain = Chain(tokens[1:n], [])
            verify[n].append(_timed(lambda c=chain: target.verify(tokens[0], c)))  # type: ignore[misc]
            target.keep([0])
        draft.append(_timed(lambda: drafter.inject(features)))
        draft[-1] += _timed(lambda: drafter.draft(tokens[0], drafter.block_size - 1))
        drafter.rewind(depth)
    target.forget()
    drafter.forget()
    return Staircase(_stairs(verify, most), median(draft[1:]))


def _fill(target: Target, drafter: Drafter, depth: int) -> NDArray[np.float32]:
    """Put `depth` tokens into both memories and nothing else; the features of one position."""
    target.forget()
    drafter.forget()
    target.expose_features(True)
    target.prefill(np.random.default_rng(1).integers(0, target.model.vocab.n_tokens, depth).tolist())
    features = target.features(slice(depth))
    drafter.inject(features)
    return features[:1].copy()


def _timed(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def _stairs(times: dict[int, list[float]], most: int) -> list[float]:
    """Medians without the first, cold repeat, never falling, straight between the widths timed; 0 for width 0."""
    widths = list(times)
    medians = np.maximum.accumulate([median(times[n][1:]) for n in widths])
    return [0.0, *np.interp(np.arange(1, most + 1), widths, medians).tolist()]
