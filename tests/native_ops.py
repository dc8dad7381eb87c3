"""Small ggml graphs through ctypes: one op, on the CPU, with its weights in a buffer of ggml's or of localspec's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from localspec.llama import native
from localspec.llama.binding import C

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

F32, I32 = 0, 26  # ggml_type
P, I64, INT, SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t


class _Init(ctypes.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool))


class _Traits(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("blck_size", I64),
        ("blck_size_interleave", I64),
        ("type_size", SIZE),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, P, P, I64)),
    )


@cache
def ggml(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(C._lib, name)
    function.restype, function.argtypes = result, arguments
    return function


@cache
def library() -> Any:
    """localspec's native part, or None where it is off."""
    return native.state().library


def sets() -> list[int]:
    """The instruction sets (native/cpu.h) that this CPU has kernels for."""
    return [i for i in (1, 2, 3) if library() and library().localspec_kernels_supported(i)]


def name_of(instruction_set: int) -> str:
    return str(library().localspec_kernels_name(instruction_set).decode())


def ours() -> int:
    library().localspec_kernels_buffer_type.restype = P
    return int(library().localspec_kernels_buffer_type())


def theirs() -> int:
    return int(ggml("ggml_backend_cpu_buffer_type", P)())


@cache
def _backend() -> int:
    return int(ggml("ggml_backend_cpu_init", P)())


def quantise(kind: gguf.GGMLQuantizationType, weights: Floats) -> Bytes:
    """The file's bytes of weights, shape (…, k): by ggml, rows one after the other."""
    weights = np.ascontiguousarray(weights, np.float32)
    k = weights.shape[-1]
    rows = weights.size // k
    out = np.empty(rows * row_size(kind, k), np.uint8)
    chunk = ggml("ggml_quantize_chunk", SIZE, INT, P, P, I64, I64, I64, P)
    chunk(kind, weights.ctypes.data, out.ctypes.data, 0, rows, k, None)
    return out


def dequantise(kind: gguf.GGMLQuantizationType, data: Bytes, shape: tuple[int, ...]) -> NDArray[np.float64]:
    out = np.empty(shape, np.float32)
    ggml("ggml_get_type_traits", ctypes.POINTER(_Traits), INT)(kind).contents.to_float(
        data.ctypes.data, out.ctypes.data, out.size
    )
    return out.astype(np.float64)


def row_size(kind: int, k: int) -> int:
    return int(ggml("ggml_row_size", SIZE, INT, I64)(kind, k))


