"""Does compiled code that may not fit this machine work here? Tried once in a child process, which it may kill.

The verdict is kept in the cache, under everything it depends on.

One such code is ggml's for AMX: GCC 12 and older believe that `ldtilecfg` reads 8 of its 64 bytes and drop the other
stores as dead; the first decode of two tokens then dies. Working, it is worth three times the speed; models opened with
`use_extra_bufts = False` stay clear of it. The other is localspec's own (`native`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from localspec.llama.binding import has_amx, library_folder
from localspec.storage import recall, remember

WORKS = "works"
WRONG = 3  # exit status of a child whose numbers were wrong


@cache
def safe_to_repack() -> bool:
    """True unless ggml would repack weights for AMX code that crashes."""
    return not has_amx() or tried("amx", key(), "localspec.llama.selftest_child") == WORKS


def key(*others: Path | str) -> str:
    """What a verdict depends on: ggml's libraries, and `others` (files by their size and time)."""
    files = [*sorted(library_folder().glob("*ggml*")), *(other for other in others if isinstance(other, Path))]
    stats = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return "\0".join([*stats, *(other for other in others if isinstance(other, str))])


def tried(kind: str, key: str, module: str, *arguments: str) -> str:
    """`WORKS`, or what went wrong where `module` was run in a child process, as the end of a sentence."""
    if (words := recall(kind, key)) is None:
        command = [sys.executable, "-m", module, *arguments]
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},  # takes seconds where there is a debugger
        )
        words = _words(child)
        if child.returncode in (0, WRONG) or not 0 < child.returncode < 128:  # else it could not even try
            remember(kind, key, words)
    return words


def _words(child: subprocess.CompletedProcess[str]) -> str:
    if child.returncode == 0:
        return WORKS
    last = (child.stderr.strip().splitlines() or [f"status {child.returncode}"])[-1][:200]
    if child.returncode == WRONG:
        return f"computes wrong numbers here ({last})"
    return f"could not be tried ({last})" if 0 < child.returncode < 128 else f"crashes here ({last})"
