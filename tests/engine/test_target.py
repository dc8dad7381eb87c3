"""The target's memory going back: what can be kept, and what must be read again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from localspec.engine import target as module
from localspec.engine.target import Target
from localspec.errors import BackendError


class FakeContext:
    """Positions 0 … n - 1, of which a sliding window keeps the last `window` (as llama.cpp's SWA cache)."""

    def __init__(self, model: Any, **_: Any) -> None:
        self.held: list[int] = []
        self.window: int = model.n_swa
        self.n_rollback = 0
        self.refuses = False

    def grow(self, n: int) -> None:
        start = self.held[-1] + 1 if self.held else 0
        self.held += range(start, start + n)
        if self.window:
            self.held = self.held[-self.window :]

    def remove(self, start: int, *, seq: int = 0) -> bool:
        if not self.refuses:
            self.held = [position for position in self.held if position < start]
        return not self.refuses

    def first_position(self) -> int:
        return self.held[0] if self.held else -1

    def clear(self) -> None:
        self.held.clear()


def target(monkeypatch: pytest.MonkeyPatch, n: int, *, n_swa: int = 0) -> Target:
    monkeypatch.setattr(module, "Context", FakeContext)
    model: Any = SimpleNamespace(n_swa=n_swa, is_recurrent=False, n_embd=8, path=SimpleNamespace(name="big.gguf"))
    speaker = Target(model, n_ctx=1000)
    speaker.context.grow(n)  # type: ignore[attr-defined]
    speaker.n_past = n
    return speaker


@pytest.mark.parametrize("n", [0, 1, 50, 100, 120])
def test_an_attention_memory_goes_back_anywhere(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    speaker = target(monkeypatch, 100)
    assert speaker.rewind(n) == n
    assert len(speaker.context.held) == min(n, 100)


@pytest.mark.parametrize("n", [10, 50, 68, 84, 90])
def test_a_sliding_window_goes_back_only_while_it_holds_what_comes_before(
    monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Positions 68 … 99 are held; token n needs the 31 positions before it, so nothing below 100 can be kept."""
    speaker = target(monkeypatch, 100, n_swa=32)
    assert speaker.rewind(n) == 0
    assert speaker.context.held == []
    assert speaker.n_past == 0


def test_a_window_that_has_forgotten_nothing_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = target(monkeypatch, 20, n_swa=32)
    assert speaker.rewind(7) == 7
    assert speaker.context.held == list(range(7))


def test_a_memory_that_refuses_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = target(monkeypatch, 100)
    speaker.context.refuses = True  # type: ignore[attr-defined]
    assert speaker.rewind(50) == 0
    assert speaker.context.held == []


def test_a_rollback_that_is_refused_is_an_error_not_a_wrong_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = target(monkeypatch, 100)
    speaker.context.refuses = True  # type: ignore[attr-defined]
    speaker.n_past, speaker._n_batch = 94, 6
    with pytest.raises(BackendError, match=r"big\.gguf .* from 100 to 95"):
        speaker.commit([0])
