"""A Hugging Face checkpoint folder: its config.json and its tensors, read strictly and without running any of its code.

Everything asked for is ticked off, so that what nobody asked for can be named at the end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from localspec.convert.shard import Array, Place, opened, parse_json, read_places
from localspec.errors import ModelError

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MAX_JSON = 100_000_000  # bytes of a config or tokenizer file
_REQUIRED = object()


class Config:
    """A JSON object that remembers which of its keys were asked for.

    `name` says in messages where it stands, e.g. "config.json" or "config.json: rope_parameters".
    """

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name
        self.taken: set[str] = set()
        self._sections: dict[str, Config] = {}

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of `key`; `default` where it is absent or null, ModelError without a default."""
        self.taken.add(key)
        value = self.values.get(key)
        if value is None and default is _REQUIRED:
            raise ModelError(f"{self.name} has no {key!r}, which is needed to convert this model.")
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 to 2^31."""
        value = self.get(key, _REQUIRED if default is None else default)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ModelError(f"{self.name} has {value!r} as {key!r}; a whole number belongs there.")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number that a float32 holds."""
        value = self.get(key, _REQUIRED if default is None else default)
        if type(value) not in (int, float) or not abs(value) < 3e38:
            raise ModelError(f"{self.name} has {value!r} as {key!r}; a number belongs there.")
        return float(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a value that llama.cpp has no way to honour; absent is fine."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise ModelError(
                f"{self.name} has {value!r} as {key!r}; llama.cpp's graph only does {' or '.join(map(repr, allowed))}."
            )

    def section(self, key: str) -> Config:
        """A JSON object inside this one, empty where absent; what is left in it counts as left here."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise ModelError(f"{self.name} has {value!r} as {key!r}; an object belongs there.")
        return self._sections.setdefault(key, Config(value, f"{self.name}: {key}"))

    def left(self, ignored: Collection[str] = ()) -> list[str]:
        """Keys nobody asked for, in sections too; not those that are switched off (null, false, 0, empty)."""
        off: tuple[Any, ...] = (None, False, [], {}, "")
        here = [k for k, v in self.values.items() if k not in self.taken and k not in ignored and v not in off]
        return here + [f"{name}.{key}" for name, inner in self._sections.items() for key in inner.left(ignored)]


class Checkpoint:
    """`folder`/config.json and the safetensors beside it.

    Raises ModelError for a folder that is no checkpoint, holds pickles only, or in which any file is damaged or
    missing; see `read_places`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is not a checkpoint: it has no config.json; give a model's folder.")
        self.config = Config(read_json(folder / "config.json"), str(folder / "config.json"))
        self._places = _places(folder)
        self.taken: set[str] = set()

    def names(self) -> list[str]:
        return list(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name).shape

    def dtype(self, name: str) -> str:
        """As safetensors has it: "F32", "F16", "BF16", "I64" ..."""
        return self._place(name).dtype

    def tensor(self, name: str) -> Array:
        """The whole tensor: float32, or int64 for integers."""
        return self.rows(name)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Part of a tensor along its first axis, for those too large to be held at once."""
        self.taken.add(name)
        return self._place(name).read(start, stop)

    def blocks(self, name: str, n_values: int = 1 << 24) -> Iterator[Array]:
        """The tensor as consecutive row ranges of about `n_values` values: what a large one is converted by."""
        n_rows = max(1, n_values // max(1, math.prod(self.shape(name)[1:])))
        for start in range(0, self.shape(name)[0], n_rows):
            yield self.rows(name, start, min(start + n_rows, self.shape(name)[0]))

    def precision(self) -> str:
        """ "bf16" or "f16" if every matrix is kept in that, else "f32": the output type in which nothing is lost."""
        kinds = {place.dtype.lower() for place in self._places.values() if len(place.shape) > 1}
        return kinds.pop() if kinds in ({"bf16"}, {"f16"}) else "f32"

    def left(self) -> list[str]:
        """Tensors nobody asked for."""
        return [name for name in self._places if name not in self.taken]

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ModelError(f"{self.folder} has no tensor {name!r}, which its config.json asks for.")
        return self._places[name]


def origin(path: Path) -> tuple[str, str] | None:
    """Repository and revision of a file or folder in the Hugging Face cache, None elsewhere."""
    parts = path.absolute().parts
    for name, above, revision in zip(parts, parts[1:], parts[2:], strict=False):
        if above == "snapshots" and name.startswith("models--"):
            return name.removeprefix("models--").replace("--", "/"), revision
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError where there is none."""
    with opened(path) as file:
        data = file.read(MAX_JSON + 1)
    if len(data) > MAX_JSON:
        raise ModelError(f"{path} has more than the {MAX_JSON:,} bytes allowed.")
    return parse_json(data, path)


def _places(folder: Path) -> dict[str, Place]:
    if (folder / INDEX).is_file():
        return _by_index(folder)
    found = sorted(folder.glob("*.safetensors"))
    whole = [path for path in found if path.name == "model.safetensors"] or found
    if len(whole) == 1:
        return read_places(whole[0])
    if found:
        raise ModelError(f"{folder} has {len(found)} safetensors files but no {INDEX}; download that as well.")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise ModelError(
            f"{folder} holds its weights as Python pickles ({pickles[0]}), which run code when they are read; look for "
            "a checkpoint in safetensors."
        )
    raise ModelError(f"{folder} is not a checkpoint: it has no safetensors file.")


def _by_index(folder: Path) -> dict[str, Place]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX} is damaged: it has no weight_map.")
    places: dict[str, Place] = {}
    for shard in sorted({str(shard) for shard in weight_map.values()}):
        places |= _shard(folder, shard, {name for name, place in weight_map.items() if place == shard})
    return places


def _shard(folder: Path, shard: str, expected: set[str]) -> dict[str, Place]:
    """The tensors of one shard, which must be those the index says."""
    if {"/", "\\", os.sep, ":"} & set(shard) or not shard.endswith(".safetensors"):
        raise ModelError(f"{folder / INDEX} names {shard!r} as a shard, which is no safetensors file beside it.")
    if not (folder / shard).is_file():
        raise ModelError(f"{folder} lacks {shard}, one of the shards in {INDEX}; download it.")
    places = read_places(folder / shard)
    if differ := sorted(places.keys() ^ expected):
        side = INDEX if differ[0] in places else shard
        raise ModelError(f"{shard} and {INDEX} disagree: tensor {differ[0]!r} is not in {side}; download both again.")
    return places
