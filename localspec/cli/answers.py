"""An answer on a terminal or in a pipe: text as it comes, Ctrl-C between rounds, a line of figures under it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

from localspec.answer import Result, Stream
from localspec.engine.stats import Stats


def prefill_progress() -> Callable[[int, int], None] | None:
    """Says on a terminal's stderr how much of a long prompt has been read."""
    if not sys.stderr.isatty():
        return None

    def report(done: int, count: int) -> None:
        text = f"reading the prompt: {done:,} of {count:,} tokens" if done < count else ""
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()

    return report


class Interrupts:
    """Ctrl-C while an answer is shown: while it is `gentle` the first one only sets `pressed`; any other interrupts."""

    def __init__(self) -> None:
        self.gentle = self.pressed = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before or signal.SIG_DFL)

    def _press(self, number: int, frame: Any) -> None:
        if self.pressed or not self.gentle:
            raise KeyboardInterrupt
        self.pressed = True


def show(stream: Stream, *, quiet: bool = False) -> Result:
    """Write an answer to stdout as it comes; returns what was said.

    Ctrl-C ends it between two rounds and keeps what the memories hold, or at once while the prompt is still read.
    """
    with Interrupts() as ctrl_c:
        try:
            for chunk in stream:
                ctrl_c.gentle = True
                if not quiet:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
                if ctrl_c.pressed:
                    break
        except KeyboardInterrupt:
            if ctrl_c.gentle:
                raise
        stream.close()
    return stream.result


def figures(stats: Stats) -> str:
    """The line under an answer."""
    parts = [f"{stats.predicted_n} tokens", f"{stats.predicted_per_second:.1f} tokens/s"]
    if stats.rests:
        parts.append("drafting rests: plain decoding is faster here")
    elif stats.draft_n:
        parts += [
            f"{stats.acceptance_length:.2f} a round",
            f"{stats.accepted_share:.0%} of {stats.draft_n} drafted tokens accepted",
        ]
    if stats.cached_n:
        parts.append(f"{stats.cached_n:,} re-used from memory")
    return " · ".join(parts)
