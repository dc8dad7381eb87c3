"""Does llama.cpp survive these files? Tried once in a child process, because an abort there kills the process.

`compat` names every misfit we know of. A damaged or hand-made file can still trip one of llama.cpp's asserts, and no
check of ours can foresee them all; so the first load of a file happens in a child, and the verdict is remembered.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from localspec.errors import ModelError
from localspec.llama import system_info
from localspec.storage import cache_dir


def check_that_it_loads(target: Path, drafter: Path | None, *, gpu_layers: int) -> None:
    """Make sure that loading and one round do not kill the process; raises ModelError if they do.

    Files that a load refuses in the ordinary way pass here: the caller's own load will say why.
    """
    paths = [target.absolute(), *([drafter.absolute()] if drafter else [])]
    verdict = _verdict_file(paths, gpu_layers)
    if verdict.exists():
        return
    command = [sys.executable, "-m", "localspec.loading.trial_child", str(gpu_layers), *map(str, paths)]
    child = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if child.returncode < 0 or child.returncode > 2:
        names = " with ".join(path.name for path in paths)
        raise ModelError(f"llama.cpp crashes on {names} ({_last_words(child.stderr)}); download or convert it again.")
    if child.returncode == 0:
        _remember(verdict)


def _verdict_file(paths: Sequence[Path], gpu_layers: int) -> Path:
    """Where the verdict on these very files, on this build of llama.cpp, is kept."""
    key = [system_info(), str(gpu_layers)]
    for path in paths:
        stat = path.stat()
        key += [str(path), str(stat.st_size), str(stat.st_mtime_ns)]
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
    return cache_dir() / "probed" / name


def _remember(verdict: Path) -> None:
    try:
        verdict.parent.mkdir(parents=True, exist_ok=True)
        verdict.touch()
    except OSError:
        return  # a read-only home only means to probe again next time


def _last_words(stderr: str) -> str:
    """The assert that ended the child, or its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    asserts = [line for line in lines if re.search(r"GGML_ASSERT|GGML_ABORT|error:", line)]
    return (asserts or lines[-1:] or ["no message"])[0][:200]
