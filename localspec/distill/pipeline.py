"""`localspec distill`: all stages in one call, each going on where an earlier call stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    shape = {"n_layers": n_layers, "block_size": block_size, "n_rows": vocab_size}
    options = {"hours": hours, "seed": seed, "compile": hours >= WORTH_COMPILING}
    train(target, data, run, shape, options)
    export_run(target, data, run, drafter)
    return drafter


def train(target: Path, data: Path, run: Path, shape: dict[str, Any], options: dict[str, Any]) -> None:
    """Train in a child process, which ends with this one."""
    order = {"target": str(target), "data": str(data), "run": str(run), "shape": shape, "options": options}
    command = [sys.executable, "-m", "localspec.distill.train"]
    with subprocess.Popen(command, env=os.environ | KEEP_MEMORY, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdin
        child.stdin.write(json.dumps(order) + "\n")
        child.stdin.flush()
        status = child.wait()
    if status:
        raise BackendError(f"training stopped; what it had reached is in {run}: run the same command to go on.")


def export_run(target: Path, data: Path, run: Path, path: Path) -> None:
    from localspec.distill.export import export, provenance
    from localspec.distill.start import TargetFile
    from localspec.distill.store import read
    from localspec.distill.train import Trained

    trained, file = Trained.read(run), TargetFile(target)
    export(trained.drafter(file), target, path, provenance=provenance(trained, read(data), file))
