"""An answer on a terminal or in a pipe: text as it comes, Ctrl-C between rounds, a line of figures under it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

from localspec.answer import Chunk, Result, Stream
from localspec.cli import console
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


class Thoughts:
    """Reasoning on a terminal: dim, on stderr, an empty line between it and the answer. Where a pipe or a file takes
    the answer it is not shown.
    """

    def __init__(self) -> None:
        self.console = console.err()
        self.shown, self._apart = sys.stdout.isatty() and self.console.is_terminal, True

    def show(self, chunk: Chunk) -> None:
        """What of `chunk` comes before its text."""
        if self.shown and chunk.reasoning:
            self.console.out(chunk.reasoning, style="dim", end="", highlight=False)
            self._apart = False
        if chunk.text and not self._apart:
            self.console.out("\n", highlight=False)
            self._apart = True


def show(stream: Stream, *, quiet: bool = False) -> Result:
    """Write an answer to stdout as it comes, dimmed before it on a terminal what the model thought; returns both.

    Ctrl-C ends it between two rounds and keeps what the memories hold, or at once while the prompt is still read.
    """
    thoughts = Thoughts()
    with Interrupts() as ctrl_c:
        try:
            for chunk in stream:
                ctrl_c.gentle = True
                if not quiet:
                    thoughts.show(chunk)
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
                if ctrl_c.pressed:
                    break
        except KeyboardInterrupt:
            if ctrl_c.gentle:
                raise
        stream.close()
    return stream.result


def still_thinking(result: Result) -> str:
    """What to say where the limit came before the answer."""
    limited = result.finish_reason == "length" and result.reasoning and not result.text
    return "the limit of -n came before the answer: the model was still thinking" if limited else ""


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
        parts.append(f"{stats.cached_n:,} re-used from the KV cache")
    return " · ".join(parts)
