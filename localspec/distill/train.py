"""Trains a drafter on collected chats, for a given time or number of steps.

`train` fills a folder: `checkpoint.pt` (a later call goes on from there), `best.pt` (the weights that did best on
held-out chats), `log.jsonl` (figures), and `trained.json` once it is done.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from threading import Thread
from time import monotonic
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from localspec.distill.meter import Meter
from localspec.distill.metrics import Figures, by_text, calibration, join
from localspec.distill.model import Drafter, DrafterConfig
from localspec.distill.objective import Losses, losses
from localspec.distill.options import Options
from localspec.distill.start import Shape, TargetFile, embeddings, fresh_drafter, inherit
from localspec.distill.store import ChatRecord, Data, read
from localspec.distill.windows import Batch, Sampler, split
from localspec.errors import MissingError, OptionError
from localspec.storage import replacing, write_whole


@dataclass
class Progress:
    """How far a run is, as its checkpoint keeps it."""

    step: int = 0
    elapsed_s: float = 0.0
    n_anchors: int = 0
    evaluated_step: int = -1
    evaluated_s: float = 0.0
    best: float = 0.0  # acceptance length on fresh held-out text
    n_stale: int = 0  # evaluations since the best one


@dataclass
class Trained:
    """A drafter as `best.pt` keeps it, and how it was made."""

    config: DrafterConfig
    weights: dict[str, Tensor]
    step: int
    n_anchors: int
    elapsed_s: float
    figures: dict[str, dict[str, Any]]  # on all, fresh and repeating held-out text, see `metrics.Figures`
    calibration: list[float] = field(default_factory=list)  # a temperature per slot, see `metrics.calibration`

    @classmethod
    def read(cls, run: Path) -> Trained:
        """The best of a run. Raises MissingError if there is none yet, OptionError if it cannot be read."""
        path = run / "best.pt"
        if not path.exists():
            raise MissingError(f"{run} holds no trained drafter yet; train one first.")
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
            return cls(**state | {"config": DrafterConfig(**state["config"])})
        except (OSError, RuntimeError, EOFError, UnpicklingError, TypeError, KeyError) as error:
            raise OptionError(f"{path} is not a trained drafter ({type(error).__name__}); train it anew.") from error

    def drafter(self, target: TargetFile) -> Drafter:
        """The model, beside the target's embeddings."""
        drafter = Drafter(self.config, embeddings(target), self.weights["kept"])
        drafter.load_state_dict(self.weights)
        return drafter


