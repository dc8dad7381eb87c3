"""A thread for llama.cpp that no other library has touched.

ggml configures the AMX tile registers of a thread once and relies on them ever after. torch configures them its own way
on the threads it computes on; the next decode there ends in an illegal instruction. So in a process with torch every
thread that decodes has a partner that does it in its place.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from localspec.llama.binding import has_amx

T = TypeVar("T")
_has_amx = cache(has_amx)
_partner = threading.local()


def run(call: Callable[[], T]) -> T:
    """`call()`, by this thread's partner where torch may have been here. An interrupt waits until it is done."""
    if "torch" not in sys.modules or not _has_amx():
        return call()
    if not hasattr(_partner, "pool"):
        _partner.pool = ThreadPoolExecutor(1, "llama.cpp")
    try:
        return _partner.pool.submit(call).result()  # type: ignore[no-any-return]
    except BaseException:
        _partner.pool.submit(int).result()  # one thing at a time: behind it, the call is done
        raise
