"""The header of a GGUF file, read by ggml's own parser: what a file claims to be, before llama.cpp loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.errors import ModelError
from localspec.llama.binding import C, Log, library_folder

_SCALARS: dict[int, Any] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    6: ctypes.c_float,
    7: ctypes.c_bool,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
    12: ctypes.c_double,
}
_STRING, _ARRAY = 8, 9
I64 = 27  # ggml_type of the d2t tensor

Value = int | float | bool | str | tuple[int | float | bool, ...]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place: `shape` is ggml's `ne` (fastest axis first), `offset` in bytes from the file's start."""

    type: int
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Header:
    """Metadata of a GGUF file. String arrays (the vocabulary) are kept as their length and SHA-256."""

    path: Path
    n_bytes: int
    values: dict[str, Value]
    strings: dict[str, tuple[int, str]] = field(repr=False)
    tensors: dict[str, TensorInfo] = field(repr=False)

    @property
    def arch(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def name(self) -> str:
        """What to call the model in a message: its own name and its file."""
        name = self.values.get("general.name")
        return f"{name} ({self.path.name})" if name else self.path.name

    @property
    def n_vocab(self) -> int:
        return self.strings.get("tokenizer.ggml.tokens", (0, ""))[0]

    def get(self, key: str, default: Any = None) -> Any:
        """A value by key; `{arch}.` in the key stands for the file's own architecture."""
        return self.values.get(key.replace("{arch}", self.arch), default)

    def ints(self, key: str) -> tuple[int, ...]:
        """A whole number or an array of them as a tuple; empty if the key is absent. ModelError for anything else."""
        key = key.replace("{arch}", self.arch)
        value = self.values.get(key, ())
        values = value if isinstance(value, tuple) else (value,)
        numbers = tuple(v for v in values if isinstance(v, int))
        if len(numbers) < len(values):
            raise ModelError(f"{self.name} has {value!r} where a whole number belongs ({key}); convert it again.")
        return numbers

    def number(self, key: str, default: int = 0) -> int:
        """The whole number of a key (the first of an array); `default` if it is absent."""
        return next(iter(self.ints(key)), default)

    def read_i64(self, tensor: str) -> NDArray[np.int64]:
        """The values of a small int64 tensor (the reduced vocabulary `d2t`)."""
        info = self.tensors[tensor]
        count = info.n_bytes // 8
        return np.fromfile(self.path, dtype=np.int64, count=count, offset=info.offset)


class _InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def _library() -> Any:
    """ggml-base as libllama has loaded it; a second copy (wheels carry it twice) would log past `binding.Log`."""
    if hasattr(C._lib, "gguf_init_from_file"):
        lib = C._lib
    else:  # Windows looks into one library only
        import llama_cpp._ctypes_extensions as loader

        lib = loader.load_shared_library("ggml-base", library_folder())
    p, i64, size, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p
    for name, restype, argtypes in (
        ("gguf_init_from_file", p, [text, _InitParams]),
        ("gguf_free", None, [p]),
        ("gguf_get_data_offset", size, [p]),
        ("gguf_get_n_kv", i64, [p]),
        ("gguf_get_key", text, [p, i64]),
        ("gguf_get_kv_type", ctypes.c_int, [p, i64]),
        ("gguf_get_arr_type", ctypes.c_int, [p, i64]),
        ("gguf_get_val_str", text, [p, i64]),
        ("gguf_get_val_data", p, [p, i64]),
        ("gguf_get_arr_n", size, [p, i64]),
        ("gguf_get_arr_data", p, [p, i64]),
        ("gguf_get_arr_str", text, [p, i64, size]),
        ("gguf_get_n_tensors", i64, [p]),
        ("gguf_get_tensor_name", text, [p, i64]),
        ("gguf_get_tensor_offset", size, [p, i64]),
        ("gguf_get_tensor_ne", ctypes.POINTER(i64), [p, i64]),
        ("gguf_get_tensor_type", ctypes.c_int, [p, i64]),
        ("gguf_get_tensor_size", size, [p, i64]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    return lib


_lib = _library()


def _array(ctx: int, index: int) -> tuple[Value | None, tuple[int, str] | None]:
    """An array as (values, None), or a string array as (None, (length, digest))."""
    count, kind = _lib.gguf_get_arr_n(ctx, index), _lib.gguf_get_arr_type(ctx, index)
    if kind == _STRING:
        digest = hashlib.sha256()
        for i in range(count):
            digest.update(_lib.gguf_get_arr_str(ctx, index, i) + b"\0")
        return None, (count, digest.hexdigest())
    scalar = _SCALARS[kind]
    data = _lib.gguf_get_arr_data(ctx, index)
    if not data or count == 0:
        return (), None
    return tuple((scalar * count).from_address(data)), None


def _values(ctx: int, arrays: bool) -> tuple[dict[str, Value], dict[str, tuple[int, str]]]:
    values: dict[str, Value] = {}
    strings: dict[str, tuple[int, str]] = {}
    for index in range(_lib.gguf_get_n_kv(ctx)):
        key = _lib.gguf_get_key(ctx, index).decode("utf-8", "replace")
        kind = _lib.gguf_get_kv_type(ctx, index)
        if kind == _STRING:
            values[key] = _lib.gguf_get_val_str(ctx, index).decode("utf-8", "replace")
        elif kind == _ARRAY:
            if key.startswith("tokenizer.") and not (arrays and key == "tokenizer.ggml.tokens"):
                strings[key] = (_lib.gguf_get_arr_n(ctx, index), "")
                continue
            value, digest = _array(ctx, index)
            if digest:
                strings[key] = digest
            elif value is not None:
                values[key] = value
        else:
            values[key] = _SCALARS[kind].from_address(_lib.gguf_get_val_data(ctx, index)).value
    return values, strings


def _tensors(ctx: int) -> dict[str, TensorInfo]:
    base = _lib.gguf_get_data_offset(ctx)
    tensors = {}
    for index in range(_lib.gguf_get_n_tensors(ctx)):
        ne = _lib.gguf_get_tensor_ne(ctx, index)
        shape = tuple(ne[d] for d in range(4))
        while len(shape) > 1 and shape[-1] == 1:
            shape = shape[:-1]
        tensors[_lib.gguf_get_tensor_name(ctx, index).decode("utf-8", "replace")] = TensorInfo(
            _lib.gguf_get_tensor_type(ctx, index),
            shape,
            base + _lib.gguf_get_tensor_offset(ctx, index),
            _lib.gguf_get_tensor_size(ctx, index),
        )
    return tensors


def read_header(path: str | os.PathLike[str], *, vocabulary: bool = True, size: int | None = None) -> Header:
    """Read the header of a GGUF file; the tensors stay on disk.

    With `vocabulary` the token texts are hashed (25 ms for 49,152 tokens). `size`: bytes of the whole file where
    `path` holds no more than its beginning. Raises ModelError for a file that is absent, unreadable, not GGUF, or
    shorter than its header says.
    """
    path = Path(path)
    if path.is_fifo():  # opening it would wait for a writer
        raise ModelError(f"{path} is a pipe; give a GGUF file.")
    try:
        with path.open("rb") as file:
            magic, n_bytes = file.read(4), size or os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"cannot read {path}: {reason.lower()}.") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'.")
    Log.clear()
    ctx = _lib.gguf_init_from_file(os.fsencode(path), _InitParams(True, None))
    if not ctx:
        raise ModelError(f"the header of {path} is damaged ({Log.reason()}); download the file again.")
    try:
        header = Header(path, n_bytes, *_values(ctx, vocabulary), _tensors(ctx))
    finally:
        _lib.gguf_free(ctx)
    end = max((t.offset + t.n_bytes for t in header.tensors.values()), default=0)
    if end > n_bytes:
        raise ModelError(
            f"{path} is cut off: its header describes {end:,} bytes, the file has {n_bytes:,}; download it again."
        )
    return header


def with_shards(header: Header) -> Header:
    """The header of the first file of a split model (`…-00001-of-00003.gguf`) with the tensors of all of them.

    Their offsets are those in their own files. Raises ModelError if one is missing or damaged; any other header is
    returned as it is.
    """
    n = header.number("split.count")
    first = f"-00001-of-{n:05}.gguf"
    if n < 2 or not header.path.name.endswith(first):
        return header
    stem = header.path.name.removesuffix(first)
    others = [header.path.with_name(f"{stem}-{i:05}-of-{n:05}.gguf") for i in range(2, n + 1)]
    tensors = dict(header.tensors)
    for path in others:
        tensors |= read_header(path, vocabulary=False).tensors
    return replace(header, tensors=tensors)


def read_typed(path: str | os.PathLike[str], prefix: str) -> Iterator[tuple[str, int, int | None, Any]]:
    """The keys that begin with `prefix`, to be copied: name, GGUF type, type of an array's elements, value.

    Texts come as bytes. Meant for a file that `read_header` has accepted; 0.5 s for a vocabulary of 250,000.
    """
    ctx = _lib.gguf_init_from_file(os.fsencode(path), _InitParams(True, None))
    if not ctx:
        raise ModelError(f"the header of {path} is damaged ({Log.reason()}); download the file again.")
    try:
        for index in range(_lib.gguf_get_n_kv(ctx)):
            key = _lib.gguf_get_key(ctx, index).decode("utf-8", "replace")
            if key.startswith(prefix):
                yield key, *_typed(ctx, index)
    finally:
        _lib.gguf_free(ctx)


def _typed(ctx: int, index: int) -> tuple[int, int | None, Any]:
    kind = _lib.gguf_get_kv_type(ctx, index)
    if kind == _STRING:
        return kind, None, _lib.gguf_get_val_str(ctx, index)
    if kind != _ARRAY:
        return kind, None, _SCALARS[kind].from_address(_lib.gguf_get_val_data(ctx, index)).value
    element, n = _lib.gguf_get_arr_type(ctx, index), _lib.gguf_get_arr_n(ctx, index)
    if element == _STRING:
        return kind, element, [_lib.gguf_get_arr_str(ctx, index, i) for i in range(n)]
    data = _lib.gguf_get_arr_data(ctx, index)
    return kind, element, list((_SCALARS[element] * n).from_address(data)) if n else []
