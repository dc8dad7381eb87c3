"""Files of the Hugging Face Hub: what a repository holds, a file's first bytes, a whole file in the ordinary cache.

huggingface_hub knows the endpoint, the login, proxies and the layout of the cache, and does all of that. Only the bytes
are fetched here, over plain HTTP: its own download cannot go on with what an earlier process left, and these files have
many gigabytes. A file is `blobs/<hash>.incomplete` until its hash has been checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from localspec.errors import LocalspecError, MissingError, ModelError, OptionError
from localspec.hub.sources import HubFile
from localspec.hub.transfer import AGAIN, BrokenOffError, Screen, copy, n_bytes, persist, sha256
from localspec.llama import Header, read_header

PEEK = (1 << 23, 1 << 25, 1 << 27)  # bytes within which a header ends: most do in the first 8 MiB
LIST_TRIES = 3
HUB = "https://huggingface.co"
ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-f:]+\])(:\d{1,5})?(/\S*)?", re.IGNORECASE)
BUSY = {408, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository at one commit: `size` in bytes, `digest` its SHA-256 (git's id if it is not in LFS)."""

    repo: str
    file: str
    revision: str
    commit: str
    size: int
    digest: str

    @property
    def url(self) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repo, self.file, revision=self.commit, endpoint=endpoint())

    @property
    def blob(self) -> Path:
        """Where the whole file belongs in the cache."""
        return _folder(self.repo) / "blobs" / self.digest

    @property
    def part(self) -> Path:
        """What has been fetched of it."""
        return self.blob.with_name(f"{self.digest}.incomplete")

    @property
    def n_here(self) -> int:
        return self.size if self.blob.exists() else n_bytes(self.part)


def endpoint() -> str:
    """The Hub's address or the one in HF_ENDPOINT, unless that is empty; OptionError if it is no address."""
    from huggingface_hub import constants

    address = constants.ENDPOINT or HUB
    if not ADDRESS.fullmatch(address):
        raise OptionError(
            f"HF_ENDPOINT is {address!r}, which is no address of a server; set it to one like {HUB}, or unset it."
        )
    return address


def cache_folder() -> Path:
    """The Hugging Face cache (HF_HOME or HF_HUB_CACHE move it)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


@contextmanager
def alone(screen: Screen) -> Iterator[None]:
    """One pull at a time: two would append to the same parts."""
    path = cache_folder() / ".locks" / "localspec.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        screen.say("another pull is at work: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def check_name(repo: str) -> None:
    """Refuse what cannot be the name of a repository."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise OptionError(f"{repo!r} cannot be a repository of the Hub; its name is like user/repo.") from error


def listing(repo: str, revision: str = "main") -> dict[str, RemoteFile]:
    """The GGUF files of a repository by name; MissingError if it cannot be asked."""
    from huggingface_hub import HfApi, constants

    def ask() -> Any:
        with _transient():
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            return HfApi(endpoint()).model_info(repo, revision=revision, files_metadata=True, timeout=timeout)

    with _explained(repo):
        info = persist(ask, n_tries=LIST_TRIES)
    files = {}
    for sibling in info.siblings or []:
        digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        if _is_plain(sibling.rfilename) and re.fullmatch("[0-9a-f]{40,64}", digest or "") and sibling.size is not None:
            files[sibling.rfilename] = RemoteFile(repo, sibling.rfilename, revision, info.sha, sibling.size, digest)
    return files


def remote(source: HubFile, files: dict[str, RemoteFile]) -> list[RemoteFile]:
    """The shards of `source` among the files of its repository; MissingError if they are not what they should be."""
    if lacking := [name for name in source.shards if name not in files]:
        raise MissingError(f"{source.repo} has no file {lacking[0]}; it has {_some(files)}.")
    found = [files[name] for name in source.shards]
    if source.sha256 and found[0].digest != source.sha256:
        whole, now, then = f"{source.repo}/{source.file}", found[0].digest[:12], source.sha256[:12]
        raise MissingError(
            f"{whole} has changed since it was listed (its SHA-256 is {now}…, not {then}…); if you trust it, run: "
            f"localspec pull {whole}"
        )
    return found


def peek(file: RemoteFile, screen: Screen) -> Header:
    """The header of a file of which only the beginning is fetched; ModelError if it is none.

    A reduced vocabulary (d2t) belongs to what `compat` checks, so a drafter is fetched as far as that.
    """
    for n in PEEK:
        part = fetch(file, screen, min(n, file.size))
        try:
            header = read_header(part, size=file.size)
        except ModelError as error:
            if n >= min(file.size, PEEK[-1]) or not _is_gguf(part):
                raise renamed(error, file) from error
            continue
        if "d2t" in header.tensors:
            fetch(file, screen, header.tensors["d2t"].offset + header.tensors["d2t"].n_bytes)
        return header
    raise AssertionError("PEEK is not empty")


def renamed(error: LocalspecError, file: RemoteFile) -> LocalspecError:
    """The same error with the file's own name instead of that of its blob."""
    text = str(error)
    for path in (file.part, file.blob):
        text = text.replace(str(path), f"{file.repo}/{file.file}").replace(path.name, file.file)
    return type(error)(text)


