"""`localspec distill`: all stages in one call, each going on where an earlier call stopped."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from localspec.distill.synthesise import synthesise
from localspec.errors import BackendError, MissingError

# glibc hands every large buffer back to the system and faults it in again at the next training step, which costs a
# third of the time. It reads these when a process starts, so training runs in a child.
WORTH_COMPILING = 0.1  # hours; compiling takes minutes
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 35)}


def distill(
    target: Path,
    folder: Path,
    *,
    n_tokens: int = 1_000_000,
    hours: float = 1.0,
    n_layers: int = 2,
    block_size: int = 8,
    vocab_size: int = 8192,
    prompts: Sequence[str] = (),
    n_slots: int = 96,
    n_threads: int | None = None,
    seed: int = 0,
) -> Path:
    """Make a DFlash 2 drafter for the GGUF file `target`; returns its path, `folder`/drafter.gguf.

    The target writes `n_tokens` tokens of chats of its own (`folder`/data), a drafter of `n_layers` layers is trained
    on them for `hours` (`folder`/run), and its weights are written as GGUF. Figures on stderr and in JSON logs. Raises
    MissingError without torch, BackendError when training fails, and what `synthesise` raises for a target that cannot
    serve.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingError("training needs torch, which is not installed; run: pip install 'localspec[distill]'")
    data, run, drafter = folder / "data", folder / "run", folder / "drafter.gguf"
    synthesise(target, data, n_tokens=n_tokens, n_slots=n_slots, prompts=prompts, seed=seed, n_threads=n_threads)
    settings = {"hours": hours, "layers": n_layers, "block": block_size, "rows": vocab_size, "seed": seed}
    options = [f"--{name}={value}" for name, value in settings.items()]
    options += ["--no-compile"] * (hours < WORTH_COMPILING)
    command = [sys.executable, "-m", "localspec.distill.train", str(data), str(target), f"--out={run}", *options]
    if subprocess.run(command, env=os.environ | KEEP_MEMORY, check=False).returncode:
        raise BackendError(f"training stopped; what it had reached is in {run}: run the same command to go on.")
    shutil.copyfile(run / "drafter.gguf", drafter)
    return drafter