class Trainer:
    """One training run: model, optimiser, progress, and the directory it is kept in."""

    def __init__(self, drafter: Drafter, data: Data, run: Path, options: Options) -> None:
        self.device, self.dtype = _device(options.device)
        self.drafter, self.data, self.run, self.options = drafter.to(self.device), data, run, options
        self.progress = Progress()
        self.figures: dict[str, Figures] = {}
        training, held_out = split(data)
        self.training, self.held_out = self._sampler(training, 0), self._sampler(held_out, 1)
        trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        if options.compile and shutil.which(os.environ.get("CXX", "g++")):
            for part in (*drafter.layers, drafter.context_norm, drafter.output_norm):  # one graph serves all layers
                part.compile(dynamic=False)
        run.mkdir(parents=True, exist_ok=True)
        if (run / "checkpoint.pt").exists():
            self._load()

    def train(self) -> dict[str, Figures]:
        """Train until the budget is spent or nothing improves; returns the last figures on held-out chats.

        An interrupt ends it too, after a checkpoint.
        """
        saved = monotonic()
        with Meter("training", 1.0, self.run / "log.jsonl", done=self.spent()) as meter:
            try:
                for losses_ in self.steps():
                    if self.progress.step % self.options.log_every == 0:
                        self._report(meter, losses_)
                    meter.advance(self.spent())
                    if self.progress.elapsed_s - self.progress.evaluated_s > self.options.eval_every_s:
                        self.evaluate(meter)
                    if monotonic() - saved > self.options.checkpoint_every_s:
                        self.save()
                        saved = monotonic()
            except KeyboardInterrupt:
                self.save()
                raise
            if self.progress.evaluated_step < self.progress.step:
                self.evaluate(meter)
                self.save()
        return self.figures

    def steps(self) -> Iterator[Losses]:
        """Train, a step at a time, until the budget is spent or nothing improves."""
        with ThreadPoolExecutor(1) as reader:  # the next batch comes from the disk meanwhile
            batch = reader.submit(self.training.batch, self.progress.step)
            while self.spent() < 1.0 and not self.is_stale():
                began = monotonic()
                ready = batch.result().to(self.device, self.dtype)
                batch = reader.submit(self.training.batch, self.progress.step + 1)
                losses_ = self._update(ready)
                self.progress.step += 1
                self.progress.elapsed_s += monotonic() - began
                self.progress.n_anchors += self.options.n_windows * self.options.n_anchors
                yield losses_

    def spent(self) -> float:
        """Share of the budget that is spent."""
        if self.options.steps is not None:
            return self.progress.step / self.options.steps
        assert self.options.hours is not None
        return self.progress.elapsed_s / (self.options.hours * 3600)

    def is_stale(self) -> bool:
        """True if the latest evaluations brought nothing better."""
        return 0 < self.options.patience <= self.progress.n_stale

    def evaluate(self, meter: Meter) -> dict[str, Figures]:
        """Figures on held-out chats, the same batches each time; keeps the weights if they are the best so far.

        Gradients stay on, so that the training graph serves and nothing is compiled twice.
        """
        options, parts, total = self.options, [], 0.0
        for batch in self.held_out.batches(options.eval_batches):
            batch = batch.to(self.device, self.dtype)
            result = losses(self.drafter, self._hidden(batch).detach(), batch, options, judged=True)
            assert result.picks is not None
            parts.append(result.picks)
            total += result.total.item() / options.eval_batches
        picks = join(parts)
        self.figures = by_text(picks)
        temperatures = calibration(picks)
        self._judge(temperatures)
        rows = {name: asdict(figures) for name, figures in self.figures.items()}
        meter.log(self._row() | {"eval_loss": total, **rows, "calibration": temperatures})
        return self.figures

    def _judge(self, temperatures: list[float]) -> None:
        progress = self.progress
        progress.evaluated_step, progress.evaluated_s = progress.step, progress.elapsed_s
        length = (self.figures["fresh"] if self.figures["fresh"].n_blocks else self.figures["all"]).acceptance_length
        progress.n_stale += 1
        if length > progress.best:
            progress.best, progress.n_stale = length, 0
            self._keep_best(temperatures)

    def _keep_best(self, temperatures: list[float]) -> None:
        best = Trained(
            self.drafter.config,
            self.drafter.state_dict(),
            self.progress.step,
            self.progress.n_anchors,
            self.progress.elapsed_s,
            {name: asdict(figures) for name, figures in self.figures.items()},
            temperatures,
        )
        _save({**vars(best), "config": asdict(best.config)}, self.run / "best.pt")

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "config": asdict(self.drafter.config),
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        _save(state, self.run / "checkpoint.pt")

    def _update(self, batch: Batch) -> Losses:
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * schedule(self.spent(), self.options)
        result = losses(self.drafter, self._hidden(batch), batch, self.options, judged=False)
        result.total.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.options.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def _hidden(self, batch: Batch) -> Tensor:
        block = self.drafter.embed_block(batch.anchor_tokens).to(batch.features.dtype)
        hidden: Tensor = self.drafter(batch.features, batch.anchors, block)
        return hidden

    def _sampler(self, chats: list[ChatRecord], stream: int) -> Sampler:
        """Batches of some chats; held-out ones (`stream` 1) are drawn alike in every run, whatever it trains on."""
        return Sampler(
            self.data,
            chats,
            layers=self.drafter.config.target_layers,
            block_size=self.drafter.config.block_size,
            n_windows=self.options.n_windows,
            n_anchors=self.options.n_anchors,
            n_context=self.options.n_context,
            repeat_weight=1.0 if stream else self.options.repeat_weight,
            seed=2 * self.options.seed + stream,
        )

    def _load(self) -> None:
        state = torch.load(self.run / "checkpoint.pt", weights_only=True, map_location=self.device)
        ours, theirs = asdict(self.drafter.config), asdict(DrafterConfig(**state["config"]))
        for name, value in ours.items():
            if theirs[name] != value:
                raise OptionError(
                    f"{self.run} holds a drafter with {name} = {theirs[name]}, this run wants "
                    f"{value}: choose another directory, or the same settings."
                )
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])

    def _row(self) -> dict[str, Any]:
        progress = self.progress
        return {"step": progress.step, "elapsed_s": progress.elapsed_s, "n_anchors": progress.n_anchors}

    def _report(self, meter: Meter, losses_: Losses) -> None:
        speed = self.progress.n_anchors / self.progress.elapsed_s
        figures = {
            "loss": losses_.total.item(),
            "base": losses_.base.item(),
            "selector": losses_.selector.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "anchors_per_s": speed,
        }
        guess = f", acceptance length on fresh text {self.progress.best:.2f}" if self.progress.best else ""
        note = f"step {self.progress.step:,}, loss {figures['loss']:.2f}, {speed:.0f} anchors/s{guess}"
        meter.report(self.spent(), note, self._row() | figures)