@dataclass
class Weights:
    """A quantised tensor in a buffer. `shape` and all shapes here are numpy's: the row's length last."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    tensor: int
    buffer: int

    @property
    def n_bytes(self) -> int:
        return int(ggml("ggml_nbytes", SIZE, P)(self.tensor))

    def set(self, data: Bytes, offset: int = 0) -> None:
        data = np.ascontiguousarray(data)
        ggml("ggml_backend_tensor_set", None, P, P, SIZE, SIZE)(self.tensor, data.ctypes.data, offset, data.nbytes)

    def get(self, offset: int = 0, size: int | None = None) -> Bytes:
        out = np.empty(self.n_bytes if size is None else size, np.uint8)
        ggml("ggml_backend_tensor_get", None, P, P, SIZE, SIZE)(self.tensor, out.ctypes.data, offset, out.nbytes)
        return out

    def memset(self, value: int, offset: int, size: int) -> None:
        ggml("ggml_backend_tensor_memset", None, P, ctypes.c_uint8, SIZE, SIZE)(self.tensor, value, offset, size)

    @property
    def allocated(self) -> int:
        return int(ggml("ggml_backend_buffer_get_size", SIZE, P)(self.buffer))


@contextmanager
def weights(
    kind: gguf.GGMLQuantizationType, data: Bytes | None, shape: tuple[int, ...], where: int
) -> Iterator[Weights]:
    with _context() as ctx:
        tensor = _tensor(ctx, kind, shape)
        buffer = ggml("ggml_backend_alloc_ctx_tensors_from_buft", P, P, P)(ctx, where)
        ggml("ggml_backend_buffer_set_usage", None, P, INT)(buffer, 1)  # weights
        try:
            made = Weights(kind, shape, tensor, buffer)
            if data is not None:
                made.set(data)
            yield made
        finally:
            ggml("ggml_backend_buffer_free", None, P)(buffer)


def mul_mat(w: Weights, x: Floats, *, n_threads: int = 1, first_row: int = 0, rows: int | None = None) -> Floats:
    """x · wᵀ, shape (…, n, rows); of `rows` rows of w from `first_row` on, through a view, if that is asked for."""
    with _context() as ctx:
        weight = w.tensor
        if rows is not None:
            stride = row_size(w.kind, w.shape[-1])
            view = ggml("ggml_view_2d", P, P, P, I64, I64, SIZE, SIZE)
            weight = view(ctx, weight, w.shape[-1], rows, stride, first_row * stride)
        given = _tensor(ctx, F32, x.shape)
        result = ggml("ggml_mul_mat", P, P, P, P)(ctx, weight, given)
        shape = (*x.shape[:-1], w.shape[-2] if rows is None else rows)
        return _compute(ctx, result, shape, {given: np.ascontiguousarray(x, np.float32)}, n_threads)


def mul_mat_id(w: Weights, x: Floats, ids: NDArray[np.int32], *, n_threads: int = 1) -> Floats:
    """w: (experts, rows, k); x: (tokens, 1 or used, k); ids: (tokens, used). Result: (tokens, used, rows)."""
    with _context() as ctx:
        given, chosen = _tensor(ctx, F32, x.shape), _tensor(ctx, I32, ids.shape)
        result = ggml("ggml_mul_mat_id", P, P, P, P, P)(ctx, w.tensor, given, chosen)
        inputs = {given: np.ascontiguousarray(x, np.float32), chosen: np.ascontiguousarray(ids, np.int32)}
        return _compute(ctx, result, (*ids.shape, w.shape[-2]), inputs, n_threads)


def supported(w: Weights, x_shape: tuple[int, ...]) -> bool:
    """Whether ggml's CPU device would multiply these weights where they are."""
    with _context() as ctx:
        op = ggml("ggml_mul_mat", P, P, P, P)(ctx, w.tensor, _tensor(ctx, F32, x_shape))
        device = ggml("ggml_backend_get_device", P, P)(_backend())
        return bool(ggml("ggml_backend_dev_supports_op", ctypes.c_bool, P, P)(device, op))


@contextmanager
def _context() -> Iterator[int]:
    ctx = ggml("ggml_init", P, _Init)(_Init(1 << 20, None, True))
    try:
        yield ctx
    finally:
        ggml("ggml_free", None, P)(ctx)


def _tensor(ctx: int, kind: int, shape: tuple[int, ...]) -> int:
    ne = (*reversed(shape), 1, 1, 1)[:4]
    return int(ggml("ggml_new_tensor_4d", P, P, INT, I64, I64, I64, I64)(ctx, kind, *ne))


def _compute(ctx: int, result: int, shape: tuple[int, ...], inputs: dict[int, Any], n_threads: int) -> Floats:
    graph = ggml("ggml_new_graph", P, P)(ctx)
    ggml("ggml_build_forward_expand", None, P, P)(graph, result)
    buffer = ggml("ggml_backend_alloc_ctx_tensors_from_buft", P, P, P)(ctx, theirs())
    try:
        for tensor, values in inputs.items():
            ggml("ggml_backend_tensor_set", None, P, P, SIZE, SIZE)(tensor, values.ctypes.data, 0, values.nbytes)
        ggml("ggml_backend_cpu_set_n_threads", None, P, INT)(_backend(), n_threads)
        assert ggml("ggml_backend_graph_compute", INT, P, P)(_backend(), graph) == 0
        out = np.empty(shape, np.float32)
        ggml("ggml_backend_tensor_get", None, P, P, SIZE, SIZE)(result, out.ctypes.data, 0, out.nbytes)
        return out
    finally:
        ggml("ggml_backend_buffer_free", None, P)(buffer)
