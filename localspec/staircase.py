"""Measures what a target pass of n tokens and a draft of m slots cost on this machine, once per pair."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from localspec.cache import cache_dir
from localspec.drafter import Drafter
from localspec.planner import Staircase
from localspec.target import Target

DEPTH = 128  # tokens in memory while measuring
BUDGET_S = 3.0
FEWEST, MOST = 1, 9  # repeats; the first is cold


def load_or_measure(target: Target, drafter: Drafter, key: str) -> Staircase:
    """The staircase kept under `key` (files, build, threads), or a fresh one, kept; it empties both memories."""
    path = cache_dir() / "staircase" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        staircase = Staircase(kept["verify"], kept["draft"])
        if len(staircase.draft) == drafter.block_size and len(staircase.verify) == drafter.block_size + 1:
            return staircase
    except (OSError, ValueError, KeyError, TypeError):
        pass
    staircase = measure(target, drafter)
    _keep(path, staircase)
    return staircase


def measure(target: Target, drafter: Drafter) -> Staircase:
    """Time every width, again and again until `BUDGET_S` are spent; medians, made monotone. Empties both memories.

    Needs a context of two blocks at least. Every pass leaves its first token in memory: a recurrent memory cannot
    forget a whole pass.
    """
    most = drafter.block_size
    tokens = np.random.default_rng(0).integers(0, target.model.vocab.n_tokens, most).tolist()
    verify: list[list[float]] = [[] for _ in range(most)]
    draft: list[list[float]] = [[] for _ in range(most - 1)]
    began = perf_counter()
    _fill(target, drafter, min(DEPTH, target.n_ctx - 2 * most + 1))
    for repeat in range(MOST + 1):
        if repeat > FEWEST and perf_counter() - began > BUDGET_S:
            break
        for n in range(1, most + 1):
            if target.n_past + most > target.n_ctx:
                _fill(target, drafter, min(DEPTH, target.n_ctx - 2 * most + 1))
            verify[n - 1].append(_timed(lambda n=n: target.verify(tokens[:n])))  # type: ignore[misc]
            target.rollback(target.n_past - n + 1)
        for n in range(1, most):
            draft[n - 1].append(_timed(lambda n=n: drafter.draft(tokens[0], n)))  # type: ignore[misc]
    target.forget()
    drafter.forget()
    return Staircase(_stairs(verify), _stairs(draft))


def _fill(target: Target, drafter: Drafter, depth: int) -> None:
    """Put `depth` tokens into both memories and nothing else."""
    target.forget()
    drafter.forget()
    target.expose_features(True)
    target.prefill(np.random.default_rng(1).integers(0, target.model.vocab.n_tokens, depth).tolist())
    drafter.inject(target.features(depth))


def _timed(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def _stairs(times: list[list[float]]) -> list[float]:
    """Medians without the first, cold repeat, never falling; a 0 in front for width 0."""
    medians = [median(taken[1:]) for taken in times]
    return [0.0, *np.maximum.accumulate(medians).tolist()]


def _keep(path: Path, staircase: Staircase) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"verify": list(staircase.verify), "draft": list(staircase.draft)}))
    except OSError:
        return  # a read-only home only means to measure again next time
