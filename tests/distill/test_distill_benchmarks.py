"""The scripts behind the tables and curves of the drafter: what can be wrong before hours of training."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import pytest

from localspec.distill.options import Options
from localspec.distill.start import Shape
from localspec.distill.store import NONE, Meta, Store, read

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def ablations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("distill_ablations")


@pytest.fixture
def curves(ablations: ModuleType) -> ModuleType:
    return importlib.import_module("distill_curves")


def test_every_variant_is_another_drafter_or_training(ablations: ModuleType) -> None:
    args = argparse.Namespace(layers=2, vocab_size=8192, compile=True, threads=2, begin=Path("run"))
    shape, options = ablations.variant(ablations.BEGUN, args, 1)
    assert (shape.n_layers, options.init) == (1, "run")
    made = [ablations.variant(name, args, 1) for name in ablations.VARIANTS]
    assert made[0] == (Shape(), Options(steps=1, n_threads=2, **ablations.BASE))
    assert len(set(made)) == len(made)


def test_costs_leave_out_what_happens_once(
    ablations: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the new line takes twice as long as the base's, and its first one is compiled meanwhile."""
    seconds = itertools.chain([5.0, 90.0], itertools.cycle([1.0, 2.0]))
    monkeypatch.setattr(ablations, "timed", lambda steps: next(seconds))
    for name in ("read_data", "TargetFile", "fresh_drafter", "Trainer"):
        monkeypatch.setattr(ablations, name, MagicMock())
    args = argparse.Namespace(layers=2, vocab_size=8192, compile=True, threads=2, out=tmp_path, target=None, data=None)
    (tmp_path / "costs.json").write_text('{"1 layer": 0.5}')
    assert ablations.costs(["1 layer", "3 layers"], args) == {"1 layer": 0.5, "3 layers": 2.0}
    monkeypatch.delattr(ablations, "Trainer")  # from the file now
    assert ablations.costs(["3 layers"], args)["3 layers"] == 2.0


def test_the_table_has_a_line_a_variant(ablations: ModuleType) -> None:
    text = {"acceptance_length": 1.5, "recall_per_slot": [0.75]}
    row = {
        "name": "base",
        "cost": 1.0,
        "n_anchors": 2_000_000,
        "figures": {"fresh": text, "repeating": text},
        "mb": 20.0,
    }
    row |= {"draft_ms": 3.25, "predicted_per_second": 99.6, "draft_max": 2, "ratio": 1.25}
    head, rule, line = ablations.table([row]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert line == "| base | 1.00 | 2.00 M | 1.500 | 1.500 | 75% | 20.0 | 3.2 | 100 at 2 drafted | 1.250 |"


def test_a_part_of_the_data_is_its_first_chats(curves: ModuleType, tmp_path: Path) -> None:
    with Store(tmp_path / "data", Meta("t", "0", 4, (1, 2), 99)) as store:
        for n in (5, 6, 7, 8):
            store.append(np.full(n, n, np.int32), np.zeros((n, 8), np.float16), np.full(n, NONE), [(0, 2)], [(2, n)])
    part = read(curves.part_of(tmp_path / "data", Fraction(1, 2), tmp_path / "part"))
    assert [chat.n for chat in part.chats] == [5, 6]
    assert part.tokens.tolist() == [5] * 5 + [6] * 6


def test_a_log_becomes_a_curve_and_a_plot(curves: ModuleType, tmp_path: Path) -> None:
    text = {"acceptance_length": 1.5, "recall_per_slot": [0.75]}
    rows = [{"step": 1, "loss": 3.0}]
    rows += [
        {"step": n, "n_anchors": 512 * n, "elapsed_s": n, "eval_loss": 2.0, "fresh": text, "repeating": text}
        for n in (5, 9)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    points = curves.over_steps(tmp_path)
    assert [point["n_anchors"] for point in points] == [2560, 4608]
    assert "| 2,560 | 1.500 | 1.500 | 75% |" in curves.table("anchors", "n_anchors", points)
    curves.plot({"anchors": ("n_anchors", points)}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
