"""How the threads of OpenMP wait for each other: shortly by spinning, then asleep, so that other programs get the CPU.

By default they spin for milliseconds at every barrier, hundreds of times a token. On a machine where anything else
runs, the thread waited for may have to wait for the CPU itself, and each barrier then costs a time slice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# GNU's: turns of a waiting loop. LLVM's: milliseconds, the fewest that are not none. See benchmarks/threads.py.
SETTINGS = {"GOMP_SPINCOUNT": "300", "KMP_BLOCKTIME": "1"}


@contextmanager
def waiting_briefly() -> Iterator[None]:
    """Around the loading of llama.cpp: OpenMP reads these variables once, when it is loaded.

    A setting of the user's wins. Afterwards the variables are as before: another OpenMP and other programs should not
    inherit ours. Where another package, such as torch, has loaded the same OpenMP before, this comes too late.
    """
    ours = {} if any(name in os.environ for name in (*SETTINGS, "OMP_WAIT_POLICY")) else SETTINGS
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
