"""The public object: a target and its drafter, loaded, checked against each other, ready to speak."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

from localspec import compat, fit, memory, probe, staircase
from localspec.chat import Chat, need_template
from localspec.drafter import Drafter
from localspec.errors import MissingError, OptionError, PairError
from localspec.generate import Engine, generate
from localspec.llama import Header, Model, read_header, system_info, with_shards
from localspec.planner import Auto, Fixed, Plan
from localspec.sampling import Sampler, SamplingParams
from localspec.stats import Stats
from localspec.target import Target
from localspec.text import ChatTemplate, Limits, Message, TextStream, encode_plain

MAX_N_CTX = 2**24  # beyond any model; llama.cpp wraps at 2³² and tries to allocate what lies below
MAX_N_THREADS = 512  # GGML_MAX_N_THREADS; ggml writes past its tables with more
Prompt = str | Sequence[Message] | Sequence[int]
Progress = Callable[[int, int], None]


class _Closable(Protocol):
    def close(self) -> None: ...


_C = TypeVar("_C", bound=_Closable)


class Options(TypedDict, total=False):
    """Keyword options of `Pair.generate`, `Pair.stream` and `Chat.send`; `sampling.SamplingParams` has the defaults."""

    max_tokens: int | None
    stop: str | Sequence[str]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    seed: int | None
    spec: bool | None
    draft_max: int | None
    progress: Progress | None


@dataclass(frozen=True)
class Chunk:
    """What one round added: `text` that is now certain, `tokens`, and how many of these the drafter had guessed."""

    text: str
    tokens: list[int]
    n_accepted: int

    @property
    def drafted(self) -> list[bool]:
        """For each token, whether it was drafted (the last one of a round usually is the target's own)."""
        return [i < self.n_accepted for i in range(len(self.tokens))]


@dataclass
class Result:
    """An answer. `tokens` has everything the target said, an end-of-generation token included; `finish_reason` is
    "stop", "length", "context" (the context is full) or "cancelled".
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"
    stats: Stats = field(default_factory=Stats)


class Stream:
    """An answer on its way: iterate over its chunks; `result` grows with them. Closing it early cancels the rest."""

    def __init__(self, chunks: Generator[Chunk], result: Result) -> None:
        self._chunks, self.result = chunks, result

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def wrap(self, chunks: Generator[Chunk]) -> Stream:
        """The same answer, seen through another iterator."""
        return Stream(chunks, self.result)

    def close(self) -> None:
        """Stop the answer here; what was said stays in `result`."""
        self._chunks.close()


class Pair:
    """A loaded target with its drafter (or none). Made by `load`; a context manager that frees both.

    Not thread-safe: one answer at a time.
    """

    def __init__(
        self,
        target: Path,
        drafter: Path | None = None,
        *,
        n_ctx: int,
        gpu_layers: int = -1,
        draft_gpu_layers: int | None = None,
        n_threads: int | None = None,
        draft_max: int | None = None,
    ) -> None:
        head, draft_head = _check_files(target, drafter)
        self.target_path, self.drafter_path, self.n_ctx = target, drafter, n_ctx
        self.block_size = compat.block_size(draft_head) if draft_head else 1
        self.draft_max = None if draft_max is None else _checked_draft_max(draft_max, self.block_size)
        self._n_threads = n_threads
        self._identity = _identity((target, drafter), n_threads, gpu_layers, draft_gpu_layers)
        self._open: list[_Closable] = []
        try:
            speaker = self._load_target(head, draft_head, gpu_layers)
            on_gpu = gpu_layers if draft_gpu_layers is None else draft_gpu_layers
            self.engine = Engine(speaker, self._load_drafter(draft_head, speaker, on_gpu))
        except BaseException:
            self.close()
            raise
        self.vocab, source = speaker.model.vocab, speaker.model.chat_template
        self.template = ChatTemplate(source, self.vocab) if source else None

    def _load_target(self, head: Header, draft_head: Header | None, gpu_layers: int) -> Target:
        model = self._keep(Model(head.path, gpu_layers=gpu_layers))
        layers = draft_head.ints("dflash.target_layers") if draft_head else ()
        draft_max = self.block_size - 1
        target = self._keep(
            Target(model, n_ctx=self.n_ctx, layers=layers, draft_max=draft_max, n_threads=self._n_threads)
        )
        if draft_head and not target.can_roll_back:
            raise PairError(
                f"llama.cpp cannot roll back the recurrent memory of {head.arch} models, so {head.name} cannot be "
                "drafted for; run it without -md."
            )
        return target

    def _load_drafter(self, head: Header | None, target: Target, gpu_layers: int) -> Drafter | None:
        if head is None:
            return None
        model = self._keep(Model(head.path, gpu_layers=gpu_layers))
        causal = bool(head.get("dflash.attention.causal", False))
        return self._keep(Drafter(model, target, block_size=self.block_size, causal=causal, n_threads=self._n_threads))

    def _keep(self, resource: _C) -> _C:
        self._open.append(resource)
        return resource

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """The whole answer to `prompt`; see `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer to `prompt`, one chunk a round.

        `prompt`: a text (one user turn where the model has a chat template, else plain text to continue), a list of
        messages, or token ids. `spec=False` decodes plainly (default: draft where there is a
        drafter); `draft_max` fixes the tokens drafted a round. Raises
        OptionError for an option that cannot be honoured, TemplateError for messages the template refuses.
        """
        ids = self.encode(prompt)
        settings = _Settings.of(options, self)
        if not ids:
            raise OptionError("the prompt is empty; give at least one token.")
        if len(ids) > self.n_ctx:
            raise OptionError(
                f"the prompt has {len(ids):,} tokens, the context {self.n_ctx:,}; shorten it or raise n_ctx (-c)."
            )
        if bad := [token for token in ids if not 0 <= token < self.vocab.n_tokens]:
            raise OptionError(f"token {bad[0]} is outside the vocabulary of {self.vocab.n_tokens:,} tokens.")
        result = Result()
        return Stream(self._chunks(ids, settings, result), result)

    def _chunks(self, ids: list[int], settings: _Settings, result: Result) -> Generator[Chunk]:
        text = TextStream(self.vocab, settings.limits)
        plan = self.auto if settings.draft_max is None else Fixed(settings.draft_max)
        prefill = self.engine.start(ids, spec=settings.draft_max != 0, progress=settings.progress)
        result.stats = Stats(prompt_n=prefill.n + 1, cached_n=prefill.n_cached, prompt_s=prefill.total_s)
        for round in generate(
            self.engine,
            plan=plan,
            sampler=Sampler(settings.sampling),
            clip=text.clip,
        ):
            result.stats.add(round)
            result.stats.n_parked += round.n_drafted == 0 and plan.is_parked
            piece = text.text() + (text.flush() if text.finish_reason else "")
            result.text += piece
            result.tokens += round.tokens
            yield Chunk(piece, round.tokens, round.n_accepted)
        result.finish_reason = text.finish_reason or "context"
        if rest := text.flush():
            result.text += rest
            yield Chunk(rest, [], 0)

    @cached_property
    def auto(self) -> Plan:
        """The planner that decides how much to draft; made at first use, which may measure the machine for 3 s."""
        drafter = self.engine.drafter
        if drafter is None or self.n_ctx < 2 * self.block_size:  # too small to measure, or to matter
            return Fixed(self.block_size - 1)
        self.engine.forget()  # measuring writes into both memories
        costs = staircase.load_or_measure(self.engine.target, drafter, self._identity)
        return Auto(costs, drafter.block_size - 1)

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that keeps its turns in memory. Raises TemplateError if the model has no chat template."""
        return Chat(self, system=system)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (see `stream`)."""
        if isinstance(prompt, str):
            if self.template is None:
                return encode_plain(self.vocab, prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Sequence):
            raise OptionError(f"a prompt is a text, a list of messages, or a list of token ids, not {prompt!r}.")
        tokens = [token for token in prompt if isinstance(token, int)]
        messages = [message for message in prompt if isinstance(message, Mapping)]
        if isinstance(prompt, bytes) or len(tokens) + len(messages) < len(prompt) or (tokens and messages):
            raise OptionError("a prompt is a text, a list of messages, or a list of token ids, nothing else.")
        if not messages:
            return tokens
        template = need_template(self)
        return template.tokenize(template.render(messages))

    def close(self) -> None:
        """Free the drafter, then the target."""
        while self._open:
            self._open.pop().close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Settings:
    """Options after checking."""

    sampling: SamplingParams
    limits: Limits
    draft_max: int | None
    progress: Progress | None

    @classmethod
    def of(cls, options: Options, pair: Pair) -> _Settings:
        given: dict[str, Any] = dict(options)
        if unknown := given.keys() - Options.__annotations__.keys():
            raise OptionError(f"unknown option {min(unknown)!r}; choose from {', '.join(Options.__annotations__)}.")
        stop = given.get("stop") or ()
        if not isinstance(stop, Sequence):
            raise OptionError(f"stop must be a text or a list of texts, not {stop!r}.")
        names = {f.name for f in fields(SamplingParams)}
        return cls(
            SamplingParams(**{name: value for name, value in given.items() if name in names}),
            Limits(given.get("max_tokens"), (stop,) if isinstance(stop, str) else tuple(stop)),
            _draft_max(given, pair),
            given.get("progress"),
        )


def _draft_max(given: dict[str, Any], pair: Pair) -> int | None:
    """How many tokens to draft a round, from `spec` and `draft_max`; None leaves it to the planner."""
    spec, wanted = given.get("spec"), given.get("draft_max")
    if spec and pair.engine.drafter is None:
        raise OptionError("spec is on, but there is no drafter; load one with draft (-md).")
    if wanted is not None:
        _checked_draft_max(wanted, pair.block_size)
    if spec is False or pair.engine.drafter is None:
        if wanted:
            raise OptionError(f"draft_max is {wanted}, but nothing is drafted without spec and a drafter.")
        return 0
    return pair.draft_max if wanted is None else wanted


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is neither None nor a whole number from `low` to `high`."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise OptionError(f"{name} must be a whole number, not {value!r}.")
    if not low <= value <= high:
        raise OptionError(f"{name} must be at least {low:,} and at most {high:,}, not {value:,}.")


def _checked_draft_max(wanted: int, block_size: int) -> int:
    _check_whole("draft_max", wanted, -(2**31), 2**31 - 1)
    if block_size == 1 and wanted > 0:
        raise OptionError(f"draft_max is {wanted}, but there is no drafter; load one with draft (-md).")
    if not 0 <= wanted < block_size:
        raise OptionError(f"draft_max must be at least 0 and at most {block_size - 1} for this drafter, not {wanted}.")
    return wanted


def _identity(paths: Sequence[Path | None], *settings: int | None) -> str:
    """What a measured staircase holds for: these very files on this build with these settings."""
    stats = [path.stat() for path in paths if path]
    return repr((system_info(), settings, [(stat.st_size, stat.st_mtime_ns) for stat in stats]))


def _check_files(target: Path, drafter: Path | None) -> tuple[Header, Header | None]:
    """Their headers, if the two files can work together; raises ModelError or PairError."""
    head = read_header(target)
    compat.check_target(head)
    if drafter is None:
        return head, None
    draft_head = read_header(drafter)
    compat.check_drafter(draft_head)
    compat.check_pair(head, draft_head)
    return head, draft_head


def load(
    pair: str | None = None,
    *,
    target: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    n_ctx: int | None = None,
    gpu_layers: int | None = None,
    draft_gpu_layers: int | None = None,
    n_threads: int | None = None,
    draft_max: int | None = None,
    explain: Callable[[str], None] | None = None,
) -> Pair:
    """Load a pair by name (`load("smollm2-135m")`, the default) or two GGUF files (`load(target=…, draft=…)`).

    `target` alone decodes plainly. `n_ctx` tokens of context, `gpu_layers` and `draft_gpu_layers` layers on the GPU
    (negative: all) are by default what fits into memory, see `fit.settle`; `draft_max` tokens are drafted a round
    (default: as many as pay on this machine, see `planner`). `explain` is called with the memory plan, a table, before
    anything is loaded. Raises ModelError, PairError, OptionError (also for what does not fit), MissingError (run
    `localspec pull`), BackendError.
    """
    _check_whole("n_ctx (-c)", n_ctx, 1, MAX_N_CTX)
    _check_whole("n_threads (-t)", n_threads, 1, MAX_N_THREADS)
    _check_whole("gpu_layers (-ngl)", gpu_layers, -(2**31), 2**31 - 1)
    _check_whole("draft_gpu_layers (-ngld)", draft_gpu_layers, -(2**31), 2**31 - 1)
    if pair is not None and target is not None:
        raise OptionError(f"give either the pair {pair!r} or a target file, not both.")
    if target is None:
        from localspec import models

        entry = models.get(pair or models.DEFAULT)
        target_path, drafter_path = (
            entry.target_path(),
            entry.drafter_path() if draft is None else Path(draft),
        )
        if not entry.is_here():
            raise MissingError(f"{entry.name} is not on this machine; run: localspec pull {entry.name}")
        if draft_max is None and draft is None:
            draft_max = entry.draft_max
    else:
        target_path, drafter_path = Path(target), Path(draft) if draft else None
    heads = _check_files(target_path, drafter_path)
    plan = fit.settle(
        with_shards(heads[0]),
        heads[1],
        memory.pools(),
        n_ctx=n_ctx,
        gpu_layers=gpu_layers,
        draft_gpu_layers=draft_gpu_layers,
    )
    if explain:
        explain(plan.table())
    probe.vouch(target_path, drafter_path, gpu_layers=plan.gpu_layers)
    return Pair(
        target_path,
        drafter_path,
        n_ctx=plan.n_ctx,
        gpu_layers=plan.gpu_layers,
        draft_gpu_layers=plan.draft_gpu_layers,
        n_threads=n_threads,
        draft_max=draft_max,
    )
