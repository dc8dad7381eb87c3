"""A progress bar on stderr: the same look for whatever takes long, and nothing where stderr is no terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def bar(*columns: ProgressColumn, transient: bool = True) -> Progress:
    """What is done, a bar, `columns` in the unit of the work, and the time left; a context manager.

    `transient`: it leaves no trace when it ends.
    """
    console = Console(stderr=True, highlight=False)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(compact=True),
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )
