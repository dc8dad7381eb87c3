"""The target makes up questions, answers them, and its layer inputs are kept: text and features at once.

Many chats run side by side, one token of each in every decode; a chat that ends makes room for the next one.
Prompts are not prefilled in pieces: with this many sequences in a batch a token costs the same alone or in a row,
and what all chats begin with alike is decoded once and stays in memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localspec.dflash.compat import check_target
from localspec.distill.chats import Chat, Chats, Recipe, Setting
from localspec.distill.chats import setting as how_it_speaks
from localspec.distill.checks import check_disk, check_synthesis
from localspec.distill.meter import Meter
from localspec.distill.store import N_CANDIDATES, NONE, Halves, Ids, Meta, Span, Store, file_sha256
from localspec.errors import OptionError
from localspec.llama import Context, Header, Model, default_threads, gpu_offload, read_header

Floats = NDArray[np.float32]
HALF_MAX = float(np.finfo(np.float16).max)


def choose(
    logits: Floats,
    temperatures: Sequence[float],
    rngs: Sequence[np.random.Generator],
    min_p: float,
) -> Ids:
    """A token for each row of logits [n, n_vocab]: its best, or at a temperature a draw (Gumbel-max).

    Drawn are only tokens at least `min_p` times as likely as the best.
    """
    tokens: Ids = logits.argmax(axis=1).astype(np.int32)
    for row, (temperature, rng) in enumerate(zip(temperatures, rngs, strict=True)):
        if temperature > 0:
            scores = logits[row]
            likely = np.flatnonzero(scores > scores[tokens[row]] + temperature * np.log(min_p))
            noise = rng.gumbel(size=len(likely)).astype(np.float32)
            tokens[row] = likely[(scores[likely] / temperature + noise).argmax()]
    return tokens


def candidates(row: Floats, *, reach: float = 8.0) -> NDArray[np.void]:
    """The best few of a row of logits [n_vocab], best first, none more than `reach` below the best; a CANDIDATES."""
    near = np.flatnonzero(row >= row.max() - reach)
    if len(near) > N_CANDIDATES:
        near = near[np.argpartition(row[near], -N_CANDIDATES)[-N_CANDIDATES:]]
    near = near[np.argsort(-row[near], kind="stable")]
    found = NONE.copy()
    found["id"][: len(near)], found["logit"][: len(near)] = near, np.clip(row[near], -HALF_MAX, HALF_MAX)
    return found


def layer_inputs(ctx: Context, layers: Sequence[int], n: int) -> Halves:
    """Features of the last decode's `n` tokens, [n, len(layers) * n_embd], in batch order."""
    rows = [np.clip(ctx.layer_input(layer, n), -HALF_MAX, HALF_MAX).astype(np.float16) for layer in layers]
    return np.concatenate(rows, axis=1) if rows else np.zeros((n, 0), np.float16)


@dataclass
class Tally:
    """What came out so far, from all finished chats."""

    n_tokens: int = 0
    n_answer: int = 0
    n_sampled: int = 0  # answer tokens at a temperature
    n_repeating: int = 0  # repeating answer tokens
    n_chats: int = 0
    n_continued: int = 0
    n_file: int = 0
    ends: dict[str, int] = field(default_factory=dict)

    def add(self, n: int, answers: Sequence[Span], figures: Mapping[str, Any]) -> None:
        lengths = [last - first for first, last in answers]
        self.n_tokens += n
        self.n_answer += sum(lengths)
        self.n_sampled += sum(k for k, t in zip(lengths, figures["temperatures"], strict=True) if t > 0)
        self.n_repeating += figures["n_repeating"]
        self.n_chats += 1
        self.n_continued += len(answers) > 1
        self.n_file += figures["source"] == "file"
        self.end(figures["end"])

    def end(self, reason: str) -> None:
        self.ends[reason] = self.ends.get(reason, 0) + 1

    def figures(self) -> dict[str, Any]:
        shares = {
            "repeating": self.n_repeating / max(self.n_answer, 1),
            "sampled": self.n_sampled / max(self.n_answer, 1),
            "continued": self.n_continued / max(self.n_chats, 1),
            "file": self.n_file / max(self.n_chats, 1),
        }
        return asdict(self) | {key: round(value, 4) for key, value in shares.items()}


class Finished(NamedTuple):
    """A chat and what the target's passes over its n tokens left: features [n, width], candidates [n]."""

    chat: Chat
    features: Halves
    candidates: NDArray[np.void]


