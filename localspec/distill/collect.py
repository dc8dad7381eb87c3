"""A second pass over chats that are written: the target reads them again, and its layer inputs and candidates are kept.

For chats that were synthesised without features, or for another file of the same model. Whole chats are packed into
one decode, as many as fit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal as size

from localspec.distill.checks import check_disk
from localspec.distill.meter import Meter, duration
from localspec.distill.store import NONE, ChatRecord, Halves, Store, Text, read_text
from localspec.distill.synthesise import candidates, describe, layer_inputs, layers_to_read
from localspec.errors import OptionError
from localspec.llama import Context, Header, Model, read_header

N_BATCH = 512


def collect(
    target: str | Path,
    source: str | Path,
    folder: str | Path,
    *,
    layers: Sequence[int] | None = None,
    n_threads: int | None = None,
    log_every_s: float = 30.0,
) -> int:
    """Fill `folder` with the chats of `source` and what the GGUF file `target` makes of them; returns their tokens.

    Of `source`, another folder, tokens and chats are read. Goes on where an earlier call, finished or killed, has
    stopped. Raises a LocalspecError when the target cannot serve, its tokenizer is not that of the chats, the folder
    holds other work, or the disk is too small.
    """
    path, folder, text = Path(target), Path(folder), read_text(Path(source))
    header = read_header(path)
    layers = layers_to_read(header, layers)
    with Model(path) as model, Store(folder, describe(header, model, layers)) as store:
        _check_source(header, text, store, Path(source))
        left = text.chats[len(store.chats) :]
        n = sum(chat.n for chat in left)
        if not left:
            return store.n_tokens
        check_disk(folder, n * store.meta.row_bytes, "the features")
        longest = max(chat.n for chat in left)
        n_seq = 1 if model.is_recurrent else 64  # recurrent memories would take a batch apart and reorder it
        n_ctx = max(N_BATCH, longest)
        with Context(model, n_ctx=n_ctx, n_batch=N_BATCH, n_seq=n_seq, layers=layers, n_threads=n_threads) as ctx:
            for layer in layers:
                ctx.want_layer_input(layer, True)
            _fill(store, text, loads(left, n_seq), ctx, layers, log_every_s)
        return store.n_tokens


def loads(chats: Iterable[ChatRecord], n_seq: int) -> Iterator[list[ChatRecord]]:
    """Chats in their order, as many at a time as fit into one batch; a longer one alone."""
    load: list[ChatRecord] = []
    for chat in chats:
        if load and (len(load) == n_seq or sum(c.n for c in load) + chat.n > N_BATCH):
            yield load
            load = []
        load.append(chat)
    if load:
        yield load


def _fill(
    store: Store,
    text: Text,
    work: Iterable[list[ChatRecord]],
    ctx: Context,
    layers: Sequence[int],
    log_every_s: float,
) -> None:
    n_begin, n_all, begin = store.n_tokens, len(text.tokens), time.monotonic()
    told = begin - log_every_s
    with Meter("collecting", n_all, store.folder / "collect.jsonl", done=n_begin) as meter:
        for load in work:
            first, n = load[0].start, sum(chat.n for chat in load)
            features, best = _read(ctx, layers, text.tokens[first : first + n], load)
            for chat in load:
                rows = slice(chat.start - first, chat.start - first + chat.n)
                tokens = text.tokens[chat.start : chat.start + chat.n]
                store.append(tokens, features[rows], best[rows], chat.questions, chat.answers, **chat.figures)
            now = time.monotonic()
            speed = (store.n_tokens - n_begin) / (now - begin)
            if n_begin + n == store.n_tokens:
                _announce(store, n_all - n_begin, speed)
            meter.advance(store.n_tokens)
            if now - told >= log_every_s or store.n_tokens == n_all:
                note = f"{store.n_tokens:,} of {n_all:,} tokens, {speed:.0f} tokens/s"
                meter.report(store.n_tokens, note, {"n_tokens": store.n_tokens, "tokens_per_s": speed})
                told = now


def _announce(store: Store, n: int, speed: float) -> None:
    """Say how much and how long, now that the first batch has been timed."""
    print(
        f"collecting features of {n:,} tokens: {size(n * store.meta.row_bytes)} in {store.folder}, "
        f"about {duration(n / speed)}",
        file=sys.stderr,
        flush=True,
    )


def _read(
    ctx: Context, layers: Sequence[int], tokens: NDArray[np.int32], load: Sequence[ChatRecord]
) -> tuple[Halves, NDArray[np.void]]:
    """Features [n, width] and candidates [n] of the `tokens` of some chats, one after the other."""
    lengths = [chat.n for chat in load]
    pos = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    seq = np.repeat(np.arange(len(load), dtype=np.int32), lengths)
    asked = np.concatenate([_asked(chat) for chat in load])
    features, best = [], np.full(len(tokens), NONE)
    for start in range(0, len(tokens), N_BATCH):
        part = slice(start, start + N_BATCH)
        ctx.decode(tokens[part], pos[part], seq=seq[part], output=asked[part])
        features.append(layer_inputs(ctx, layers, len(tokens[part])))
        where = start + np.flatnonzero(asked[part])
        for i, row in zip(where, ctx.logits(len(where)) if len(where) else (), strict=True):
            best[i] = candidates(row)
    ctx.clear()
    return np.concatenate(features), best


def _asked(chat: ChatRecord) -> NDArray[np.int8]:
    """The tokens whose successor is a token of an answer."""
    flags = np.zeros(chat.n, np.int8)
    for first, last in chat.answers:
        flags[max(first - 1, 0) : last - 1] = 1
    return flags


def _check_source(target: Header, text: Text, store: Store, source: Path) -> None:
    theirs, ours = text.meta, store.meta
    hashes = (theirs.tokenizer_sha256, ours.tokenizer_sha256)
    if theirs.n_vocab != ours.n_vocab or (hashes[0] and hashes[0] != hashes[1]):
        raise OptionError(
            f"the chats in {source} are by {theirs.target}, whose tokenizer ({theirs.n_vocab:,} tokens, SHA-256 "
            f"{hashes[0][:12] or 'unknown'}) is not that of {target.name} ({ours.n_vocab:,} tokens, SHA-256 "
            f"{hashes[1][:12]}); give chats of the same model."
        )
    places = [(chat.start, chat.n, chat.answers) for chat in text.chats[: len(store.chats)]]
    if places != [(chat.start, chat.n, chat.answers) for chat in store.chats]:
        raise OptionError(f"{store.folder} holds other chats than {source}; choose another output folder.")
