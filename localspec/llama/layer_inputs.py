"""The inputs of a target's layers, one row a token: handed out by llama.cpp, or taken from the graph as it is computed.

llama.cpp's graphs of some twenty architectures hand them out; asked of any other, it aborts the process. But nearly all
graphs name the outputs of their layers, and the output of one is the input of the next (`native/layer_inputs.cpp`).
Which of the two a model needs is found by asking llama.cpp for the first in a child process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localspec.errors import BackendError, PairError
from localspec.llama import native, selftest
from localspec.llama.binding import C, ext, uninterrupted
from localspec.llama.model import Model

Floats = NDArray[np.float32]
NO_OUTPUT = "llama.cpp returned no output for the last decode."


class LayerInputs(Protocol):
    """Where a context's layer inputs come from."""

    def want(self, layer: int, wanted: bool) -> None:
        """Have the following decodes keep the input of `layer`, or not."""

    def begin(self) -> AbstractContextManager[object]:
        """Around each decode."""

    def address(self, layer: int, n: int) -> int:
        """Where the input of `layer` lies for all `n` tokens of the last decode, in batch order: [n, n_embd] floats."""


def hands_out(model: Model) -> bool:
    """Whether llama.cpp hands out the layer inputs of models like this one; asked once, in a child process."""
    key = selftest.key(model.arch, "layer inputs")
    return selftest.tried("layer_inputs", key, "localspec.llama.layer_inputs_child", str(model.path)) == selftest.WORKS


class HandedOut:
    """By llama.cpp itself, for the context behind `pointer`."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer

    def want(self, layer: int, wanted: bool) -> None:
        ext.set_embeddings_layer_inp(self._pointer, layer, wanted)

    def begin(self) -> AbstractContextManager[object]:
        return nullcontext()

    def address(self, layer: int, n: int) -> int:
        address: int | None = ext.get_embeddings_layer_inp(self._pointer, layer)
        if not address:
            raise BackendError(NO_OUTPUT)
        return address


class _Struct(ctypes.Structure):  # localspec_layer_inputs
    _fields_ = (
        ("n_layers", ctypes.c_int32),
        ("n_embd", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("layers", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("n_rows", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
    )


class Named:
    """By a callback that llama.cpp's scheduler asks about every tensor of a graph: in C where that is compiled.

    In Python it costs about a microsecond a tensor, which is noticeable for small models.
    """

    def __init__(self, layers: Sequence[int], n_embd: int, capacity: int) -> None:
        self._slots = {layer: i for i, layer in enumerate(layers)}
        self._layers = np.array(layers, np.int32)
        self._wanted = np.zeros(len(layers), np.int8)
        self._n_rows = np.zeros(len(layers), np.int32)
        self._rows = np.zeros((len(layers), capacity, n_embd), np.float32)
        arrays = (self._layers, self._wanted, self._n_rows, self._rows)
        self._struct = _Struct(len(layers), n_embd, capacity, *(array.ctypes.data for array in arrays))
        self.user_data = ctypes.addressof(self._struct)
        library = native.state().library
        self._is_python = library is None
        take = self._callback() if library is None else library.localspec_layer_inputs_take
        self.callback = ctypes.cast(take, C.ggml_backend_sched_eval_callback)
        self._kept = take  # ctypes does not keep what it casts

    def want(self, layer: int, wanted: bool) -> None:
        self._wanted[self._slots[layer]] = wanted

    def begin(self) -> AbstractContextManager[object]:
        self._n_rows[:] = 0
        return uninterrupted() if self._is_python else nullcontext()

    def address(self, layer: int, n: int) -> int:
        slot = self._slots[layer]
        if self._n_rows[slot] != n:
            raise BackendError(NO_OUTPUT)
        return int(self._rows[slot].ctypes.data)

    def check(self, model: Model) -> None:
        """Raise PairError unless a decode of one token has given one row a layer."""
        if bad := [layer for layer, slot in self._slots.items() if self._n_rows[slot] != 1]:
            raise PairError(
                f"llama.cpp neither hands out the input of layer {bad[0]} of {model.arch} models nor names the output "
                f"of the layer before, so nothing can draft for {model.path.name}; run it without a drafter (-md)."
            )

    def _callback(self) -> Any:
        """What `localspec_layer_inputs_take` does, in Python."""
        names = {f"l_out-{layer - 1}".encode(): slot for layer, slot in self._slots.items()}
        name_of = _ggml("ggml_get_name", ctypes.c_char_p, [ctypes.c_void_p])
        wanted, take = self._wanted, self._taker()

        def called(tensor: int, ask: bool, _data: Any) -> bool:
            slot = names.get(name_of(tensor))
            if slot is None or not wanted[slot]:
                return not ask
            if not ask:
                take(slot, tensor)
            return True

        return C.ggml_backend_sched_eval_callback(called)

    def _taker(self) -> Callable[[int, int], None]:
        size, void = ctypes.c_size_t, ctypes.c_void_p
        n_bytes = _ggml("ggml_nbytes", size, [void])
        get = _ggml("ggml_backend_tensor_get", None, [void, void, size, size])
        row, capacity = self._rows.strides[1], self._rows.shape[1]

        def take(slot: int, tensor: int) -> None:
            n, start = n_bytes(tensor), int(self._n_rows[slot])
            if start < 0 or n % row or start + n // row > capacity or _shape(tensor) != (row // 4, n // row):
                self._n_rows[slot] = -1
                return
            get(tensor, self._rows[slot, start:].ctypes.data, 0, n)
            self._n_rows[slot] += n // row

        return take


class _Tensor(ctypes.Structure):  # the beginning of ggml_tensor
    _fields_ = (("type", ctypes.c_int32), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


def _shape(address: int) -> tuple[int, int] | None:
    """(floats a row, rows), or None if it is no matrix of floats."""
    tensor = _Tensor.from_address(address)
    return (tensor.ne[0], tensor.ne[1]) if tensor.type == 0 and tensor.ne[2] == tensor.ne[3] == 1 else None


def _ggml(name: str, restype: Any, argtypes: list[Any]) -> Any:
    function = getattr(C._lib, name)
    function.restype, function.argtypes = restype, argtypes
    return function
