"""Where localspec keeps what it downloads and finds out, and how a file is written: whole, or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localspec.errors import OptionError


def cache_dir() -> Path:
    """LOCALSPEC_CACHE if that is set, else the user's cache folder; OptionError where neither is a place."""
    from platformdirs import user_cache_path

    if chosen := os.environ.get("LOCALSPEC_CACHE"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise OptionError(f"LOCALSPEC_CACHE is {chosen}, and there is no such user; name a folder.") from error
    try:
        folder = user_cache_path("localspec", appauthor=False)
    except (RuntimeError, KeyError):
        folder = Path("~")
    if not folder.is_absolute():  # "~" stays as it is where the account has no home
        raise OptionError("this account has no home folder to keep files in; set LOCALSPEC_CACHE to a folder.")
    return folder


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to: it takes the place of `path` at the end, or is removed after an error."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write `path` in one step: a reader sees the old text or the new one. Raises OSError."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def fact_path(kind: str, key: str) -> Path:
    """Where the cached fact of that kind about `key` (any text: files, build, settings) is kept."""
    return cache_dir() / kind / hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]


def recall(kind: str, key: str) -> str | None:
    """A fact that `remember` kept, or None; whatever is wrong with the cache only costs finding it out again."""
    try:
        return fact_path(kind, key).read_text(encoding="utf-8")
    except (OSError, ValueError, OptionError):
        return None


def remember(kind: str, key: str, text: str) -> None:
    """Keep a fact about `key` where the cache can be written."""
    try:
        path = fact_path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except (OSError, OptionError):
        return


def is_file(path: Path) -> bool:
    """Whether there is a file; no where a folder on the way may not be entered."""
    try:
        return path.is_file()
    except OSError:
        return False


def free_bytes(path: Path) -> int:
    """Bytes free on the disk where `path` is or will be."""
    return shutil.disk_usage(nearest(path)).free


def nearest(path: Path) -> Path:
    """The nearest of `path` and its parents that exists and may be looked at."""
    for place in (path, *path.absolute().parents):
        try:
            if place.exists():
                return place
        except OSError:  # a folder that may not be entered
            continue
    return Path("/")
