"""One safetensors file, read without trusting it: https://huggingface.co/docs/safetensors (format)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from localspec.errors import ModelError

MAX_HEADER = 100_000_000  # bytes, as the safetensors package has it
N_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_NUMPY = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}
_BLOCK = 1 << 22  # values converted at a time

Array = NDArray[Any]


@dataclass(frozen=True)
class Place:
    """One tensor in a file: `dtype` by its safetensors name, `offset` in bytes from the file's start."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Elements `start` to `stop` along the first axis: float32 for every float dtype, int64 for integers.

        Only the result and one block of 16 MB are in memory. Raises ModelError for a dtype it cannot read.
        """
        if self.dtype not in _NUMPY:
            raise ModelError(
                f"{self.path.name} holds {self.dtype} tensors; only {', '.join(_NUMPY)} can be converted: take the "
                "model's unquantised checkpoint."
            )
        n_rows, row = (self.shape[0], math.prod(self.shape[1:])) if self.shape else (1, 1)
        stop = n_rows if stop is None else stop
        out = np.empty((stop - start) * row, np.int64 if self.dtype.startswith("I") else np.float32)
        with opened(self.path) as file:
            file.seek(self.offset + start * row * N_BYTES[self.dtype])
            for at in range(0, out.size, _BLOCK):
                part = out[at : at + _BLOCK]
                block = np.fromfile(file, _NUMPY[self.dtype], part.size)
                if block.size < part.size:
                    raise ModelError(f"{self.path} became shorter while it was read; download it again.")
                part[:] = (block.astype("<u4") << 16).view("<f4") if self.dtype == "BF16" else block
        return out.reshape(stop - start, *self.shape[1:]) if self.shape else out.reshape(())


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to be read; ModelError where the system refuses."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ModelError(f"cannot read {path} ({error.strerror or error}).") from error


def read_places(path: Path) -> dict[str, Place]:
    """Every tensor's place in a safetensors file; ModelError unless header and data agree to the byte."""
    with opened(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        n_header = int.from_bytes(file.read(8), "little")
        if n_bytes < 8 or n_header > n_bytes - 8:
            raise ModelError(
                f"{path} is cut off or no safetensors file: its header should take {n_header:,} bytes, the file has "
                f"{n_bytes:,}; download it again."
            )
        if n_header > MAX_HEADER:
            raise ModelError(f"{path} has a header of {n_header:,} bytes, more than the {MAX_HEADER:,} allowed.")
        header = parse_json(file.read(n_header), path)
    header.pop("__metadata__", None)
    places, begin = {}, 8 + n_header
    for name, (dtype, shape, first, last) in _in_order(path, header):
        where = f"{path} is damaged: tensor {name!r}"
        if first != begin - 8 - n_header or last - first != N_BYTES[dtype] * math.prod(shape):
            raise ModelError(f"{where} of {dtype} {list(shape)} does not fill its place, bytes {first:,} to {last:,}.")
        places[name] = Place(path, dtype, shape, begin)
        begin += last - first
    if begin != n_bytes:
        raise ModelError(
            f"{path} is cut off or has bytes to spare: its header describes {begin:,} bytes, the file has {n_bytes:,}; "
            "download it again."
        )
    return places


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """A JSON object in which no name comes twice; ModelError for anything else."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
        raise ModelError(f"{path} is damaged: its JSON cannot be read ({reason}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: it holds a {type(value).__name__} instead of a JSON object.")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > len(values := dict(pairs)):
        raise ValueError("a name comes twice")
    return values


def _in_order(path: Path, header: dict[str, Any]) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int, int]]]:
    """Tensors by their place in the file, each as (dtype, shape, first, last)."""
    entries = {}
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [first, last]} if dtype in N_BYTES and all(
                type(n) is int and n >= 0 for n in (*shape, first, last)
            ):
                entries[name] = dtype, tuple(shape), first, last
            case _:
                raise ModelError(f"{path} is damaged: its header describes tensor {name!r} as {str(entry)[:200]}.")
    yield from sorted(entries.items(), key=lambda item: item[1][2:])
