"""Does llama.cpp survive these files? Tried once in a child process, because an abort there kills the process.

`compat` names every misfit we know of. A damaged or hand-made file can still trip one of llama.cpp's asserts, and no
check of ours can foresee them all; so the first load of a file happens in a child, and the verdict is remembered.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from localspec.errors import ModelError
from localspec.llama import system_info
from localspec.storage import recall, remember


def check_that_it_loads(target: Path, drafter: Path | None, *, gpu_layers: int) -> None:
    """Make sure that loading and one round do not kill the process; raises ModelError if they do.

    Files that a load refuses in the ordinary way pass here: the caller's own load will say why.
    """
    paths = [target.absolute(), *([drafter.absolute()] if drafter else [])]
    key = _identity(paths, gpu_layers)
    if recall("probed", key) is not None:
        return
    command = [sys.executable, "-m", "localspec.loading.trial_child", str(gpu_layers), *map(str, paths)]
    child = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if child.returncode < 0 or child.returncode > 2:
        names = " with ".join(path.name for path in paths)
        raise ModelError(f"llama.cpp crashes on {names} ({_last_words(child.stderr)}); download or convert it again.")
    if child.returncode == 0:
        remember("probed", key, "")


def _identity(paths: Sequence[Path], gpu_layers: int) -> str:
    """These very files on this build of llama.cpp."""
    stats = [path.stat() for path in paths]
    return repr((system_info(), gpu_layers, list(map(str, paths)), [(s.st_size, s.st_mtime_ns) for s in stats]))


def _last_words(stderr: str) -> str:
    """The assert that ended the child, or its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    asserts = [line for line in lines if re.search(r"GGML_ASSERT|GGML_ABORT|error:", line)]
    return (asserts or lines[-1:] or ["no message"])[0][:200]
