"""The devices ggml can compute on, and their memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from localspec.llama.binding import C, library_folder

_KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # enum ggml_backend_dev_type


@dataclass(frozen=True)
class Device:
    """`kind`: "cpu", "gpu" (its own memory), "igpu" (the computer's memory) or "accel" (works beside the CPU).

    `total` and `free` in bytes; both 0 where the driver does not say. For the CPU ggml reports all RAM as free on
    most systems: ask `localspec.machine` instead.
    """

    name: str
    description: str
    kind: str
    total: int
    free: int


def devices() -> list[Device]:
    """Every device this build of llama.cpp sees, CPU included. The first call on a GPU may take a second."""
    registry, base = _libraries()
    return [_device(base, registry.ggml_backend_dev_get(index)) for index in range(registry.ggml_backend_dev_count())]


def _device(lib: Any, handle: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    lib.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    name, description = lib.ggml_backend_dev_name(handle), lib.ggml_backend_dev_description(handle) or b""
    kind = dict(enumerate(_KINDS)).get(lib.ggml_backend_dev_type(handle), "unknown")
    return Device(name.decode(), description.decode("utf-8", "replace"), kind, total.value, free.value)


def _libraries() -> tuple[Any, Any]:
    """ggml's registry and its base, as libllama has loaded them (see `header._library`)."""
    registry, base = C._lib, C._lib
    if not hasattr(C._lib, "ggml_backend_dev_count"):  # Windows looks into one library only
        import llama_cpp._ctypes_extensions as loader

        registry, base = (loader.load_shared_library(name, library_folder()) for name in ("ggml", "ggml-base"))
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)
    for lib, name, restype, argtypes in (
        (registry, "ggml_backend_dev_count", ctypes.c_size_t, []),
        (registry, "ggml_backend_dev_get", pointer, [ctypes.c_size_t]),
        (base, "ggml_backend_dev_name", text, [pointer]),
        (base, "ggml_backend_dev_description", text, [pointer]),
        (base, "ggml_backend_dev_memory", None, [pointer, size, size]),
        (base, "ggml_backend_dev_type", ctypes.c_int, [pointer]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    return registry, base
