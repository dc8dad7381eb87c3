"""`localspec find`: which drafters fit a target, told by what the files say of themselves and not by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localspec.dflash import compat
from localspec.errors import LocalspecError, OptionError
from localspec.hub import huggingface
from localspec.hub.registry import PairEntry, cache_dir, get, names, unlisted
from localspec.hub.sources import FIRST_SHARD, HERE, SHARD
from localspec.llama import Header, read_header

BASE_MODEL = re.compile(r"general\.base_model\.\d+\.(?:name|repo_url)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter that was looked at: a file, or a pair whose drafter is not here. `refusal`: why it does not fit."""

    name: str
    path: str | None = None
    refusal: str | None = None
    note: str = ""

    @property
    def fits(self) -> bool:
        return self.refusal is None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def find(target: Path, folders: Sequence[Path] = ()) -> list[Candidate]:
    """Every drafter on this machine and in the list of pairs that might be meant for `target`.

    Looks into the Hugging Face cache, localspec's own, the folder of the target and `folders` (these with all that
    is in them). Pairs of another architecture are left out. Raises ModelError if `target` is no model,
    OptionError if a folder is not there.
    """
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise OptionError(f"there is no folder {missing[0]} to look in.")
    header = read_header(target)
    compat.check_target(header)
    here = [candidate for path in _gguf_files(target, folders) if (candidate := _look_at(path, header))]
    listed = [candidate for name in names() if (candidate := _listed(get(name), header))]
    return here + listed + list(_not_listed(header))


def _gguf_files(target: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """GGUF files that may be drafters, each once however many names it has."""
    seen = {target.resolve()}
    everywhere = (
        sorted(HERE.rglob("*.gguf")),
        sorted(cache_dir().rglob("*.gguf")),
        sorted(huggingface.cache_folder().glob("models--*/snapshots/**/*.gguf")),
        sorted(target.absolute().parent.glob("*.gguf")),
        *(sorted(folder.rglob("*.gguf")) for folder in folders),
    )
    for path in (path for paths in everywhere for path in paths):
        later_shard = SHARD.search(path.name) and not FIRST_SHARD.search(path.name)
        if path.is_file() and path.resolve() not in seen and not later_shard:
            seen.add(path.resolve())
            yield path


def _look_at(path: Path, target: Header) -> Candidate | None:
    """Does the file at `path` fit? None if it is whole and no drafter."""
    try:
        if "dflash" not in read_header(path, vocabulary=False).arch:
            return None
        drafter = read_header(path)
        compat.check_drafter(drafter)
        compat.check_pair(target, drafter)
    except LocalspecError as error:
        return Candidate(path.name, str(path), str(error).rstrip("."))
    made_for = drafter.get("localspec.target_repo") or drafter.get("localspec.target_name")
    return Candidate(path.name, str(path), note=f"{path}" + (f", made for {made_for}" if made_for else ""))


def _listed(entry: PairEntry, target: Header) -> Candidate | None:
    """A pair whose drafter is not here; None if it is here, or for another architecture."""
    if entry.arch != target.arch or entry.drafter.path():
        return None
    model = entry.target.model or entry.name
    if _same(model, [target.get("general.name")]):
        return Candidate(entry.name, note=f"made for this model; run: localspec pull {entry.name}")
    if _same(model, _base_models(target)):
        return Candidate(entry.name, note=f"made for {model}, its base model; run: localspec pull {entry.name}")
    calls_itself = target.get("general.name") or "nothing in particular"
    return Candidate(entry.name, refusal=f"its drafter was made for {model}, and this file calls itself {calls_itself}")


def _not_listed(target: Header) -> Iterator[Candidate]:
    for name, known in unlisted().items():
        if _same(known.get("model", name), [target.get("general.name"), *_base_models(target)]):
            yield Candidate(name, refusal=f"{name} {known['why']}")


def _base_models(header: Header) -> list[str]:
    return [str(value) for key, value in header.values.items() if BASE_MODEL.fullmatch(key)]


def _same(model: str, others: Iterable[object]) -> bool:
    """Whether one of `others` is the name of `model`, in whatever spelling: Qwen/Qwen3-4B is "Qwen3 4B"."""
    return any(_plain(model) == _plain(str(other)) for other in others if other)


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.rstrip("/").rpartition("/")[2].casefold())