class Slots:
    """The running chats, one in each sequence of a context, and their features."""

    def __init__(self, ctx: Context, layers: Sequence[int], chats: Iterator[Chat], n: int, setting: Setting) -> None:
        self._ctx, self._layers, self._next, self._setting = ctx, layers, chats, setting
        self._seqs = np.arange(n, dtype=np.int32)
        self._pos = np.zeros(n, np.int32)  # next to decode, of each slot
        self._features = np.zeros((n, setting.recipe.n_ctx, len(layers) * ctx.model.n_embd), np.float16)
        self._candidates = np.full((n, setting.recipe.n_ctx), NONE)
        self._chats = [next(chats) for _ in range(n)]
        for layer in layers:
            ctx.want_layer_input(layer, True)

    def step(self) -> list[Finished]:
        """Decode one token of every chat; returns those that are finished."""
        pos = self._pos.tolist()
        tokens = np.array([chat.tokens[p] for chat, p in zip(self._chats, pos, strict=True)], np.int32)
        output = np.array(
            [p == len(chat.tokens) - 1 and not chat.end for chat, p in zip(self._chats, pos, strict=True)], np.int8
        )
        self._ctx.decode(tokens, self._pos, seq=self._seqs, output=output)
        self._features[self._seqs, self._pos] = layer_inputs(self._ctx, self._layers, len(tokens))
        self._candidates[self._seqs, self._pos] = NONE
        if output.any():
            self._sample(np.flatnonzero(output))
        self._pos += 1
        return list(self._replace())

    def _sample(self, which: NDArray[np.intp]) -> None:
        chats, logits = [self._chats[i] for i in which], self._ctx.logits(len(which))
        for i, row in zip(which, logits, strict=True):
            self._candidates[i, self._pos[i]] = candidates(row)
        temperatures, rngs = [chat.temperature for chat in chats], [chat.rng for chat in chats]
        tokens = choose(logits, temperatures, rngs, self._setting.recipe.min_p)
        for chat, token in zip(chats, tokens.tolist(), strict=True):
            chat.add(token)

    def _replace(self) -> Iterator[Finished]:
        for i, chat in enumerate(self._chats):
            n = len(chat.tokens)
            if chat.end and self._pos[i] >= n:
                yield Finished(chat, self._features[i, :n].copy(), self._candidates[i, :n].copy())
                self._chats[i] = next(self._next)
                self._rewind(i)

    def _rewind(self, i: int) -> None:
        """Forget a chat up to what all begin with, or all of it where the memory did not keep that.

        The last token of the head is decoded anew: a chat without opener needs its logits.
        """
        kept = self._ctx.first_position(seq=i) == 0  # not so in windows and recurrent states
        n = max(min(len(self._setting.script.head), int(self._pos[i])) - 1, 0) if kept else 0
        self._ctx.remove(n, seq=i)
        self._pos[i] = n


def synthesise(
    target: str | Path,
    folder: str | Path,
    *,
    n_tokens: int,
    hours: float | None = None,
    n_slots: int = 64,
    layers: Sequence[int] | None = None,
    text_only: bool = False,
    prompts: Sequence[str] = (),
    seed: int = 0,
    n_threads: int | None = None,
    recipe: Recipe | None = None,
    log_every_s: float = 30.0,
) -> Tally:
    """Fill `folder` with at least `n_tokens` tokens of chats and features, or as many as `hours` allow.

    Goes on where an earlier call, finished or killed, has stopped. `layers` are counted as GGUF counts them; with
    `text_only` no features are kept, which saves memory and leaves them to `collect`. Without a GPU each of `n_threads`
    threads runs its share of the slots. A target without chat template goes on with `prompts` as plain text. Raises a
    LocalspecError when the target cannot serve, has neither chat template nor prompts, the folder holds another
    target's work, or memory or disk are too small.
    """
    path, folder, recipe = Path(target), Path(folder), recipe or Recipe()
    header = read_header(path)
    layers = [] if text_only else layers_to_read(header, layers)
    n_workers = 1 if gpu_offload() else min(n_threads or default_threads(), n_slots)
    if n_workers < 1:
        raise OptionError(f"{n_slots} slots on {n_threads} threads hold no chat; use 1 or more.")
    with Model(path) as model, ExitStack() as stack:
        setting = how_it_speaks(model.chat_template, model.vocab, recipe, prompts, seed)
        store = stack.enter_context(Store(folder, describe(header, model, layers)))
        run = _Run(store, n_tokens, hours, log_every_s)
        if store.n_tokens >= n_tokens:
            return run.tally
        check_disk(store.folder, (n_tokens - store.n_tokens) * store.meta.row_bytes, "the chats")
        check_synthesis(header, n_slots, recipe.n_ctx, len(layers))
        setting.seen.update(store.questions())
        chats = Chats(setting, 1 + max((chat.figures["id"] for chat in store.chats), default=-1))
        crews = []
        for worker in range(n_workers):
            n = n_slots // n_workers + (worker < n_slots % n_workers)
            threads = 1 if n_workers > 1 else n_threads
            # `exact` as the pair will run, and because its attention passes over what is masked: a chat pays for its
            # own length, where plain attention lets all pay for the longest.
            ctx = Context(
                model,
                n_ctx=n * recipe.n_ctx,
                n_batch=n,
                n_seq=n,
                unified=False,
                layers=layers,
                exact=True,
                n_threads=threads,
            )
            crews.append(Slots(stack.enter_context(ctx), layers, chats, n, setting))
        return run.fill(crews)


