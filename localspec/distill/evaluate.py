"""What a drafter is worth through llama.cpp, on chats it was not trained on: drafts along stored text, teacher-forced.

The target reads a chat, the drafter is given its layer inputs as in real use and drafts a whole block at many tokens of
the answers; its greedy walk is compared with what the target had said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from localspec.dflash import compat
from localspec.distill.metrics import Picks, by_text, calibration, join
from localspec.distill.store import ChatRecord, Text
from localspec.distill.windows import NO_LABEL, anchors_of, labels_of, repeating
from localspec.engine.drafter import Drafter
from localspec.engine.lattice import Lattice
from localspec.engine.target import N_BATCH, Target
from localspec.llama import Model, read_header


@dataclass(frozen=True)
class Evaluation:
    """Figures on all, fresh and repeating text (`metrics.Figures`), and a temperature per slot for the pool's scores
    (`metrics.calibration`)."""

    figures: dict[str, dict[str, Any]]
    calibration: list[float]

    @property
    def acceptance_length(self) -> float:
        """Tokens a round of the greedy walk, the bonus included, on fresh text (on all where none is fresh)."""
        fresh, whole = self.figures["fresh"], self.figures["all"]
        return float((fresh if fresh["n_blocks"] else whole)["acceptance_length"])


def evaluate(
    target: str | Path,
    drafter: str | Path,
    text: Text,
    chats: Sequence[ChatRecord],
    *,
    n_anchors: int = 2000,
    n_threads: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Evaluation:
    """Draft at about `n_anchors` tokens spread over the answers of `chats`, which lie in `text`.

    `progress` is told the share that is done.
    """
    head = read_header(drafter)
    block_size, n_all = compat.block_size(head), sum(len(anchors_of(chat)) for chat in chats)
    stride, parts = max(n_all // n_anchors, 1), []
    with ExitStack() as stack:
        speaker = stack.enter_context(Model(target))
        guesser = stack.enter_context(Model(drafter))
        reader = Target(
            speaker,
            n_ctx=max(chat.n for chat in chats) + block_size,
            layers=head.ints("dflash.target_layers"),
            n_threads=n_threads,
        )
        stack.enter_context(closing(reader))
        guess = Drafter(guesser, reader, block_size=block_size, causal=False, n_threads=n_threads)
        stack.enter_context(closing(guess))
        reader.expose_features(True)
        n_passed = 0
        for chat in chats:
            anchors = anchors_of(chat)
            if len(picked := anchors[-n_passed % stride :: stride]):
                parts.append(_draft_along(reader, guess, text, chat, picked))
            n_passed += len(anchors)
            progress(n_passed / n_all)
    picks = join(parts)
    figures = {name: asdict(figures) for name, figures in by_text(picks).items()}
    return Evaluation(figures, calibration(_behind_truth(picks)))


def _behind_truth(picks: Picks) -> Picks:
    """Only the slots whose true predecessor was in the pool: elsewhere the scores are those behind a wrong one."""
    known = torch.cat((torch.ones_like(picks.valid[:, :1]), picks.truth[:, :-1] >= 0), dim=1)
    return replace(picks, valid=picks.valid & known)


def _draft_along(target: Target, drafter: Drafter, text: Text, chat: ChatRecord, anchors: NDArray[np.int64]) -> Picks:
    """Draft a block at each of the `anchors`, offsets in the chat, ascending."""
    said = text.tokens[chat.start : chat.start + chat.n].astype(np.int64)
    labels = labels_of(chat, said, anchors, drafter.block_size)
    features = _features(target, said)
    pools = []
    for anchor in anchors.tolist():
        drafter.inject(features[drafter.n_past : anchor])
        pools.append(drafter.draft(int(said[anchor]), drafter.block_size - 1))
    drafter.forget()
    return _judge(pools, labels, repeating(said)[anchors])


def _features(target: Target, said: NDArray[np.int64]) -> NDArray[np.float32]:
    """What the drafter reads, for every token of a chat, [n, width]."""
    chunks = []
    for start in range(0, len(said), N_BATCH):
        chunk = said[start : start + N_BATCH].tolist()
        target.prefill(chunk)
        chunks.append(target.features(slice(len(chunk))).copy())
    target.forget()
    return np.concatenate(chunks)


def _judge(pools: Sequence[Lattice], labels: NDArray[np.int64], looping: NDArray[np.bool_]) -> Picks:
    """Compare pools with labels [N, B-1]; slots behind the end of the answer have none.

    Scores are those behind the true predecessor. Where the pool before does not hold it, the walk has left the truth
    already, and the scores behind that pool's first candidate stand in: they count in no acceptance length.
    """
    n, n_slots, k = len(pools), labels.shape[1], pools[0].ids.shape[1]
    ids = np.array([pool.ids for pool in pools]).reshape(n, n_slots, k)
    tables = np.array([pool.scores for pool in pools]).reshape(n, n_slots, k, k)
    is_truth = (ids == labels[..., None]) & (labels != NO_LABEL)[..., None]
    truth = np.where(is_truth.any(-1), is_truth.argmax(-1), -1)
    before = np.concatenate((np.zeros((n, 1), np.int64), np.maximum(truth[:, :-1], 0)), axis=1)
    scores = np.take_along_axis(tables, before[..., None, None], axis=2)[:, :, 0]
    return Picks(
        valid=torch.from_numpy(labels != NO_LABEL),
        scores=torch.from_numpy(scores),
        truth=torch.from_numpy(truth),
        top1=torch.from_numpy(scores.argmax(-1) == truth),  # the pool's logits by themselves are not handed out
        repeating=torch.from_numpy(looping),
    )
