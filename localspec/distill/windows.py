"""Batches for training: windows of collected chats, and anchors in what the target said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localspec.distill.store import ChatRecord, Data
from localspec.errors import OptionError

Ints = npt.NDArray[np.int64]

NO_LABEL = -1
HELD_OUT_EVERY = 50
REPEAT_NGRAM, REPEAT_REACH = 4, 64


def anchors_of(chat: ChatRecord) -> Ints:
    """Offsets of answer tokens with at least one token of the same answer behind them."""
    spans = [np.arange(a, b - 1) for a, b in chat.answers]
    return np.concatenate(spans) if spans else np.arange(0)


def split(data: Data) -> tuple[list[ChatRecord], list[ChatRecord]]:
    """Chats to train on, and every 50th held out.

    Raises:
        OptionError: there are not enough chats for both.
    """
    usable = [chat for chat in data.chats if len(anchors_of(chat))]
    training = [chat for i, chat in enumerate(usable) if i % HELD_OUT_EVERY]
    if not training:
        raise OptionError(f"{len(usable)} chats are too few to train on: at least 2 are needed.")
    return training, usable[::HELD_OUT_EVERY]


def answer_counts(data: Data, chats: Sequence[ChatRecord]) -> Ints:
    """How often each token of the vocabulary occurs in answers, int64 [n_vocab]."""
    counts = np.zeros(data.meta.n_vocab, np.int64)
    for chat in chats:
        for a, b in chat.answers:
            said = data.tokens[chat.start + a : chat.start + b]
            counts += np.bincount(said, minlength=data.meta.n_vocab)
    return counts


def feature_rms(data: Data, n_rows: int = 4096) -> npt.NDArray[np.float32]:
    """Root mean square of each feature channel over evenly spread rows, [n_features]."""
    rows = np.unique(np.linspace(0, len(data.features) - 1, n_rows).astype(np.int64))
    sample = data.features[rows].astype(np.float32)
    return np.asarray(np.sqrt(np.square(sample).mean(0) + 1e-12), np.float32)


@dataclass(frozen=True)
class Batch:
    """W windows with A anchors each (shapes as in `model`).

    features [W, S, n_features]; anchors, anchor_tokens int64 [W, A]; labels int64 [W, A, B-1],
    tokens, NO_LABEL outside the answer; repeating bool [W, A].
    """

    features: Tensor
    anchors: Tensor
    anchor_tokens: Tensor
    labels: Tensor
    repeating: Tensor


class Sampler:
    """Draws batches in which every anchor of the chats is about equally likely.

    The windows of one batch have similar lengths, so that little of S is padding. Batch i is a
    function of (seed, i) alone: resuming needs no state.
    """

    def __init__(
        self,
        data: Data,
        chats: Sequence[ChatRecord],
        *,
        block_size: int,
        n_windows: int,
        n_anchors: int,
        n_context: int = 512,
        granularity: int = 128,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.data, self.seed, self.dtype = data, seed, dtype
        self.block_size, self.n_windows, self.n_anchors = block_size, n_windows, n_anchors
        self.n_context = n_context
        self.buckets: dict[int, list[ChatRecord]] = {}
        for chat in chats:
            size = min(-(-chat.n // granularity) * granularity, n_context)
            self.buckets.setdefault(size, []).append(chat)
        self.weights = {
            size: np.array([len(anchors_of(chat)) for chat in bucket], np.float64)
            for size, bucket in self.buckets.items()
        }

    def batch(self, index: int) -> Batch:
        rng = np.random.default_rng((self.seed, index))
        sizes = list(self.buckets)
        totals = np.array([self.weights[size].sum() for size in sizes])
        size = sizes[rng.choice(len(sizes), p=totals / totals.sum())]
        weights = self.weights[size] / self.weights[size].sum()
        picks = rng.choice(len(weights), self.n_windows, p=weights)
        return self._stack(size, [self._window(self.buckets[size][i], rng) for i in picks])

    def batches(self, n: int) -> Iterator[Batch]:
        return (self.batch(i) for i in range(n))

    def _window(self, chat: ChatRecord, rng: np.random.Generator) -> tuple[ChatRecord, int, Ints]:
        """A chat, the offset its window begins at, and the offsets of its anchors, sorted."""
        anchors, begin = anchors_of(chat), 0
        if chat.n > self.n_context:
            pivot = int(rng.choice(anchors))
            begin = pivot - int(rng.integers(self.n_context // 2, self.n_context))
            begin = min(max(begin, 0), chat.n - self.n_context)
            earliest = begin + self.n_context // 4 if begin else 0
            inside = (anchors >= earliest) & (anchors < begin + self.n_context)
            anchors = anchors[inside | (anchors == pivot)]
        replace = len(anchors) < self.n_anchors
        return chat, begin, np.sort(rng.choice(anchors, self.n_anchors, replace=replace))

    def _stack(self, size: int, windows: list[tuple[ChatRecord, int, Ints]]) -> Batch:
        shape = (len(windows), self.n_anchors)
        features = np.zeros((len(windows), size, self.data.meta.width), np.float16)
        labels = np.full((*shape, self.block_size - 1), NO_LABEL, np.int64)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        repeating = np.zeros(shape, np.bool_)
        for w, (chat, begin, anchors) in enumerate(windows):
            n = min(size, chat.n - begin)
            row = chat.start + begin
            features[w, :n] = self.data.features[row : row + n]
            said = self.data.tokens[chat.start : chat.start + chat.n].astype(np.int64)
            tokens[w], positions[w] = said[anchors], anchors - begin
            labels[w] = _labels(chat, said, anchors, self.block_size)
            repeating[w] = _repeating(said, anchors)
        return Batch(
            torch.from_numpy(features).to(self.dtype),
            torch.from_numpy(positions),
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            torch.from_numpy(repeating),
        )


def _labels(chat: ChatRecord, said: Ints, anchors: Ints, block_size: int) -> Ints:
    """The tokens behind each anchor that belong to the same answer, [A, B-1]."""
    ends = np.zeros(chat.n, np.int64)
    for a, b in chat.answers:
        ends[a:b] = b
    slots = anchors[:, None] + np.arange(1, block_size)
    inside = slots < ends[anchors][:, None]
    return np.where(inside, said[np.minimum(slots, chat.n - 1)], NO_LABEL)


def _repeating(said: Ints, anchors: Ints) -> npt.NDArray[np.bool_]:
    """Whether the 4 tokens up to each anchor occurred before among the last 64, [A]."""
    padded = np.concatenate((np.full(REPEAT_REACH + REPEAT_NGRAM, -1), said))
    at = anchors + REPEAT_REACH + REPEAT_NGRAM
    grams = np.arange(REPEAT_NGRAM)
    last = padded[at[:, None] - grams]
    earlier = padded[(at[:, None] - np.arange(1, REPEAT_REACH - REPEAT_NGRAM + 2))[..., None] - grams]
    return np.asarray((earlier == last[:, None]).all(-1).any(-1))
