"""Does llama.cpp survive these files? Tried once in a child process, because an abort there kills the process.

`compat` names every misfit we know of. A damaged or hand-made file can still trip one of llama.cpp's asserts, and no
check of ours can foresee them all; so the first load of a file happens in a child, and the verdict is remembered.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from localspec.errors import ModelError
from localspec.llama import native, system_info
from localspec.storage import recall, remember


def check_that_it_loads(target: Path, drafter: Path | None, *, gpu_layers: int) -> None:
    """Make sure that loading and one round do not kill the process; raises ModelError if they do.

    Files that a load refuses in the ordinary way pass here: the caller's own load will say why.
    """
    paths = [target.absolute(), *([drafter.absolute()] if drafter else [])]
    if recall("probed", _identity(paths, gpu_layers)) is not None:
        return
    child = _run(paths, gpu_layers)
    if not _survived(child):
        words, names = _last_words(child.stderr), " with ".join(path.name for path in paths)
        if native.identity() == native.OFF or not _survived(child := _run(paths, gpu_layers, **{native.SWITCH: "0"})):
            raise ModelError(f"llama.cpp crashes on {names} ({words}); download or convert it again.")
        native.distrust(f"crashes on {names} ({words})")
        if native.is_loaded():
            raise ModelError(f"localspec's native part crashes on {names} ({words}); start again, without it now.")
    if child.returncode == 0:
        remember("probed", _identity(paths, gpu_layers), "")


def _run(paths: Sequence[Path], gpu_layers: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localspec.loading.trial_child", str(gpu_layers), *map(str, paths)],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
    )


def _survived(child: subprocess.CompletedProcess[str]) -> bool:
    """Whether it ended by itself: with a refusal (1, 2) or without."""
    return 0 <= child.returncode <= 2


def _identity(paths: Sequence[Path], gpu_layers: int) -> str:
    """These very files on this build of llama.cpp."""
    stats = [path.stat() for path in paths]
    return repr(
        (
            system_info(),
            native.identity(),
            gpu_layers,
            list(map(str, paths)),
            [(s.st_size, s.st_mtime_ns) for s in stats],
        )
    )


def _last_words(stderr: str) -> str:
    """The assert that ended the child, or its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    asserts = [line for line in lines if re.search(r"GGML_ASSERT|GGML_ABORT|error:", line)]
    return (asserts or lines[-1:] or ["no message"])[0][:200]
