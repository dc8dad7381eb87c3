"""Between messages, text and tokens: the chat template one way, streaming text the other."""

from __future__ import annotations

import codecs
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import jinja2.sandbox

from localspec.errors import OptionError, TemplateError
from localspec.llama import Vocab

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

GUARD = "\ufdd0"  # a Unicode noncharacter: no text contains it


class ChatTemplate:
    """A model's own Jinja chat template, rendered in a sandbox and tokenised.

    Special tokens are parsed in what the template writes, never in what a user wrote: each text such as
    `<|im_end|>` inside a message is marked before rendering and tokenised as plain text after it.
    `thinking` is what the template is told as `enable_thinking`; None leaves that to the template.
    Raises TemplateError when the source does not parse.
    """

    def __init__(self, source: str, vocab: Vocab, *, thinking: bool | None = None) -> None:
        self.vocab = vocab
        self._variables: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template does not parse: {error}.") from error

    def render(self, messages: Sequence[Message], *, generate: bool = True, **variables: Any) -> str:
        """The conversation as the model reads it, special texts of users still marked with `GUARD`.

        With `generate` it ends where the assistant's answer begins. Raises TemplateError when the template refuses
        the messages (unknown role, two user turns in a row, …).
        """
        variables = self._variables | variables
        variables["messages"] = [self._guarded(message) for message in messages]
        for name, token in (("bos_token", self.vocab.bos), ("eos_token", self.vocab.eos)):
            variables[name] = self.vocab.text(token) if token >= 0 else ""
        try:
            return self._template.render(**variables, add_generation_prompt=generate)
        except Exception as error:  # a template is a program: it can fail in any way
            reason = str(error).rstrip(".")
            raise TemplateError(f"the model's chat template refuses these messages: {reason}.") from error

    def tokenize(self, rendered: str) -> list[int]:
        """Token ids of a rendered conversation or of a piece of one."""
        ids: list[int] = []
        for part in re.split(f"(.{GUARD}[^{GUARD}]*{GUARD})", rendered, flags=re.DOTALL):
            if part:
                marked = GUARD in part
                ids += self.vocab.tokenize(part.replace(GUARD, ""), parse_special=not marked)
        return ids

    def n_before_answer(self, prompt: Sequence[int]) -> int | None:
        """How many tokens of `prompt` stand before what only opens the answer; None if it does not end with that.

        Templates take this opening back: behind a later turn the answer stands without its thoughts.
        """
        n = len(prompt) - len(self._generation_prompt)
        return n if self._generation_prompt and list(prompt[n:]) == self._generation_prompt else None

    @cached_property
    def _generation_prompt(self) -> list[int]:
        """What the template writes only to have an answer begin; empty where it has no such part."""
        turn = [{"role": "user", "content": "?"}]
        try:
            asked, opened = self.render(turn, generate=False), self.render(turn)
        except TemplateError:
            return []
        return self.tokenize(opened.removeprefix(asked)) if opened.startswith(asked) else []

    def _guarded(self, message: Message) -> Message:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise OptionError(f"a message needs a 'role' and a 'content' that are text, not {message!r}.")
        return {**message, "content": self._special.sub(_mark, message["content"].replace(GUARD, ""))}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        texts = sorted((t for t in self.vocab.special_texts() if t), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def encode_plain(vocab: Vocab, text: str) -> list[int]:
    """Token ids of text for a model without chat template, with the model's own BOS."""
    return vocab.tokenize(text, add_special=True)


def _mark(match: re.Match[str]) -> str:
    """`<|im_end|>` → `<⟨guard⟩|im_end|>⟨guard⟩`: no longer special, and easy to find again after rendering."""
    text = match.group()
    return f"{text[0]}{GUARD}{text[1:]}{GUARD}"


def _tojson(value: Any, indent: int | None = None) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@dataclass(frozen=True)
class Limits:
    """Where an answer ends: `max_tokens` (None: only with the context), or at any of the `stop` strings."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and (not isinstance(self.max_tokens, int) or self.max_tokens < 1):
            raise OptionError(f"max_tokens must be a whole number of at least 1, not {self.max_tokens!r}.")
        if bad := [stop for stop in self.stop if not isinstance(stop, str) or not stop]:
            raise OptionError(f"a stop string must be a text that is not empty, not {bad[0]!r}.")


class TextStream:
    """Turns emitted tokens into text as they come, and says where the answer ends.

    Text is held back while it could still become a stop string or is part of a character. `finish_reason` is None
    until the end, then "stop" (end-of-generation token or stop string) or "length" (`max_tokens`).
    """

    def __init__(self, vocab: Vocab, limits: Limits) -> None:
        self._vocab, self._limits = vocab, limits
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._ready = "", ""
        self.n_tokens = 0
        self.finish_reason: str | None = None

    def clip(self, emitted: Sequence[int]) -> tuple[int, bool]:
        """Take emitted tokens up to the end of the answer: how many were taken, and whether it ended."""
        for n, token in enumerate(emitted, 1):
            self._take(token)
            if self.finish_reason:
                return n, True
        return len(emitted), False

    def text(self) -> str:
        """The text that became certain since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def flush(self) -> str:
        """The rest, when the answer has ended without a stop string; half a character is dropped."""
        self._ready, self._held = self._ready + self._held, ""
        return self.text()

    def _take(self, token: int) -> None:
        self.n_tokens += 1
        if self._vocab.is_eog(token):
            self.finish_reason = "stop"
            return
        self._held += self._decoder.decode(self._vocab.piece(token))
        cut = min((at for s in self._limits.stop if (at := self._held.find(s)) >= 0), default=None)
        if cut is not None:
            self._ready, self._held = self._ready + self._held[:cut], ""
            self.finish_reason = "stop"
            return
        safe = len(self._held) - _overlap(self._held, self._limits.stop)
        self._ready, self._held = self._ready + self._held[:safe], self._held[safe:]
        if self.n_tokens == self._limits.max_tokens:
            self.finish_reason = "length"


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    longest = max((len(s) for s in stops), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-n:]) for s in stops):
            return n
    return 0
