"""What a long stage shows: lines in pipes, a bar on a terminal, figures in a log."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from localspec import progress
from localspec.distill.meter import Meter, duration


def test_pipes_get_lines_and_the_log_gets_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Meter("working", 100, tmp_path / "log.jsonl", done=20) as bar:
        bar.advance(30)
        bar.report(20, "nothing yet", {"loss": 0.123456789})
        time.sleep(0.05)
        bar.report(60, "half", {"per_slot": [1 / 3]})
    assert capsys.readouterr().err.splitlines() == ["working: nothing yet", "working: half, 0 s left"]
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        {"loss": 0.12346},
        {"per_slot": [0.33333]},
    ]


def test_a_terminal_gets_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100, color_system=None)
    )
    with Meter("working", 100, tmp_path / "log.jsonl") as bar:
        bar.report(50, "step 7", {})
    assert "working" in screen.getvalue()
    assert "50%" in screen.getvalue()
    assert "step 7" in screen.getvalue()
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(40, "40 s"), (420, "7 min"), (7500, "2 h 05 min"), (89.6, "90 s")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
