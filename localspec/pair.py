"""The public object: a target and its drafter, loaded, checked against each other, ready to speak."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, Unpack, cast

import numpy as np

from localspec.answer import Chunk, Result, Stream
from localspec.chat import Chat, need_template
from localspec.dflash import compat
from localspec.engine.drafter import Drafter
from localspec.engine.generate import Engine, generate
from localspec.engine.plan import Drafting, Fixed, Plan, selector
from localspec.engine.sampling import Sampler
from localspec.engine.stats import Stats
from localspec.engine.target import MAX_LEAVES, Target
from localspec.errors import OptionError, PairError
from localspec.llama import Header, Model, read_header, system_info
from localspec.options import Options, Select, Settings
from localspec.planning.planner import Planner
from localspec.planning.profile import PairProfile
from localspec.planning.proposal import Bounds
from localspec.planning.store import ProfileStore
from localspec.text import ChatTemplate, Message, TextStream, encode_plain

TREE = 16  # nodes of a tree whose size nobody said
MAX_N_CTX = 2**24  # beyond any model; llama.cpp wraps at 2³² and tries to allocate what lies below
MAX_N_THREADS = 512  # GGML_MAX_N_THREADS; ggml writes past its tables with more
Prompt = str | Sequence[Message] | Sequence[int]


class _Closable(Protocol):
    def close(self) -> None: ...


_C = TypeVar("_C", bound=_Closable)


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
        thinking: bool | None = None,
    ) -> None:
        head, draft_head = check_files(target, drafter)
        self.target_path, self.drafter_path, self.n_ctx = target, drafter, n_ctx
        self.block_size = compat.block_size(draft_head) if draft_head else 1
        self.path: str | Select = "auto"  # how to choose from the pool where an answer does not say
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
        self.drafting = _drafting(draft_head, speaker)
        reached = draft_head.get("localspec.acceptance_length.all") if draft_head else None  # by `localspec distill`
        self._acceptance_length = reached if isinstance(reached, float) else None
        self.vocab, source = speaker.model.vocab, speaker.model.chat_template
        self.template = ChatTemplate(source, self.vocab, thinking=thinking) if source else None

    def _load_target(self, head: Header, draft_head: Header | None, gpu_layers: int) -> Target:
        model = self._keep(Model(head.path, gpu_layers=gpu_layers))
        layers = draft_head.ints("dflash.target_layers") if draft_head else ()
        draft_max = compat.draft_max(draft_head, self.n_ctx, recurrent=model.is_recurrent)
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
        drafter). `path` says how to choose from the drafter's pool: "auto" verifies what pays most on this machine, at
        most `draft_max` and at least `draft_min` tokens, none less likely than `draft_p_min`; "greedy", "expected",
        "tree", "sampled" or a function of the `Lattice` always choose the same way, `draft_max` tokens. Raises
        OptionError for an option that cannot be honoured, TemplateError for messages the template refuses.
        """
        ids = self.encode(prompt)
        given = {name: value for name, value in options.items() if value is not None}
        settings = Settings.of(cast(Options, {"path": self.path} | given), self.drafting)
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

    def _chunks(self, ids: list[int], settings: Settings, result: Result) -> Generator[Chunk]:
        text = TextStream(self.vocab, settings.limits)
        sampler = Sampler(settings.sampling)
        if self.planner and settings.drafts and settings.path in ("auto", "ngram"):
            self.planner.prepare()
        pool = settings.drafts and self._needs_pool(ids, settings)
        plan = self._plan(settings, sampler, pool=pool)
        prefill = self.engine.start(ids, spec=pool, progress=settings.progress)
        result.stats = Stats(prompt_n=prefill.n + 1, cached_n=prefill.n_cached, prompt_s=prefill.total_s)
        for round in generate(
            self.engine,
            plan=plan,
            sampler=sampler,
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

    def _needs_pool(self, ids: list[int], settings: Settings) -> bool:
        """Whether this answer may ask the drafter."""
        if settings.path != "auto" or settings.draft_min:
            return settings.path != "ngram"
        return self.planner is None or self.planner.admit(self.engine.lag(ids))

    def _plan(self, settings: Settings, sampler: Sampler, *, pool: bool) -> Plan[Any]:
        drafting, path, n = self.drafting, settings.path, settings.draft_max
        if drafting is None or not settings.drafts:
            return Fixed()
        if callable(path):
            return Fixed(drafting.n_slots, lambda lattice, _: path(lattice))
        if path == "ngram" and not self.planner:
            return Fixed()
        if path in ("auto", "ngram") and self.planner:
            bounds = Bounds(n or drafting.draft_max, settings.draft_min, settings.draft_p_min)
            return self.planner.plan(bounds, sampler, pool=pool)
        n = n or (min(TREE, drafting.draft_max) if path == "tree" else drafting.n_slots)
        return Fixed(drafting.n_slots, selector(path, n, drafting, sampler))

    @cached_property
    def planner(self) -> Planner | None:
        """Plans what to draft. None without a drafter, and where the context is too small to measure in."""
        if self.drafting is None or self.n_ctx <= 2 * (self.drafting.draft_max + 1):
            return None
        return Planner(self.engine, self.drafting, ProfileStore(self._identity), self._acceptance_length)

    @property
    def profile(self) -> PairProfile | None:
        """What is known of this pair on this machine."""
        return self.planner.profile if self.planner else None

    def settle(self) -> None:
        """Measure this machine if that has not been done yet: some seconds, for when nobody waits for an answer."""
        if self.planner:
            self.planner.settle()

    def tune(self) -> PairProfile:
        """Measure this machine anew and forget what drafting has brought so far. Needs a drafter."""
        if self.planner is None:
            raise OptionError("there is nothing to tune without a drafter (-md) and some context (-c).")
        return self.planner.tune()

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
        """Free the drafter, then the target; what drafting has brought is kept for the next time."""
        if self._open and "planner" in vars(self) and self.planner:
            self.planner.keep()
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


def check_files(target: Path, drafter: Path | None) -> tuple[Header, Header | None]:
    """Their headers, if the two files can work together; raises ModelError or PairError."""
    head = read_header(target)
    compat.check_target(head)
    if drafter is None:
        return head, None
    draft_head = read_header(drafter)
    compat.check_drafter(draft_head)
    compat.check_pair(head, draft_head)
    return head, draft_head


def _drafting(head: Header | None, target: Target) -> Drafting | None:
    """What can be drafted with a drafter whose header is `head`; the temperature of its scores is 1 if it says none."""
    if head is None:
        return None
    n_slots = compat.block_size(head) - 1
    stored = head.get("localspec.calibration")
    known = isinstance(stored, tuple) and len(stored) == n_slots and all(0 < float(t) < math.inf for t in stored)
    return Drafting(
        n_slots=n_slots,
        calibration=np.array(stored if known else [1.0] * n_slots, np.float64),
        max_leaves=MAX_LEAVES if target.can_branch else 1,
        draft_max=target.draft_max,
        n_vocab=target.model.vocab.n_tokens,
    )


def _identity(paths: Sequence[Path | None], *settings: int | None) -> str:
    """What a measured costs holds for: these very files on this build with these settings."""
    stats = [path.stat() for path in paths if path]
    return repr((system_info(), settings, [(stat.st_size, stat.st_mtime_ns) for stat in stats]))
