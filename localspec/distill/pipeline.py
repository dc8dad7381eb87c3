"""`localspec distill`: all stages in one call, each going on where an earlier call stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.distill.checks import check_disk, check_shape, check_training, n_parameters
from localspec.distill.collect import collect
from localspec.distill.config import DistillConfig
from localspec.distill.store import check_owner, row_bytes
from localspec.distill.synthesise import layers_to_read, synthesise
from localspec.errors import BackendError, MissingError, OptionError
from localspec.llama import read_header

if TYPE_CHECKING:
    from localspec.distill.options import Options
    from localspec.distill.start import Shape

# glibc hands every large buffer back to the system and faults it in again at the next training step, which costs a
# third of the time. It reads these when a process starts, so training runs in a child.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 35)}
WORTH_COMPILING = 0.1  # hours; compiling takes minutes
N_EVALUATIONS = 40  # of a whole training


def distill(target: Path, folder: Path, config: DistillConfig | None = None) -> Path:
    """Make a DFlash 2 drafter for the GGUF file `target` as `config` says; returns its path, `folder`/drafter.gguf.

    The target writes chats of its own, a drafter is trained on them, and its weights are encoded, evaluated through
    llama.cpp on held-out chats, and described in a README.md. Training looks at held-out chats 40 times, keeps the best
    weights, and ends early when 12 looks in a row bring nothing better. Raises a LocalspecError for anything the user
    can mend, where it can be known before the work starts.
    """
    config = config or DistillConfig()
    if importlib.util.find_spec("torch") is None:
        raise MissingError("training needs torch, which is not installed; run: pip install 'localspec[distill]'")
    from localspec.distill.options import Options
    from localspec.distill.release import check_outtype, release
    from localspec.distill.start import Shape

    target, folder = Path(target), Path(folder)
    shape = Shape(n_layers=config.n_layers, block_size=config.block_size, n_rows=config.vocab_size)
    every_s = max(3600 * config.hours / N_EVALUATIONS, 1.0)
    options = Options(
        hours=config.hours,
        init=None if config.begin is None else str((config.begin / "run").resolve()),
        objective=config.objective,
        eval_every_s=every_s,
        checkpoint_every_s=min(every_s, 300),
        compile=config.hours >= WORTH_COMPILING,
        n_threads=config.n_threads,
        seed=config.seed,
    )
    check_outtype(config.outtype)
    if config.hf is not None and config.hf.exists() and not (folder / "evaluation.json").exists():
        raise OptionError(f"{config.hf} exists; choose another folder with --hf, or remove it.")
    check(target, folder, shape, options, n_tokens=0 if config.chats else config.n_tokens)
    if config.begin is not None:
        check_begin(target, config.begin, shape)

    text, data, run = config.chats or folder / "text", folder / "data", folder / "run"
    if not config.chats:
        synthesise(
            target,
            text if config.two_pass else data,
            n_tokens=config.n_tokens,
            text_only=config.two_pass,
            n_slots=config.n_slots,
            prompts=config.prompts,
            seed=config.seed,
            n_threads=config.n_threads,
        )
    if config.chats or config.two_pass:
        collect(target, text, data, n_threads=config.n_threads)
    train(target, data, run, shape=shape, options=options)
    return release(target, data, run, folder, outtype=config.outtype, n_threads=config.n_threads, hf=config.hf)


def check(target: Path, folder: Path, shape: Shape, options: Options, *, n_tokens: int) -> None:
    """Refuse what cannot work, or not here, before any work is done."""
    import numpy as np
    import torch

    from localspec.distill.start import TargetFile, mask_token

    header = read_header(target)
    n_tapped = len(layers_to_read(header, None))
    for name in ("text", "data"):
        check_owner(folder / name, target)
    check_shape(header, shape)
    mask_token(TargetFile(target), np.zeros(header.n_vocab, np.int64))
    if not torch.cuda.is_available():
        check_training(header, shape, options, n_tapped)
    is_new = not (folder / "data").exists()
    features = n_tokens * row_bytes(n_tapped * header.number("{arch}.embedding_length")) * is_new
    check_disk(folder, features + 20 * n_parameters(header, shape, n_tapped), "the data and the training run")


def check_begin(target: Path, begin: Path, shape: Shape) -> None:
    """Refuse a drafter that training for `target` cannot begin with."""
    from localspec.distill.start import check_same
    from localspec.distill.store import read_text
    from localspec.distill.train import Trained

    header, config = read_header(target), Trained.read(begin / "run").config
    wanted = {"n_embd": header.number("{arch}.embedding_length"), "n_vocab": header.n_vocab}
    check_same(config, wanted | {"n_layers": shape.n_layers, "block_size": shape.block_size})
    if not (begin / "data" / "meta.json").exists():  # the chats may be gone, the drafter is what counts
        return
    theirs = read_text(begin / "data").meta
    if theirs.tokenizer_sha256 not in ("", header.strings["tokenizer.ggml.tokens"][1]):
        raise OptionError(
            f"the drafter in {begin} is for {theirs.target}, whose tokenizer is not that of {target.name}; begin with "
            "one whose target has the same."
        )


def train(target: Path, data: Path, run: Path, *, shape: Shape, options: Options) -> None:
    """Train as `localspec.distill.train.train` does, in a child process that ends with this one.

    Raises:
        BackendError: training failed; the child has said why.
    """
    places = {"target": str(target), "data": str(data), "run": str(run)}
    command = [sys.executable, "-m", "localspec.distill.train"]
    with subprocess.Popen(command, env=os.environ | KEEP_MEMORY, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdin
        child.stdin.write(json.dumps(places | {"shape": asdict(shape), "options": asdict(options)}) + "\n")
        child.stdin.flush()
        try:
            status = child.wait()
        except KeyboardInterrupt:  # the child has heard it too, and keeps what it has reached
            child.wait()
            raise
    if status:
        raise BackendError(f"training stopped; what it had reached is in {run}: run the same command to go on.")
