"""Trains a drafter on collected chats, on the CPU, for a given time or number of steps.

    python -m localspec.distill.train DATA TARGET.gguf -o RUN --hours 1

RUN then holds `checkpoint.pt` (training goes on from there when started again), `log.jsonl` (one
object per report) and `drafter.gguf`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localspec.distill.export import export
from localspec.distill.metrics import Figures, Picks, by_text, judge
from localspec.distill.model import Drafter
from localspec.distill.start import TargetFile, fresh_drafter
from localspec.distill.store import ChatRecord, Data, read
from localspec.distill.windows import NO_LABEL, Batch, Sampler, split
from localspec.errors import OptionError


@dataclass(frozen=True)
class Options:
    """How to train; sizes of one step are windows x anchors."""

    hours: float | None = None
    steps: int | None = None
    n_windows: int = 8
    n_anchors: int = 64
    n_context: int = 512
    lr: float = 1e-3
    warmup: float = 0.04
    final_lr: float = 0.1
    gamma: float = 4.0
    selector_weight: float = 1.0
    clip: float = 1.0
    eval_batches: int = 8
    eval_every_s: float = 300.0
    log_every: int = 20
    checkpoint_every_s: float = 300.0
    compile: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.hours is None) == (self.steps is None):
            raise OptionError("Training needs exactly one budget: hours or steps.")


# --- the objective ---------------------------------------------------------------------------


class Head(torch.autograd.Function):
    """Cross-entropy and the K best of each row of logits, holding no more than one copy of them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [N, H], weight [V, H], rows int64 [N] (-1: no loss) -> losses [N], values and
        rows of the K best [N, K]."""
        weight = weight.to(hidden.dtype)
        logits = hidden @ weight.T
        values, best = logits.topk(k)
        share = logits.softmax(-1)
        truth = rows.clamp(min=0)[:, None]
        ctx.state = hidden, weight, truth, rows >= 0, best, share
        ctx.mark_non_differentiable(best)
        return -share.gather(1, truth)[:, 0].float().log() * (rows >= 0), values.float(), best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, truth, counted, best, gradient = ctx.state
        del ctx.state  # the shares become the gradient of the logits in place
        scale = (grads[0] * counted)[:, None].to(gradient.dtype)
        gradient.mul_(scale)
        _add_at(gradient, truth, -scale)
        _add_at(gradient, best, grads[1].to(gradient.dtype))
        return gradient @ weight, (gradient.T @ hidden).float(), None, None


def _add_at(rows: Tensor, places: Tensor, values: Tensor) -> None:
    """`rows.scatter_add_(1, places, values)` for distinct places, without its copy of `rows`."""
    rows.scatter_(1, places, rows.gather(1, places) + values)


@dataclass
class Losses:
    """One batch: the objective, its two parts, and the pools for the figures."""

    total: Tensor
    base: Tensor
    selector: Tensor
    picks: Picks | None = None


def losses(drafter: Drafter, hidden: Tensor, batch: Batch, options: Options, *, judged: bool) -> Losses:
    """The NeMo objective: decayed cross-entropy over the head, plus cross-entropy over the K
    candidates after the true predecessor where the truth is among them.

    Args:
        hidden: [W, A, B-1, H] from the backbone.
        judged: also keep what is needed for figures.
    """
    config = drafter.config
    labelled = batch.labels != NO_LABEL
    label_rows = torch.where(labelled, drafter.row_of[batch.labels.clamp(min=0)], config.other_row)
    tokens = torch.cat((batch.anchor_tokens[..., None], batch.labels[..., :-1]), -1)
    predecessors = drafter.row_of[tokens.clamp(min=0)]
    decay = torch.exp(-torch.arange(config.n_slots) / options.gamma).expand_as(labelled)

    used = labelled if judged else label_rows != config.other_row
    hidden, rows, decay = hidden[used], label_rows[used], decay[used]
    proposable = rows != config.other_row
    cross_entropy, unary, best = Head.apply(  # type: ignore[no-untyped-call]
        hidden, drafter.head.weight, torch.where(proposable, rows, -1), config.top_k
    )
    weight = decay * proposable
    base = (weight * cross_entropy).sum() / (weight.sum() + 1e-6)

    pair = drafter.selector(hidden, predecessors[used][:, None], best)[:, 0]
    scores = unary + pair
    is_truth = best == rows[:, None]
    hit = is_truth.any(-1)
    choice = F.cross_entropy(scores, is_truth.int().argmax(-1), reduction="none")
    weight = decay * hit
    selector = (weight * choice).sum() / (weight.sum() + 1e-6)
    picks = _picks(batch, label_rows, used, best, scores) if judged else None
    return Losses(base + options.selector_weight * selector, base.detach(), selector.detach(), picks)


def _picks(batch: Batch, label_rows: Tensor, used: Tensor, best: Tensor, scores: Tensor) -> Picks:
    shape = (*used.shape, best.shape[-1])
    all_best, all_scores = torch.full(shape, -1), torch.zeros(shape)
    all_best[used], all_scores[used] = best, scores.detach()
    return judge(
        all_best.flatten(0, 1),
        all_scores.flatten(0, 1),
        batch.labels.flatten(0, 1),
        label_rows.flatten(0, 1),
        batch.repeating.flatten(),
    )


# --- the run ---------------------------------------------------------------------------------


class Trainer:
    """One training run: model, optimiser, progress, and the directory it is kept in."""

    def __init__(self, drafter: Drafter, data: Data, run: Path, options: Options) -> None:
        self.drafter, self.data, self.run, self.options = drafter, data, run, options
        self.step, self.elapsed_s, self.n_anchors = 0, 0.0, 0
        self.figures: dict[str, Figures] = {}
        training, held_out = split(data)
        self.training, self.held_out = self._sampler(training, 0), self._sampler(held_out, 1)
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        if options.compile and shutil.which(os.environ.get("CXX", "g++")):
            for layer in drafter.layers:  # one graph serves all of them
                layer.compile(dynamic=False)
        run.mkdir(parents=True, exist_ok=True)
        if (run / "checkpoint.pt").exists():
            self._load()

    def train(self) -> dict[str, Figures]:
        """Train until the budget is spent; return the last figures on held-out chats."""
        saved = evaluated = time.monotonic()
        for losses_ in self._steps():
            now = time.monotonic()
            if self.step % self.options.log_every == 0:
                self._report(losses_)
            if now - evaluated > self.options.eval_every_s:
                self.evaluate()
                evaluated = time.monotonic()
            if now - saved > self.options.checkpoint_every_s:
                self.save()
                saved = time.monotonic()
        self.evaluate()
        self.save()
        return self.figures

    def progress(self) -> float:
        """Share of the budget that is spent."""
        if self.options.steps is not None:
            return self.step / self.options.steps
        assert self.options.hours is not None
        return self.elapsed_s / (self.options.hours * 3600)

    def evaluate(self) -> dict[str, Figures]:
        """Figures on held-out chats; the same batches each time.

        Gradients stay on, so that the training graph serves and nothing is compiled twice.
        """
        options, parts, total = self.options, [], 0.0
        for batch in self.held_out.batches(options.eval_batches):
            result = losses(self.drafter, self._hidden(batch).detach(), batch, options, judged=True)
            assert result.picks is not None
            parts.append(result.picks)
            total += result.total.item() / options.eval_batches
        self.figures = by_text(parts)
        self._log({"eval_loss": total, **{k: asdict(v) for k, v in self.figures.items()}})
        return self.figures

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "config": asdict(self.drafter.config),
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "n_anchors": self.n_anchors,
        }
        part = self.run / "checkpoint.part"
        torch.save(state, part)
        part.replace(self.run / "checkpoint.pt")

    def _steps(self) -> Iterator[Losses]:
        while self.progress() < 1.0:
            began = time.monotonic()
            losses_ = self._update(self.training.batch(self.step))
            self.step += 1
            self.elapsed_s += time.monotonic() - began
            self.n_anchors += self.options.n_windows * self.options.n_anchors
            yield losses_

    def _update(self, batch: Batch) -> Losses:
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * schedule(self.progress(), self.options)
        result = losses(self.drafter, self._hidden(batch), batch, self.options, judged=False)
        result.total.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result

    def _hidden(self, batch: Batch) -> Tensor:
        block = self.drafter.embed_block(batch.anchor_tokens).to(batch.features.dtype)
        hidden: Tensor = self.drafter(batch.features, batch.anchors, block)
        return hidden

    def _sampler(self, chats: list[ChatRecord], stream: int) -> Sampler:
        return Sampler(
            self.data,
            chats,
            block_size=self.drafter.config.block_size,
            n_windows=self.options.n_windows,
            n_anchors=self.options.n_anchors,
            n_context=self.options.n_context,
            seed=2 * self.options.seed + stream,
        )

    def _load(self) -> None:
        state = torch.load(self.run / "checkpoint.pt", weights_only=True)
        ours, theirs = asdict(self.drafter.config), state["config"]
        for name, value in ours.items():
            if theirs[name] != value:
                raise OptionError(
                    f"{self.run} holds a drafter with {name} = {theirs[name]}, this run wants "
                    f"{value}: choose another directory, or the same settings."
                )
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        self.n_anchors = state["n_anchors"]

    def _report(self, losses_: Losses) -> None:
        figures = {
            "loss": losses_.total.item(),
            "base": losses_.base.item(),
            "selector": losses_.selector.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "anchors_per_s": self.n_anchors / self.elapsed_s,
        }
        self._log(figures)
        left_h = self.elapsed_s * (1 / max(self.progress(), 1e-6) - 1) / 3600
        guess = f", acceptance length {self.figures['all'].acceptance_length:.2f}" if self.figures else ""
        print(
            f"step {self.step:,}, loss {figures['loss']:.2f}, {figures['anchors_per_s']:.0f} anchors/s{guess}, "
            f"{left_h:.2f} h left",
            file=sys.stderr,
            flush=True,
        )

    def _log(self, row: dict[str, Any]) -> None:
        row = {"step": self.step, "elapsed_s": round(self.elapsed_s, 1), **row}
        with (self.run / "log.jsonl").open("a") as log:
            log.write(json.dumps(_rounded(row)) + "\n")


def schedule(progress: float, options: Options) -> float:
    """Learning rate as a share of its peak: linear warm-up, then a cosine down to `final_lr`."""
    if progress < options.warmup:
        return max(progress / options.warmup, 1e-3)
    cosine = 0.5 + 0.5 * math.cos(math.pi * (progress - options.warmup) / (1 - options.warmup))
    return options.final_lr + (1 - options.final_lr) * cosine


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


# --- from and to files -----------------------------------------------------------------------


def new_drafter(
    target: Path, folder: Path, *, n_layers: int, block_size: int, n_rows: int, seed: int = 0
) -> tuple[Drafter, Data]:
    """A drafter to train for the GGUF file `target`, and the collected data in `folder`."""
    torch.manual_seed(seed)
    data = read(folder)
    drafter = fresh_drafter(TargetFile(target), data, n_layers=n_layers, block_size=block_size, n_rows=n_rows)
    return drafter, data


def export_run(trainer: Trainer, target: Path, path: Path, encoding: str = "q8_0") -> None:
    """Write the run's drafter as GGUF with where it comes from."""
    meta = trainer.data.meta
    provenance: dict[str, str | int | float] = {
        "version": version("localspec"),
        "target_name": meta.target,
        "target_sha256": meta.target_sha256,
        "data_tokens": len(trainer.data.tokens),
        "training_steps": trainer.step,
        "training_anchors": trainer.n_anchors,
        "training_seconds": round(trainer.elapsed_s),
    }
    for text, result in trainer.figures.items():
        provenance[f"acceptance_length.{text}"] = result.acceptance_length
    export(trainer.drafter, target, path, encoding=encoding, provenance=provenance)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a DFlash 2 drafter on collected chats.")
    parser.add_argument("data", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--hours", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("n_windows", "n_anchors", "lr", "eval_every_s", "eval_batches"):
        default = getattr(Options, name)
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(argv)

    drafter, data = new_drafter(
        args.target, args.data, n_layers=args.layers, block_size=args.block, n_rows=args.rows, seed=args.seed
    )
    names = {field.name for field in fields(Options)}
    options = Options(**{name: value for name, value in vars(args).items() if name in names})
    trainer = Trainer(drafter, data, args.out, options)
    trainer.train()
    export_run(trainer, args.target, args.out / "drafter.gguf")


if __name__ == "__main__":
    main()
