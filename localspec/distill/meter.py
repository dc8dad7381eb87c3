"""Progress of a long stage: a bar with the time left on a terminal, a line now and then in pipes, figures in a log."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import TaskProgressColumn, TextColumn

from localspec.progress import bar


class Meter:
    """Shows how far `stage` is, `total` being all of it; a context manager.

    Each row of `log` (JSON lines, appended) is what `report` was given.
    """

    def __init__(self, stage: str, total: float, log: Path, *, done: float = 0.0) -> None:
        self._bar = bar(TaskProgressColumn(), TextColumn("{task.fields[note]}"))
        self._stage, self._log, self._is_terminal = stage, log, self._bar.console.is_terminal
        self._task = self._bar.add_task(stage, total=total, note="")
        self._total, self._begin, self._done_before = total, time.monotonic(), done
        self.advance(done)

    def advance(self, done: float) -> None:
        """`done` of the total is reached."""
        self._bar.update(self._task, completed=min(done, self._total))

    def report(self, done: float, note: str, figures: dict[str, Any]) -> None:
        """Show `note` beside the bar or on a line of its own, and keep `figures`."""
        self.log(figures)
        self._bar.update(self._task, completed=min(done, self._total), note=note)
        if not self._is_terminal:
            left = self._left_s(done)
            time_left = "" if left is None else f", {duration(left)} left"
            print(f"{self._stage}: {note}{time_left}", file=sys.stderr, flush=True)

    def log(self, figures: dict[str, Any]) -> None:
        """Keep a row of figures without showing it."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_rounded(figures)) + "\n")

    def _left_s(self, done: float) -> float | None:
        made = done - self._done_before
        return (time.monotonic() - self._begin) * max(self._total - done, 0.0) / made if made > 0 else None

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def duration(seconds: float) -> str:
    """`2 h 05 min`, `7 min` or `40 s`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value
