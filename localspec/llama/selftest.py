"""Does this build's AMX code work? Tried once in a child process, because where it does not, it kills the process.

GCC 12 and older believe that `ldtilecfg` reads 8 of its 64 bytes and drop the other stores as dead: the first decode of
two tokens then dies in ggml's AMX kernels. Working, they are worth three times the speed on a CPU that has AMX; models
opened with `use_extra_bufts = False` stay clear of them.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from localspec.llama.binding import has_amx, library_folder
from localspec.storage import recall, remember


@cache
def safe_to_repack() -> bool:
    """True unless ggml would repack weights for AMX code that crashes. The verdict on a library is kept."""
    if not has_amx():
        return True
    key = _identity()
    if (verdict := recall("amx", key)) is None:
        child = subprocess.run(
            [sys.executable, "-m", "localspec.llama.selftest_child"], capture_output=True, stdin=subprocess.DEVNULL
        )
        if 0 < child.returncode < 128:
            return False  # it could not even try: stay clear of AMX, but keep no verdict
        verdict = "works" if child.returncode == 0 else "crashes"
        remember("amx", key, verdict)
    return verdict == "works"


def _identity() -> str:
    """The very libraries the verdict is on."""
    libraries = sorted(library_folder().glob("*ggml-cpu*"))
    return "\0".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in libraries)