def schedule(progress: float, options: Options) -> float:
    """Learning rate as a share of its peak: linear warm-up, then a cosine down to `final_lr`."""
    if progress < options.warmup:
        return max(progress / options.warmup, 1e-3)
    cosine = 0.5 + 0.5 * math.cos(math.pi * (progress - options.warmup) / (1 - options.warmup))
    return options.final_lr + (1 - options.final_lr) * cosine


def _device(name: str | None) -> tuple[torch.device, torch.dtype]:
    """Where to train and the dtype of matrix products there."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    halves = device.type != "cuda" or torch.cuda.is_bf16_supported()
    return device, torch.bfloat16 if halves else torch.float32


def _save(state: dict[str, Any], path: Path) -> None:
    with replacing(path) as part:
        torch.save(state, part)


# --- the stage -------------------------------------------------------------------------------


def train(target: Path, data: Path, run: Path, *, shape: Shape, options: Options) -> None:
    """Train a drafter for the GGUF file `target` on the collected chats in `data`; goes on where `run` stopped.

    Nothing is done if `run` is done with the very same settings. Raises OptionError if another process trains there or
    it holds a drafter of another shape.
    """
    settings = {"data": str(data.resolve()), "shape": asdict(shape), "options": asdict(options)}
    if is_done(run, settings):
        return
    run.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(run / ".lock", timeout=0):
            torch.manual_seed(options.seed)
            if options.n_threads:
                torch.set_num_threads(options.n_threads)
            rows = read(data)
            drafter = fresh_drafter(TargetFile(target), rows, shape)
            if options.init:
                before = Trained.read(Path(options.init))
                drafter = inherit(drafter, before.config, before.weights)
            trainer = Trainer(drafter, rows, run, options)
            trainer.train()
            write_whole(run / "trained.json", json.dumps({**settings, **asdict(trainer.progress)}, indent=1))
    except Timeout:
        raise OptionError(f"another process is training in {run}; wait for it.") from None


def is_done(run: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a run has finished with these settings."""
    path = run / "trained.json"
    return path.exists() and settings.items() <= json.loads(path.read_text()).items()


def main() -> None:
    """Train as the JSON object on stdin says, as long as stdin stays open: a child does not outlive its parent."""
    order = json.loads(sys.stdin.readline())
    Thread(target=lambda: (os.read(sys.stdin.fileno(), 1), os._exit(1)), daemon=True).start()
    train(
        *(Path(order[name]) for name in ("target", "data", "run")),
        shape=Shape(**order["shape"]),
        options=Options(**order["options"]),
    )


if __name__ == "__main__":
    from localspec.errors import LocalspecError

    try:
        main()
    except LocalspecError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