def default_layers(n_layer: int, n: int = 4) -> list[int]:
    """Evenly spread layers whose inputs a drafter reads, as GGUF counts them."""
    first = min(2, n_layer - 1)
    last = max(n_layer - 2, first)
    return sorted(set(np.linspace(first, last, n).round().astype(int).tolist()))


def describe(header: Header, model: Model, layers: Sequence[int]) -> Meta:
    """Whose work a folder of chats with features of `layers` holds."""
    digest = header.strings["tokenizer.ggml.tokens"][1]
    return Meta(header.path.name, file_sha256(header.path), model.n_embd, tuple(layers), model.vocab.n_tokens, digest)


def layers_to_read(target: Header, layers: Sequence[int] | None) -> list[int]:
    """`layers`, or those a drafter reads by default.

    Raises:
        ModelError: it is no target.
        OptionError: there is no such layer.
    """
    check_target(target)
    n_layer = int(target.get("{arch}.block_count"))
    chosen = list(layers or default_layers(n_layer))
    if bad := [layer for layer in chosen if not 0 <= layer < n_layer]:
        raise OptionError(f"{target.name} has layers 0 to {n_layer - 1}, not {bad[0]}; choose others.")
    return chosen


class _Run:
    """Decoding until there is enough: a thread a crew of slots, one store, one tally.

    A crew computes on one thread of its own. That beats one crew on all threads: nobody waits for
    anybody, least of all for a thread that some other program has pushed off its core.
    """

    def __init__(self, store: Store, n_tokens: int, hours: float | None, log_every_s: float) -> None:
        self._store, self._n_tokens, self._log_every_s = store, n_tokens, log_every_s
        self._meter = Meter("writing chats", n_tokens, store.folder / "synthesise.jsonl", done=store.n_tokens)
        self.tally = Tally()
        for chat in store.chats:
            self.tally.add(chat.n, chat.answers, chat.figures)
        self._n_begin = self._n_last = self.tally.n_tokens
        self._begin = self._last = time.monotonic()
        self._end = self._begin + 3600 * hours if hours is not None else math.inf
        self._lock = Lock()
        self._stop = False

    def fill(self, crews: Sequence[Slots]) -> Tally:
        with self._meter, ThreadPoolExecutor(len(crews)) as pool:
            try:
                for work in [pool.submit(self._work, crew) for crew in crews]:
                    work.result()
            finally:
                self._stop = True
            self._report(self._n_begin, self._begin)
        return self.tally

    def _work(self, crew: Slots) -> None:
        try:
            while not self._stop:
                finished = crew.step()
                with self._lock:
                    self._take(finished)
        finally:
            self._stop = True

    def _take(self, finished: Iterable[Finished]) -> None:
        for chat, features, best in finished:
            if not chat.answers:
                self.tally.end(chat.end)
                continue
            tokens, figures = np.array(chat.tokens, np.int32), chat.figures()
            self._store.append(tokens, features, best, chat.questions, chat.answers, **figures)
            self.tally.add(len(tokens), chat.answers, figures)
        self._meter.advance(self.tally.n_tokens)
        now = time.monotonic()
        if now - self._last >= self._log_every_s:
            self._report(self._n_last, self._last)
            self._last, self._n_last = now, self.tally.n_tokens
        self._stop = self._stop or self.tally.n_tokens >= self._n_tokens or now > self._end

    def _report(self, n_since: int, since: float) -> None:
        """A line of figures into the log and one for the eye; the rate is that since `since`."""
        tally, now = self.tally, time.monotonic()
        rate = (tally.n_tokens - n_since) / max(now - since, 1e-6)
        figures = tally.figures() | {"time": round(time.time()), "tokens_per_s": round(rate, 1)}
        note = (
            f"{tally.n_tokens:,} of {self._n_tokens:,} tokens in {tally.n_chats:,} chats, {rate:.0f} tokens/s, "
            f"{figures['repeating']:.1%} of the answers repeat"
        )
        self._meter.report(tally.n_tokens, note, figures)
