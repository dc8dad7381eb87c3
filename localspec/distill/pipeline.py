"""`localspec distill`: all stages in one call, each going on where an earlier call stopped."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

from localspec.distill.synthesise import synthesise
from localspec.errors import MissingError


def distill(
    target: Path,
    folder: Path,
    *,
    n_tokens: int = 1_000_000,
    hours: float = 1.0,
    n_layers: int = 2,
    block_size: int = 8,
    vocab_size: int = 8192,
    prompts: tuple[str, ...] = (),
    n_slots: int = 96,
    n_threads: int | None = None,
    seed: int = 0,
) -> Path:
    """Make a DFlash 2 drafter for the GGUF file `target`; returns its path, `folder`/drafter.gguf.

    The target writes `n_tokens` tokens of chats of its own (`folder`/data), a drafter of `n_layers` layers is trained
    on them for `hours` (`folder`/run), and its weights are written as GGUF. Raises MissingError without torch, and
    whatever `synthesise` raises for a target that cannot serve.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingError("training needs torch, which is not installed; run: pip install 'localspec[distill]'")
    from localspec.distill.train import Options, Trainer, export_run, new_drafter

    synthesise(
        target, folder / "data", n_tokens=n_tokens, n_slots=n_slots, prompts=prompts, seed=seed, n_threads=n_threads
    )
    drafter, data = new_drafter(
        target, folder / "data", n_layers=n_layers, block_size=block_size, n_rows=vocab_size, seed=seed
    )
    trainer = Trainer(drafter, data, folder / "run", Options(hours=hours, seed=seed))
    figures = trainer.train()
    (folder / "figures.json").write_text(json.dumps({name: asdict(value) for name, value in figures.items()}))
    export_run(trainer, target, folder / "drafter.gguf")
    return folder / "drafter.gguf"
