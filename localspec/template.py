"""The chat template: messages to text and tokens, and whatever a user writes stays text."""

from __future__ import annotations

import codecs
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from localspec.errors import OptionError, TemplateError
from localspec.llama import Vocab
from localspec.reasoning import Channels, ReasoningParser, channels_of, inline_tags

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}, "reasoning_content" too

GUARD = "\ufdd0"  # a Unicode noncharacter: no text contains it
PROBE = "localspec"  # a user's turn whose only purpose is to see what the template writes behind it
N_TAIL = 64  # last tokens of a prompt in which its generation prompt is looked for


class ChatTemplate:
    """A model's own Jinja chat template, rendered in a sandbox and tokenised.

    Special tokens are parsed in what the template writes, never in what stands in a message: the names of special
    tokens are broken up there by a guard that no text contains, and text is tokenised piece by piece between guards.
    `thinking` is what the template is told as `enable_thinking`; None leaves that to the template.
    """

    def __init__(self, source: str, vocab: Vocab, *, thinking: bool | None = None) -> None:
        self.source, self.vocab = source, vocab
        self._variables: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}

    def render(self, messages: Sequence[Message], *, generate: bool = True, **variables: Any) -> str:
        """The conversation as the model reads it, names of special tokens in messages broken up by `GUARD`.

        With `generate` it ends where the assistant's answer begins. What an assistant thought before it answered is in
        its message's `reasoning_content`; whether the model reads it again is for the template to say. Raises
        TemplateError when the template does not parse or refuses the messages (unknown role, two user turns in a row).
        """
        variables = self._variables | variables | {"add_generation_prompt": generate}
        for name, token in (("bos_token", self.vocab.bos), ("eos_token", self.vocab.eos)):
            variables[name] = self.vocab.text(token) if token >= 0 else ""
        guarded = [self._guarded(message) for message in messages]
        strictly = [self._guarded(message, strict=True) for message in messages]
        whole = self._render(guarded, variables)
        if guarded == strictly:
            return whole
        # A template may cut and join texts until they name a token. With their first characters guarded they cannot.
        apart = self._render(strictly, variables)
        return whole if self._tokens_named(whole) == self._tokens_named(apart) else apart

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        """With no tools as transformers says it; templates that want some may still do without, as in llama.cpp."""
        template = self._template
        with suppress(Exception):  # a template is a program: it can fail in any way
            return template.render({"tools": None, "documents": None} | variables, messages=messages)
        try:
            return template.render(variables, messages=messages)
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise TemplateError(f"the model's chat template refuses these messages: {reason}.") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise TemplateError(f"the model's chat template does not parse: {reason}.") from error

    def tokenize(self, rendered: str, *, continues: bool = False) -> list[int]:
        """Token ids of a rendered conversation, or with `continues` of a piece of one that follows other text."""
        first, *others = rendered.split(GUARD)
        ids = self.vocab.tokenize(first, parse_special=True, continues=continues)
        for part in others:
            ids += self.vocab.tokenize(part, parse_special=True, continues=True)
        return ids

    def n_before_answer(self, prompt: Sequence[int]) -> int | None:
        """How many tokens of `prompt` stand before its generation prompt; None if it does not end with one.

        Templates take this part back: behind a later turn the answer stands without its thoughts.
        """
        n = len(prompt) - len(self._generation_prompt)
        return n if self._generation_prompt and list(prompt[n:]) == self._generation_prompt else None

    @cached_property
    def _generation_prompt(self) -> list[int]:
        """What the template writes only to have an answer begin; empty where it has no such part."""
        turn = [{"role": "user", "content": PROBE}]
        try:
            asked, opened = self.render(turn, generate=False), self.render(turn)
        except TemplateError:
            return []
        return self.tokenize(opened.removeprefix(asked), continues=True) if opened.startswith(asked) else []

    def parser(self, prompt: Sequence[int]) -> ReasoningParser:
        """What tells reasoning from the answer to `prompt`; all is answer where `prompt` is no turn of a chat."""
        if self.channels is None:
            return ReasoningParser()
        end = b"".join(map(self._spelt, prompt[-N_TAIL:])).decode("utf-8", "replace")
        return ReasoningParser.behind(end, self._opening, self.channels, self._special)

    @cached_property
    def channels(self) -> Channels | None:
        """How the model sets reasoning off from its answers, if it does."""
        return channels_of(self.source, self._opening)

    @property
    def _tags(self) -> tuple[str, ...]:
        """Tags around reasoning, which stay in answers that still hold their own: templates look for them there."""
        return inline_tags(self.channels)

    @cached_property
    def _opening(self) -> str:
        """What the template writes between a user's turn and the answer."""
        try:
            return self.render([{"role": "user", "content": PROBE}]).rpartition(PROBE)[2]
        except TemplateError:
            return ""

    def said(self, tokens: Sequence[int], answer: str) -> tuple[str, list[int]]:
        """An answer as it follows its prompt: its text with the marks around its reasoning, and its tokens.

        What a stop string has cut off behind `answer` is left out of both.
        """
        tokens = [token for token in tokens if not self.vocab.is_eog(token)]
        whole = self._decoded(tokens)
        end = whole.rfind(answer) + len(answer)
        if not answer and self.channels is None:
            end = 0
        if end < len(answer) or end == len(whole):  # in several parts, or nothing was cut off
            return self._mark(whole, self._tags), tokens
        while tokens and len(self._decoded(tokens)) > end:
            tokens.pop()
        rest = whole[len(self._decoded(tokens)) : end]
        return self._mark(whole[:end], self._tags), tokens + self.vocab.tokenize(rest, continues=True)

    def _decoded(self, tokens: Sequence[int]) -> str:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # half a character at the end is dropped
        names = self.channels.tokens(self._special) if self.channels else ()
        pieces = (self.vocab.text(t).encode() if self.vocab.text(t) in names else self.vocab.piece(t) for t in tokens)
        return decode(b"".join(pieces))

    def _spelt(self, token: int) -> bytes:
        return self.vocab.text(token).encode() if self.vocab.is_control(token) else self.vocab.piece(token)

    def _guarded(self, message: Message, *, strict: bool = False) -> Message:
        fields = message if isinstance(message, Mapping) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise OptionError(f"a message needs a 'role' and a 'content' that are text, not {message!r}.")
        is_whole = message["role"] == "assistant" and not message.get("reasoning_content")
        safe: dict[str, Any] = self._safe(dict(message), self._tags if is_whole else (), strict)
        if reasoning := safe.get("reasoning_content") or safe.get("thinking"):
            other = {"reasoning": reasoning} if re.search(r"\breasoning\b", self.source) else {}
            safe = {"thinking": reasoning} | other | safe | {"reasoning_content": reasoning}
        return safe

    def _safe(self, value: Any, kept: tuple[str, ...], strict: bool) -> Any:
        """`value` with every text in it marked."""
        if isinstance(value, str):
            return self._mark(value, kept, strict)
        if isinstance(value, Mapping):
            return {name: self._safe(inner, kept, strict) for name, inner in value.items()}
        return [self._safe(inner, kept, strict) for inner in value] if isinstance(value, (list, tuple)) else value

    def _mark(self, text: str, kept: tuple[str, ...], strict: bool = False) -> str:
        """Guards behind the first character of each name of a special token, with `strict` of all that could begin one.

        `kept` are names that are left as they are.
        """
        pattern = self._first if strict else self._begin

        def guarded(match: re.Match[str]) -> str:
            first = match.group()
            return first if kept and text.startswith(kept, match.start()) else first + GUARD

        text = text.replace(GUARD, "")
        return pattern.sub(guarded, text)

    def _tokens_named(self, rendered: str) -> list[str]:
        """The special tokens in a rendered conversation, in order."""
        return [name for part in rendered.split(GUARD) for name in self._name.findall(part)]

    @cached_property
    def _special(self) -> frozenset[str]:
        return frozenset(self.vocab.special_texts() + self.vocab.user_defined_texts())

    @cached_property
    def _structural(self) -> list[str]:
        """Names of tokens that carry structure, longest first.

        llama.cpp parses user-defined tokens in any text. Those that the template writes or that look like
        `<|message|>` are structure; others are words (runs of spaces, HTML tags).
        """
        users = (n for n in self.vocab.user_defined_texts() if n in self.source or re.fullmatch(r"<\|.+>|<.+\|>", n))
        names = {name for name in (*self.vocab.special_texts(), *users) if len(name) > 1 and not name.isspace()}
        return sorted(names, key=len, reverse=True)

    @cached_property
    def _name(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._structural)) or r"(?!)")

    @cached_property
    def _begin(self) -> re.Pattern[str]:
        """The first character of a name."""
        return re.compile(f"(?={self._name.pattern}).", re.DOTALL)

    @cached_property
    def _first(self) -> re.Pattern[str]:
        """Any character that names begin with."""
        return re.compile("|".join(map(re.escape, sorted({name[0] for name in self._structural}))) or r"(?!)")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model is trained to say; here its body is only rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What transformers offers to chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # by hand, so that guards stay what they are
        text = re.sub(f"[^\0-\x7f{GUARD}]", lambda match: json.dumps(match.group())[1:-1], text)
    return text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
