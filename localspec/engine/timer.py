"""What the parts of one round take."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Timer:
    """Seconds of one round since the timer was made: `total_s`, and of them those in each of the three parts."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self.draft_s = self.verify_s = self.inject_s = 0.0

    @property
    def total_s(self) -> float:
        return perf_counter() - self._began

    def draft(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Make the call that drafts."""
        began = perf_counter()
        result = call(*args, **options)
        self.draft_s = perf_counter() - began
        return result

    def verify(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Make the call that verifies."""
        began = perf_counter()
        result = call(*args, **options)
        self.verify_s = perf_counter() - began
        return result

    def inject(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Make the call that commits and injects."""
        began = perf_counter()
        result = call(*args, **options)
        self.inject_s = perf_counter() - began
        return result
