"""What every command shows on stderr while it works; stdout is for answers and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from rich.console import Console
from rich.progress import MofNCompleteColumn

from localspec.progress import bar

T = TypeVar("T")


def out() -> Console:
    return Console(highlight=False)


def err() -> Console:
    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """A remark on stderr."""
    err().print(text, style="dim", markup=False, soft_wrap=True)


@contextmanager
def status(text: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner on stderr while something loads; nothing when stderr is no terminal."""
    console = err()
    if quiet or not console.is_terminal:
        yield
    else:
        with console.status(text):
            yield


def waiting(text: str, items: Iterator[T], *, quiet: bool = False) -> Iterator[T]:
    """The same items, with a spinner while the next one is not there yet."""
    done = object()
    while True:
        with status(text, quiet=quiet):
            item = next(items, done)
        if item is done:
            return
        yield cast(T, item)


@contextmanager
def progress(text: str, count: int) -> Iterator[Callable[[], None]]:
    """A bar of `count` steps on stderr; yields the function that makes a step."""
    with bar(MofNCompleteColumn()) as steps:
        task = steps.add_task(text, total=count)
        yield lambda: steps.advance(task)