def fetch(
    file: RemoteFile, screen: Screen, end: int | None = None, progress: Callable[[int], None] = lambda n: None
) -> Path:
    """Fetch the first `end` bytes of a file (None: all of it) and return where they lie.

    The whole file is checked by its hash and put into the cache. MissingError if that cannot be done. Under `alone`.
    """
    if file.blob.exists():
        return file.blob
    part, upto = file.part, file.size if end is None else end
    part.parent.mkdir(parents=True, exist_ok=True)
    with _explained(file.repo):
        if n_bytes(part) < upto:
            persist(lambda: _append(file, upto, progress), lambda: n_bytes(part))
    if end is not None:
        return part
    _check(file, screen)
    part.replace(file.blob)
    return file.blob


def link(file: RemoteFile) -> None:
    """Let huggingface_hub enter the checked blob under its own name and revision into the cache."""
    from huggingface_hub import hf_hub_download

    with _explained(file.repo):
        hf_hub_download(file.repo, file.file, revision=file.revision, endpoint=endpoint())


def _append(file: RemoteFile, end: int, progress: Callable[[int], None]) -> None:
    """Append to the part what is missing up to `end`; BrokenOffError if it is not all of it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    asked = {"Range": f"bytes={n_bytes(file.part)}-{end - 1}", "Accept-Encoding": "identity"}
    headers, timeout = build_hf_headers() | asked, constants.HF_HUB_DOWNLOAD_TIMEOUT
    with _transient(), get_session().stream("GET", file.url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        goes_on = response.status_code == 206  # a server without ranges answers 200 and begins anew, and so do we
        with file.part.open("ab" if goes_on else "wb") as out:
            copy(response.iter_raw(), out, end, progress)
    if n_bytes(file.part) < end:
        raise BrokenOffError("the connection broke off")


def _check(file: RemoteFile, screen: Screen) -> None:
    """Delete a part whose hash is not the Hub's, and say so; files outside LFS have none but git's."""
    if len(file.digest) != 64:
        return
    found = sha256(file.part, lambda done: screen.progress(f"Checking {file.file}", done, file.size))
    if found != file.digest:
        file.part.unlink()
        raise MissingError(
            f"{file.repo}/{file.file} has arrived damaged (SHA-256 {found[:12]}…, not {file.digest[:12]}…): it has "
            f"been deleted, {AGAIN}."
        )


def _folder(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def _is_plain(name: str) -> bool:
    return name.endswith(".gguf") and not name.startswith("/") and ".." not in re.split(r"[/\\]", name)


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _some(files: dict[str, RemoteFile], n: int = 8) -> str:
    names = sorted(files)
    more = [f"and {len(names) - n} more"] if len(names) > n else []
    return ", ".join(names[:n] + more) or "no GGUF files"


@contextmanager
def _transient() -> Iterator[None]:
    """Turn what another try may mend into BrokenOffError."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        code, wait = error.response.status_code, error.response.headers.get("Retry-After", "")
        if code not in BUSY:
            raise
        raise BrokenOffError(f"the server answers {code}", float(wait) if wait.isdigit() else 0.0) from error
    except httpx2.TransportError as error:
        raise BrokenOffError(str(error) or type(error).__name__) from error


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Say in one sentence why the Hub does not give what was asked of `repo`."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except LocalEntryNotFoundError as error:  # what hf_hub_download makes of any trouble
        raise MissingError(_sentence(error.__cause__ or error, repo)) from error
    except (BrokenOffError, HfHubHTTPError, OfflineModeIsEnabled) as error:
        raise MissingError(_sentence(error, repo)) from error


def _sentence(error: BaseException, repo: str) -> str:
    from huggingface_hub import errors as e
    from huggingface_hub import get_token

    page = f"{endpoint()}/{repo}"
    login = f"log in with `hf auth login` or set HF_TOKEN, and {AGAIN}"
    if isinstance(error, e.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, so {repo} cannot be fetched: unset it, and {AGAIN}."
    if isinstance(error, e.GatedRepoError):
        if get_token():
            return f"{repo} is gated and your account has no access yet: accept its licence at {page}, and {AGAIN}."
        return f"{repo} is gated: accept its licence at {page}, then {login}."
    if isinstance(error, e.RepositoryNotFoundError):
        return f"there is no repository {repo}, or it is private: look at {page}; if it is there, {login}."
    if isinstance(error, e.HfHubHTTPError):
        code = error.response.status_code
        if code in (401, 403):
            return f"the server does not let you have {repo} ({code}): look at {page}, then {login}."
        return f"the server answers {code} for {error.response.url.path} of {repo}: {AGAIN} later."
    wait_s = error.wait_s if isinstance(error, BrokenOffError) else 0.0
    when = f"in {wait_s:.0f} seconds, it goes on where it was" if wait_s else "and it goes on where it was"
    return f"the download from {repo} failed ({str(error).splitlines()[0]}): {AGAIN} {when}."
