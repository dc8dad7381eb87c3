"""The public object: a target and its drafter, loaded, checked against each other, ready to speak."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from localspec import prompt as prompts
from localspec.answer import Chunk, Result, Stream
from localspec.chat import Chat
from localspec.engine.generate import Engine, generate
from localspec.engine.paths import NOTHING, Draft
from localspec.engine.plan import Drafting
from localspec.engine.replay import Rounds, replay
from localspec.engine.sampling import Sampler
from localspec.engine.stats import Stats
from localspec.errors import BackendError
from localspec.llama import Vocab
from localspec.options import Options, Select, Settings, with_options
from localspec.planning.exactness import Exactness, Promise
from localspec.planning.plans import Plans
from localspec.planning.profile import PairProfile
from localspec.prompt import Prompt
from localspec.template import ChatTemplate
from localspec.text import TextStream
from localspec.turns import Turns


@dataclass(frozen=True)
class Parts:
    """What a pair is made of. `loading` opens them from files; `free` closes them again."""

    engine: Engine
    plans: Plans
    vocab: Vocab
    template: ChatTemplate | None
    target_path: Path
    drafter_path: Path | None
    free: Callable[[], None]


class Pair:
    """A loaded target with its drafter (or none). Made by `load`; a context manager that frees both.

    Any thread may use it. It gives one answer at a time: who asks while one is under way in another thread waits until
    that has ended, or has been left alone for ten seconds. In one and the same thread a new answer ends the one before.
    With asyncio: `await asyncio.to_thread(pair.generate, prompt)`. In a forked process it raises BackendError.
    """

    def __init__(self, parts: Parts) -> None:
        self.target_path, self.drafter_path = parts.target_path, parts.drafter_path
        self.vocab, self.template = parts.vocab, parts.template
        self.path: str | Select = "auto"  # how to choose from the pool where an answer does not say
        self.engine, self._plans, self._free = parts.engine, parts.plans, parts.free
        self._turns = Turns()

    @property
    def n_ctx(self) -> int:
        """Tokens of context."""
        return self.engine.target.n_ctx

    @property
    def n_tokens(self) -> int:
        """Tokens of the last answer so far, those of its prompt included."""
        return len(self.engine.tokens)

    @property
    def has_drafter(self) -> bool:
        return self.engine.drafter is not None

    @property
    def drafting(self) -> Drafting | None:
        """What can be drafted; None without a drafter."""
        return self._plans.drafting

    @property
    def block_size(self) -> int:
        """Tokens of the drafter's block, the anchor included; 1 without a drafter."""
        return self.drafting.n_slots + 1 if self.drafting else 1

    @property
    def profile(self) -> PairProfile | None:
        """What is known of this pair on this machine. None without a drafter, and where the context is too small to
        measure in."""
        if known := self._plans.profile.known:
            return known
        with self._turns.work():
            return self._plans.profile.get()

    @property
    def exactness(self) -> Exactness:
        """Which passes give each token the bits it has alone. Measured at first use."""
        with self._turns.work():
            return self._plans.prepare()

    @property
    def promise(self) -> Promise:
        """What holds between the words with the drafter and those without, at default settings; str() says it.

        Measured at first use.
        """
        with self._turns.work():
            return self._plans.promise

    def settle(self) -> None:
        """Measure this machine if that has not been done yet: some seconds, for when nobody waits for an answer."""
        with self._turns.work():
            self._plans.profile.settle()

    def tune(self) -> PairProfile:
        """Measure this machine anew and forget what drafting has brought so far. Needs a drafter."""
        with self._turns.work():
            return self._plans.profile.measure()

    @with_options
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """The whole answer to `prompt`; see `stream`."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.result

    @with_options
    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer to `prompt`, one chunk a round.

        `prompt`: a text (one user turn where the model has a chat template, else plain text to continue), a list of
        messages, or token ids. Raises OptionError for an option that cannot be honoured, TemplateError for messages
        the template refuses, BackendError once the pair is closed.
        """
        ids = self.encode(prompt)
        given = {name: value for name, value in options.items() if value is not None}
        settings = Settings.of(cast(Options, {"path": self.path} | given), self.drafting)
        self._check(ids)
        result = Result()
        return Stream(self._chunks(ids, settings, result), result, self._turns)

    def _chunks(self, ids: list[int], settings: Settings, result: Result) -> Generator[Chunk]:
        text = TextStream(self.vocab, settings.limits, self.template.parser(ids) if self.template else None)
        self._plans.prepare()
        sampler = Sampler(settings.sampling)
        pool = self._plans.needs_pool(settings, lambda: self.engine.lag(ids))
        plan = self._plans.plan(settings, sampler, pool=pool)
        keep_at = self.template.n_before_answer(ids) if self.template else None
        prefill = self.engine.start(ids, spec=pool, keep_at=keep_at, progress=settings.progress)
        result.stats = Stats(prompt_n=prefill.n + 1, cached_n=prefill.n_cached, prompt_s=prefill.total_s)
        for round in generate(self.engine, plan=plan, sampler=sampler, clip=text.clip):
            result.stats.add(round)
            result.stats.n_parked += round.n_drafted == 0 and plan.is_parked
            piece = text.text() + (text.flush() if text.finish_reason else "")
            thought = text.reasoning()
            result.text += piece
            result.reasoning += thought
            result.tokens += round.tokens
            yield Chunk(piece, round.tokens, round.n_accepted, thought)
        result.finish_reason = text.finish_reason or "context"
        rest, thought = text.flush(), text.reasoning()
        if rest or thought:
            result.text += rest
            result.reasoning += thought
            yield Chunk(rest, [], 0, thought)

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that remembers its turns. Raises TemplateError if the model has no chat template."""
        self.ensure_open()
        return Chat(self, system=system)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (see `stream`)."""
        with self._turns.reading():
            return prompts.encode(prompt, self.vocab, self.template, self.target_path.name)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The target's logits [n_vocab] for what follows `tokens`, by plain decoding."""
        self._check(tokens)
        with self._turns.work():
            self.engine.start(tokens, spec=False)
            row: NDArray[np.float32] = self.engine.target.verify(tokens[-1], NOTHING)[0].copy()
            self.engine.forget()
        return row

    @property
    def drafts(self) -> list[Draft]:
        """What each round of the last answer has verified besides the token before it."""
        return self.engine.drafts

    def replay(self, ids: Sequence[int], rounds: Rounds, at: int) -> NDArray[np.float32] | None:
        """Logits [n_vocab] of token `at` of an answer to `ids`, computed afresh in the passes of its `rounds`."""
        with self._turns.work():
            self.engine.forget()
            self.engine.start(ids, spec=False)
            try:
                return replay(self.engine.target, ids[-1], rounds, at)
            finally:
                self.engine.forget()

    def forget(self) -> None:
        """Empty both KV caches: the next answer reads its whole prompt."""
        with self._turns.work():
            self.engine.forget()

    def _check(self, ids: Sequence[int]) -> None:
        prompts.check(ids, n_ctx=self.n_ctx, n_vocab=self.vocab.n_tokens)

    def ensure_open(self) -> None:
        """Raise BackendError if the pair is closed, or this process was forked after it was loaded."""
        self._turns.check()

    def reading(self) -> AbstractContextManager[None]:
        """Keep the pair open meanwhile, for uses of `vocab` and `template`. Raises BackendError if it is closed."""
        return self._turns.reading()

    def close(self) -> None:
        """Free the drafter, then the target; what drafting has brought is kept for the next time.

        Waits for the end of a round in another thread; the answer it belongs to then raises BackendError.
        """
        if self._turns.close():
            self._plans.profile.keep()
            self._free()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Raises BackendError: neither pickle nor copy can take what llama.cpp holds along."""
        raise BackendError("a pair can be neither pickled nor copied; load it in the process that uses it.")

    def __repr__(self) -> str:
        drafter = f"drafter {self.drafter_path.name}" if self.drafter_path else "no drafter"
        state = ", closed" if self._turns.is_closed else ""
        return f"<Pair {self.target_path.name}, {drafter}, {self.n_ctx:,} tokens of context{state}>"
