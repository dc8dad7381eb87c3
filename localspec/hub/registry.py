"""Which target goes with which drafter, and where both lie on this machine.

One TOML file in `models/` per pair, and `unlisted.toml` for models that have a drafter but cannot be listed. Nothing
but `localspec pull` (`localspec.hub.pull`) touches the network.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from localspec.errors import MissingError, OptionError
from localspec.hub.sources import HERE, HubFile, PackageFile, Source, WheelMember
from localspec.machine import ram
from localspec.storage import cache_dir

__all__ = [
    "DEFAULT",
    "HubFile",
    "PackageFile",
    "PairEntry",
    "Side",
    "Source",
    "WheelMember",
    "cache_dir",
    "fits",
    "get",
    "names",
    "unlisted",
]

DEFAULT = "smollm2-135m"
UNLISTED = HERE / "unlisted.toml"
OVERHEAD = 1.15  # memory over the weights: the KV cache, what is being computed, the tables of the vocabulary

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Side:
    """Target or drafter of a pair: one source for each quantisation, the default one first.

    `model` is the checkpoint that the files were made from, as its repository is called on the Hub.
    """

    files: Mapping[str, Source]
    model: str | None = None
    license: str | None = None

    @property
    def source(self) -> Source:
        """What `pull` fetches."""
        return next(iter(self.files.values()))

    def path(self) -> Path | None:
        """The first of the files that is here."""
        return next((path for source in self.files.values() if (path := source.path())), None)

    def only(self, quant: str) -> Side | None:
        """The same with one quantisation, in any spelling of upper and lower case; None if there is no such file."""
        chosen = {name: source for name, source in self.files.items() if name.casefold() == quant.casefold()}
        return replace(self, files=chosen) if chosen else None

    def as_dict(self) -> dict[str, Any]:
        path = self.path()
        files = {
            quant: {
                "name": source.name,
                "repo": source.repo if isinstance(source, HubFile) else None,
                "bytes": source.n_bytes,
                "here": source.path() is not None,
            }
            for quant, source in self.files.items()
        }
        return {"model": self.model, "license": self.license, "path": str(path) if path else None, "files": files}


@dataclass(frozen=True, slots=True)
class PairEntry:
    """One pair: where its files come from, how to run them, and how sure all of it is.

    `name` may carry a quantisation of the target, as in `qwen3-4b:Q8_0`. `arch` is the target's architecture,
    `drafter_kind` dflash1 or dflash2. `block_size` is a cross-check; the drafter's header decides. `thinking` is the
    mode the drafter was trained in (on, off, or none: the target has no such mode; None: not stated); `gated` is False
    where there is no sign of a gate and None where nobody has looked; `certainty` has a grade A to C for the drafter's
    `files` and for its `ids`; `sampling` is what its makers recommend, or publish their figures at.
    """

    name: str
    summary: str
    arch: str
    drafter_kind: str
    target: Side
    drafter: Side
    block_size: int | None = None
    thinking: str | None = None
    gated: bool | None = None
    certainty: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, float] = field(default_factory=dict)
    measured: tuple[Mapping[str, Any], ...] = ()

    def target_path(self) -> Path:
        """Where the target lies; MissingError if it is not here."""
        return self._here(self.target)

    def drafter_path(self) -> Path:
        """Where the drafter lies; MissingError if it is not here."""
        return self._here(self.drafter)

    def is_here(self) -> bool:
        return self.target.path() is not None and self.drafter.path() is not None

    @property
    def n_bytes(self) -> int | None:
        """Size of the two files that `pull` fetches; None where one of them is not known."""
        sizes = [side.source.n_bytes for side in (self.target, self.drafter)]
        return sum(size for size in sizes if size) if all(sizes) else None

    def as_dict(self) -> dict[str, Any]:
        """What `localspec models --json` prints of it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("target", "drafter")}
        sides = {"target": self.target.as_dict(), "drafter": self.drafter.as_dict()}
        return plain | sides | {"bytes": self.n_bytes, "fits": fits(self.n_bytes), "here": self.is_here()}

    def _here(self, side: Side) -> Path:
        path = side.path()
        if path is None:
            raise MissingError(f"{self.name} is not on this machine; run: localspec pull {self.name}")
        return path


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.toml") if path != UNLISTED)


def get(name: str) -> PairEntry:
    """Describe the pair called `name`, or `name:QUANT` for one quantisation of its target.

    Raises OptionError, with the nearest names or the reason why there is no such pair.
    """
    stem, colon, quant = name.partition(":")
    if colon and not quant:
        raise OptionError(f"{name!r} names no quantisation behind the colon; leave the colon out, or name one.")
    if stem not in names():
        raise OptionError(_no_such_pair(stem))
    entry = read(HERE / f"{stem}.toml")
    if not quant:
        return entry
    target = entry.target.only(quant)
    if target is None:
        raise OptionError(f"{stem} has no target file {quant!r}; there are: {', '.join(entry.target.files)}.")
    return replace(entry, name=f"{stem}:{next(iter(target.files))}", target=target)


def unlisted() -> dict[str, dict[str, str]]:
    """Models with a drafter that are not listed as pairs: `why`, and `model` where that is known, by name."""
    return tomllib.loads(UNLISTED.read_text(encoding="utf-8"))


def fits(n_bytes: int | None) -> bool | None:
    """Whether weights of that size would run in this machine's memory, roughly; None where nobody knows."""
    return n_bytes * OVERHEAD < ram().total if n_bytes else None


def read(path: Path) -> PairEntry:
    """Read one TOML file; a key that is unknown or missing is an OptionError."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    sides = {name: _side(table.pop(name, {}), path.stem, f"[{name}] of {path.name}") for name in ("target", "drafter")}
    table["measured"] = tuple(table.get("measured", ()))
    return _build(PairEntry, {"name": path.stem, **sides, **table}, path.name)


def _no_such_pair(name: str) -> str:
    if known := unlisted().get(name):
        return f"{name} {known['why']}."
    if name.lower().endswith(".gguf"):
        return f"there is no pair called {name!r}; a file of your own is given as -m {name}."
    near = difflib.get_close_matches(name, [*names(), *unlisted()], n=3)
    return f"there is no pair called {name!r} (what is not listed is pulled as user/repo); " + (
        f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names())}."
    )


def _side(table: dict[str, Any], pair: str, where: str) -> Side:
    repo = table.pop("repo", None)
    files = table.get("files", {})
    sources = {quant: _source(dict(file), repo, pair, f"{quant} in {where}") for quant, file in files.items()}
    if not sources:
        raise OptionError(f"there are no files in {where}.")
    return _build(Side, table | {"files": sources}, where)


def _source(table: dict[str, Any], repo: str | None, pair: str, where: str) -> Source:
    """The kind of source follows from its telling key: `wheel`, `package` or `file`."""
    if "wheel" in table:
        return _build(WheelMember, {"pair": pair, **table}, where)
    if "package" in table:
        return _build(PackageFile, {"file": table.pop("package"), **table}, where)
    return _build(HubFile, ({"repo": repo} if repo else {}) | table, where)


def _build(cls: type[T], table: dict[str, Any], where: str) -> T:
    known = {
        field.name: field.default is MISSING and field.default_factory is MISSING
        for field in fields(cls)  # type: ignore[arg-type]
    }
    if unknown := sorted(table.keys() - known):
        raise OptionError(f"unknown key {unknown[0]!r} in {where}; its keys are {', '.join(known)}.")
    if missing := [name for name, needed in known.items() if needed and name not in table]:
        raise OptionError(f"the key {missing[0]!r} is missing in {where}.")
    return cls(**table)
