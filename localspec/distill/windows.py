"""Batches for training: windows of collected chats, and anchors in what the target said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localspec.distill.store import NONE, ChatRecord, Data
from localspec.errors import OptionError
from localspec.planning.ngram import FAR, LAST

Ints = npt.NDArray[np.int64]

NO_LABEL = -1
HELD_OUT_EVERY = 50


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


def feature_rms(data: Data, layers: Sequence[int], n_rows: int = 4096) -> npt.NDArray[np.float32]:
    """Root mean square of each feature channel of `layers` over evenly spread rows, [n_features]."""
    rows = np.unique(np.linspace(0, len(data.features) - 1, n_rows).astype(np.int64))
    sample = data.rows(rows, layers).astype(np.float32)
    return np.asarray(np.sqrt(np.square(sample).mean(0) + 1e-12), np.float32)


@dataclass(frozen=True)
class Batch:
    """W windows with A anchors each (shapes as in `model`).

    features [W, S, n_features]; anchors, anchor_tokens int64 [W, A]; labels int64 [W, A, B-1],
    tokens, NO_LABEL outside the answer; repeating bool [W, A]. What the target would have said
    in each slot: pool int64 [W, A, B-1, N_CANDIDATES], tokens (-1: none), and float32 pool_logits.
    """

    features: Tensor
    anchors: Tensor
    anchor_tokens: Tensor
    labels: Tensor
    repeating: Tensor
    pool: Tensor
    pool_logits: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On `device`, features in `dtype`."""
        moved = {name: value.to(device, non_blocking=True) for name, value in vars(self).items()}
        return Batch(**moved | {"features": moved["features"].to(dtype)})


class Sampler:
    """Draws batches in which every anchor of the chats is about equally likely, repeating ones
    `repeat_weight` times as likely as fresh ones.

    The windows of one batch have similar lengths, so that little of S is padding. Batch i is a
    function of (seed, i) alone: resuming needs no state.
    """

    def __init__(
        self,
        data: Data,
        chats: Sequence[ChatRecord],
        *,
        layers: Sequence[int],
        block_size: int,
        n_windows: int,
        n_anchors: int,
        n_context: int = 512,
        granularity: int = 128,
        repeat_weight: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.data, self.layers, self.seed = data, tuple(layers), seed
        self.block_size, self.n_windows, self.n_anchors = block_size, n_windows, n_anchors
        self.n_context, self.repeat_weight = n_context, repeat_weight
        self.buckets: dict[int, list[ChatRecord]] = {}
        for chat in chats:
            size = min(-(-chat.n // granularity) * granularity, n_context)
            self.buckets.setdefault(size, []).append(chat)
        self.weights = {
            size: np.array([self._weights(chat).sum() for chat in bucket]) for size, bucket in self.buckets.items()
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

    def _weights(self, chat: ChatRecord) -> npt.NDArray[np.float64]:
        """How likely each anchor of a chat is, up to a factor."""
        anchors = anchors_of(chat)
        if self.repeat_weight == 1.0:
            return np.ones(len(anchors))
        return np.where(repeating(self._said(chat))[anchors], self.repeat_weight, 1.0)

    def _said(self, chat: ChatRecord) -> Ints:
        return self.data.tokens[chat.start : chat.start + chat.n].astype(np.int64)

    def _window(self, chat: ChatRecord, rng: np.random.Generator) -> tuple[ChatRecord, int, Ints]:
        """A chat, the offset its window begins at, and the offsets of its anchors, sorted."""
        anchors, weights, begin = anchors_of(chat), self._weights(chat), 0
        if chat.n > self.n_context:
            pivot = int(rng.choice(anchors, p=weights / weights.sum()))
            begin = pivot - int(rng.integers(self.n_context // 2, self.n_context))
            begin = min(max(begin, 0), chat.n - self.n_context)
            earliest = begin + self.n_context // 4 if begin else 0
            inside = (anchors >= earliest) & (anchors < begin + self.n_context) | (anchors == pivot)
            anchors, weights = anchors[inside], weights[inside]
        replace = int(np.count_nonzero(weights)) < self.n_anchors
        return chat, begin, np.sort(rng.choice(anchors, self.n_anchors, replace=replace, p=weights / weights.sum()))

    def _stack(self, size: int, windows: list[tuple[ChatRecord, int, Ints]]) -> Batch:
        shape, n_slots = (len(windows), self.n_anchors), self.block_size - 1
        features = np.zeros((len(windows), size, len(self.layers) * self.data.meta.n_embd), np.float16)
        labels = np.full((*shape, n_slots), NO_LABEL, np.int64)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        looping = np.zeros(shape, np.bool_)
        pools = np.full((*shape, n_slots), NONE)
        for w, (chat, begin, anchors) in enumerate(windows):
            n = min(size, chat.n - begin)
            row = chat.start + begin
            features[w, :n] = self.data.rows(slice(row, row + n), self.layers)
            said = self._said(chat)
            tokens[w], positions[w] = said[anchors], anchors - begin
            labels[w] = labels_of(chat, said, anchors, self.block_size)
            looping[w] = repeating(said)[anchors]
            behind = np.minimum(anchors[:, None] + np.arange(n_slots), chat.n - 1)  # what is said in slot k + 1
            pools[w] = self.data.candidates[chat.start : chat.start + chat.n][behind]
        return Batch(
            torch.from_numpy(features),
            torch.from_numpy(positions),
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            torch.from_numpy(looping),
            torch.from_numpy(pools["id"].astype(np.int64)),
            torch.from_numpy(pools["logit"].astype(np.float32)),
        )


def labels_of(chat: ChatRecord, said: Ints, anchors: Ints, block_size: int) -> Ints:
    """The tokens behind each anchor that belong to the same answer, [A, B-1]."""
    ends = np.zeros(chat.n, np.int64)
    for a, b in chat.answers:
        ends[a:b] = b
    slots = anchors[:, None] + np.arange(1, block_size)
    inside = slots < ends[anchors][:, None]
    return np.where(inside, said[np.minimum(slots, chat.n - 1)], NO_LABEL)


def repeating(said: Ints) -> npt.NDArray[np.bool_]:
    """Where a text repeats itself, as `ngram.repeats` has it, [n]."""
    grams = np.zeros(len(said), np.uint64)
    for back in range(LAST):  # a hash of the last four; it wraps around
        grams[back:] = grams[back:] * np.uint64(0x9E3779B97F4A7C15) + said[: len(said) - back].astype(np.uint64) + 1
    order = np.argsort(grams, kind="stable")
    gap, same = np.diff(order), np.diff(grams[order]) == 0
    found = np.zeros(len(said), np.bool_)
    found[order[1:]] = same & (gap <= FAR)
    found[: LAST - 1] = False
    return found
