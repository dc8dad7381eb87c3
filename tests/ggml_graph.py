"""Graphs of single ggml ops on numpy arrays, run by the installed llama.cpp with localspec's native part in it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from localspec.llama import native

Array = npt.NDArray[Any]
F32, F16, BF16, INT32, INT64 = 0, 1, 30, 26, 27
AVX2, AVX512 = 1, 3  # instruction sets (`cpu.h`)
POINTER, INT, I64, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class Init(ctypes.Structure):  # ggml_init_params
    _fields_ = (("size", ctypes.c_size_t), ("buffer", POINTER), ("no_alloc", ctypes.c_bool))


class Plan(ctypes.Structure):  # ggml_cplan
    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", POINTER),
        ("n_threads", INT),
        ("threadpool", POINTER),
        ("abort", POINTER),
        ("abort_data", POINTER),
        ("use_ref", ctypes.c_bool),
    )


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (POINTER, [Init]),
    "ggml_free": (None, [POINTER]),
    "ggml_new_tensor_4d": (POINTER, [POINTER, INT, I64, I64, I64, I64]),
    "ggml_get_data": (POINTER, [POINTER]),
    "ggml_permute": (POINTER, [POINTER, POINTER, INT, INT, INT, INT]),
    "ggml_flash_attn_ext": (POINTER, [POINTER] * 5 + [FLOAT] * 3),
    "ggml_flash_attn_ext_add_sinks": (None, [POINTER, POINTER]),
    "ggml_fill": (POINTER, [POINTER, POINTER, FLOAT]),
    "ggml_set_rows": (POINTER, [POINTER] * 4),
    "ggml_repeat": (POINTER, [POINTER] * 3),
    "ggml_new_graph": (POINTER, [POINTER]),
    "ggml_build_forward_expand": (None, [POINTER, POINTER]),
    "ggml_graph_plan": (Plan, [POINTER, INT, POINTER]),
    "ggml_graph_compute": (INT, [POINTER, ctypes.POINTER(Plan)]),
}


def library() -> Any:
    """ggml's functions, which loading the native part has made global, and ours."""
    native.load()
    found = ctypes.CDLL(None)
    for name, (restype, argtypes) in SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = restype, argtypes
    return found


class Graph:
    """Tensors and ops in one block of `megabytes`."""

    def __init__(self, megabytes: int = 16) -> None:
        self.ggml = library()
        self.context = self.ggml.ggml_init(Init(megabytes << 20, None, False))
        self.graph = self.ggml.ggml_new_graph(self.context)

    def __del__(self) -> None:
        self.ggml.ggml_free(self.context)

    def tensor(self, values: Array, kind: int) -> int:
        """A tensor of `kind` that holds `values` as they are; its dimensions are those of numpy, the last first."""
        shape = (*reversed(values.shape), 1, 1, 1)[:4]
        tensor = int(self.ggml.ggml_new_tensor_4d(self.context, kind, *shape))
        values = np.ascontiguousarray(values)
        ctypes.memmove(self.ggml.ggml_get_data(tensor), values.ctypes.data, values.nbytes)
        return tensor

    def swap_rows(self, tensor: int) -> int:
        """A view with dimensions 1 and 2 exchanged."""
        return int(self.ggml.ggml_permute(self.context, tensor, 0, 2, 1, 3))

    def compute(self, result: int, shape: tuple[int, ...], n_threads: int) -> npt.NDArray[np.float32]:
        """A copy of `result`, a tensor of floats."""
        self.ggml.ggml_build_forward_expand(self.graph, result)
        plan = self.ggml.ggml_graph_plan(self.graph, n_threads, None)
        # Before and behind the work memory lies a pattern: an op that asks for too little is found out.
        work, margin = np.full(plan.work_size + 8192, 0xA5, np.uint8), 4096
        plan.work_data = work.ctypes.data + margin
        assert self.ggml.ggml_graph_compute(self.graph, ctypes.byref(plan)) == 0
        assert (work[:margin] == 0xA5).all()
        assert (work[margin + plan.work_size :] == 0xA5).all()
        pointer = ctypes.cast(self.ggml.ggml_get_data(result), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, shape).copy()


def encode(values: Array, kind: int) -> Array:
    """`values` as the bytes of a tensor of `kind`."""
    if kind == BF16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype({F32: np.float32, F16: np.float16}[kind])


def decode(values: Array, kind: int) -> npt.NDArray[np.float64]:
    """What `encode` has made of them."""
    if kind == BF16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


@contextmanager
def instruction_set(number: int) -> Iterator[None]:
    """Kernels of this instruction set (`cpu.h`), then the best again."""
    ours = native.load().library
    assert ours.localspec_kernels_use(number)
    try:
        yield
    finally:
        ours.localspec_kernels_use(ours.localspec_kernels_enable())


@contextmanager
def stock_attention() -> Iterator[None]:
    """Attention is ggml's own inside."""
    ours = native.load().library
    ours.localspec_kernels_attention(0)
    try:
        yield
    finally:
        ours.localspec_kernels_attention(1)


def _present(number: int) -> bool:
    try:
        ours = native.load().library
    except native.UnusableError:
        return False
    return bool(ours.localspec_kernels_enable() and ours.localspec_kernels_supported(number))


SETS = [number for number in (AVX2, AVX512) if _present(number)]  # what can be tested here
needs_native = pytest.mark.skipif(not SETS, reason="no native part, or no instruction set for it on this CPU")
