"""Does this build's AMX code work? Tried once in a child process, because where it does not, it kills the process.

GCC 12 and older believe that `ldtilecfg` reads 8 of its 64 bytes and drop the other stores as dead: the first decode of
two tokens then dies in ggml's AMX kernels. Working, they are worth three times the speed on a CPU that has AMX; models
opened with `use_extra_bufts = False` stay clear of them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from localspec.llama.binding import has_amx, library_folder
from localspec.storage import cache_dir


@cache
def safe_to_repack() -> bool:
    """True unless ggml would repack weights for AMX code that crashes. The verdict on a library is kept."""
    if not has_amx():
        return True
    verdict = _verdict_file()
    if not verdict.exists():
        child = subprocess.run(
            [sys.executable, "-m", "localspec.llama.selftest_child"], capture_output=True, stdin=subprocess.DEVNULL
        )
        if child.returncode > 0 and child.returncode < 128:
            return False  # it could not even try: stay clear of AMX, but keep no verdict
        try:
            verdict.parent.mkdir(parents=True, exist_ok=True)
            part = verdict.with_suffix(f".{os.getpid()}")
            part.write_text("works" if child.returncode == 0 else "crashes", encoding="ascii")
            part.replace(verdict)
        except OSError:
            return child.returncode == 0  # a read-only home only means to try again next time
    return verdict.read_text(encoding="ascii") == "works"


def _verdict_file() -> Path:
    libraries = sorted(library_folder().glob("*ggml-cpu*"))
    key = "\0".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in libraries)
    return cache_dir() / "amx" / hashlib.sha256(key.encode()).hexdigest()[:32]
