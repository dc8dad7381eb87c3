"""What every download needs: tries that are repeated, hashes, a bar, one sentence for a full disk."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from localspec.errors import MissingError

if TYPE_CHECKING:
    from rich.progress import TaskID

CHUNK = 1 << 18
TIMEOUT_S = 30.0
N_TRIES = 5  # without a single new byte
MAX_WAIT_S = 300.0  # what a server may ask for before we give up
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
AGAIN = "run `localspec pull` again"

T = TypeVar("T")


class Screen:
    """What a pull shows: lines, and one bar. This one shows nothing."""

    def say(self, text: str) -> None:
        """One line."""

    def progress(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes (0: nobody knows) of what is being done."""


class BrokenOffError(Exception):
    """A try failed in a way that another one may mend; `wait_s`: how long the server asks to wait before that."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def persist(attempt: Callable[[], T], progress: Callable[[], int] = lambda: 0, n_tries: int = N_TRIES) -> T:
    """Call `attempt` until it does not break off; give up after `n_tries` calls without progress."""
    n_failed, n_best = 0, progress()
    while True:
        try:
            return attempt()
        except BrokenOffError as error:
            n_failed = 0 if progress() > n_best else n_failed + 1
            n_best = max(n_best, progress())
            if n_failed >= n_tries or error.wait_s > MAX_WAIT_S:
                raise
            time.sleep(max(n_failed, error.wait_s))


def copy(chunks: Iterable[bytes], file: IO[bytes], end: int, report: Callable[[int], None]) -> None:
    """Write `chunks` up to position `end` of `file`."""
    for chunk in chunks:
        file.write(chunk[: end - file.tell()])
        report(file.tell())
        if file.tell() >= end:
            return


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def sha256(path: Path, report: Callable[[int], None] = lambda done: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in chunks(file):
            digest.update(chunk)
            report(file.tell())
    return digest.hexdigest()


def n_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def disk_errors(folder: Path, variable: str) -> Iterator[None]:
    """Say in one sentence that `folder` cannot be written to; `variable` moves it elsewhere."""
    try:
        yield
    except OSError as error:
        move = f"set {variable} to another folder"
        if error.errno in DISK_FULL:
            raise MissingError(f"the disk that holds {folder} is full: make room or {move}.") from error
        if error.errno in NO_ACCESS:
            reason = os.strerror(error.errno or 0)
            raise MissingError(f"cannot write to {folder} ({reason}): {move}.") from error
        raise


class Terminal(Screen):
    """Lines on stderr and, on a terminal, a bar from the first progress on. A context manager that ends it."""

    def __init__(self) -> None:
        from rich.progress import DownloadColumn

        from localspec.progress import bar

        self._bar = bar(DownloadColumn(), transient=False)
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._bar.add_task(what)
            self._bar.start()
        self._bar.update(self._task, description=what, completed=done, total=total or None)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self._task is not None:
            self._bar.stop()
