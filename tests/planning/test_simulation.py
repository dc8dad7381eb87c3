"""Automatic drafting on simulated machines (benchmarks/planner.py): never worse than plain or n-gram decoding by more
than 2 %, and where drafting pays it drafts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def planner() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(FOLDER))
        yield importlib.import_module("planner")


GPU: dict[str, float] = {"slope": 0.02, "draft": 0.15}
LEAN: dict[str, float] = {"slope": 0.15, "draft": 0.1, "slot": 0.06}
CPU: dict[str, float] = {"slope": 0.6, "draft": 0.6}
NOISE: dict[str, float] = {"noise": 0.15, "wrong": 0.1}
DRIFT: dict[str, float] = {"noise": 0.1, "drift": 1.3}
AFTER: dict[str, float] = {"after": 1.2, "noise": 0.05}


@pytest.mark.parametrize(
    ("machine", "texts"),
    [
        (CPU, {"right": (0.0,)}),
        (CPU | {"wrong": 0.2}, {"right": (0.7,), "repeats": 0.3}),
        (CPU | NOISE, {"right": (0.9,)}),
        (CPU | AFTER, {"right": (0.9,), "repeats": 0.3}),
        (CPU | DRIFT, {"right": (0.7,)}),
        (LEAN, {"right": (0.3,), "said": 0.9}),
        (LEAN | NOISE, {"right": (0.3,), "repeats": 0.3}),
        (LEAN | AFTER, {"right": (0.5,)}),
        (LEAN | DRIFT, {"right": (0.3,), "repeats": 0.3}),
        (LEAN, {"right": (0.8, 0.0)}),
        (GPU | NOISE, {"right": (0.0,), "said": 0.9}),
        (GPU | DRIFT, {"right": (0.3,), "repeats": 0.5}),
    ],
    ids=str,
)
def test_it_is_never_much_worse_than_doing_without(planner: Any, machine: dict[str, float], texts: Any) -> None:
    found = planner.speeds(planner.Machine(**machine), planner.Texts(**texts), 12)
    assert found["ngram"] > 0.98
    assert found["auto"] > 0.98 * max(found["ngram"], 1.0)


@pytest.mark.parametrize(
    ("machine", "texts", "gain"),
    [
        (GPU, {"right": (0.5,)}, 1.45),
        (GPU | NOISE, {"right": (0.7,), "repeats": 0.3}, 2.2),
        (LEAN | {"wrong": 0.2}, {"right": (0.7,)}, 1.3),
        (LEAN | DRIFT, {"right": (0.8,)}, 1.6),
        (LEAN, {"right": (0.9, 0.1)}, 1.2),
        (CPU, {"right": (0.95,)}, 1.05),
    ],
    ids=str,
)
def test_where_drafting_pays_it_drafts(planner: Any, machine: dict[str, float], texts: Any, gain: float) -> None:
    assert planner.speeds(planner.Machine(**machine), planner.Texts(**texts), 12)["auto"] > gain
