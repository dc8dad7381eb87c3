"""A thread for llama.cpp that no other library has touched.

ggml configures the AMX tile registers of a thread once and relies on them ever after. torch configures them its own way
on the threads it computes on; the next decode there ends in an illegal instruction. So in a process with torch every
thread that decodes has another that does it in its place.

The two must not both keep OpenMP threads: where there are more than processors, GNU's OpenMP no longer waits actively
and a small model decodes six times slower. So those of the thread that asks are ended first; they come back when
needed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from localspec.llama.binding import has_amx

T = TypeVar("T")
_has_amx = cache(has_amx)
_local = threading.local()


def run(call: Callable[[], T]) -> T:
    """`call()`, in this thread's decode thread where torch may have been here. An interrupt waits until it is done."""
    if "torch" not in sys.modules or not _has_amx():
        return call()
    if not hasattr(_local, "pool"):
        _local.pool = ThreadPoolExecutor(1, "llama.cpp")
    _end_openmp_threads()
    try:
        return _local.pool.submit(call).result()  # type: ignore[no-any-return]
    except BaseException:
        _local.pool.submit(int).result()  # one thing at a time: behind it, the call is done
        raise


def _end_openmp_threads() -> None:
    """End those that wait for this thread's next parallel loop, if GNU's OpenMP is what is loaded."""
    if openmp := _openmp():
        openmp.omp_pause_resource_all(1)  # omp_pause_soft


@cache
def _openmp() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libgomp.so.1", getattr(os, "RTLD_NOLOAD", 0))
    except OSError:
        return None
    return library if hasattr(library, "omp_pause_resource_all") else None
