"""Reasoning apart from the answer: the marks a chat template sets them off with, and a parser of streaming text.

What a model marks off, and how, is read out of its chat template, never guessed from its name:

- tags: `<think>…</think>` and its relatives, `[THINK]`, `<|START_THINKING|>`, `<|channel>thought`, …;
- messages: each has a header that says whom it is for, as in `<|channel|>analysis<|message|>…<|end|>` (gpt-oss) and
  ` to=self<|message|>…<|eom|>` (muse-glimmer), or that ends with the mark of its kind (`<|think|>`, `<|content|>`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

TOKEN = "\ufdd1"  # a Unicode noncharacter before each special token, so that its name spelt out is not taken for it


@dataclass(frozen=True)
class Channels:
    """The marks of one way to set reasoning off.

    `reasoning` begin it; `answer` end it or begin the answer; behind one of `between` nothing is said until the next
    mark. `message` ends a header that says in words which of the two follows. `headed`: an answer begins with a header.
    """

    reasoning: tuple[str, ...]
    answer: tuple[str, ...]
    between: tuple[str, ...] = ()
    message: str = ""
    headed: bool = False

    @cached_property
    def marks(self) -> tuple[str, ...]:
        return (*self.reasoning, *self.answer, *self.between, *((self.message,) if self.message else ()))

    def tokens(self, special: Collection[str]) -> frozenset[str]:
        """The names of special tokens that occur in the marks."""
        return frozenset(name for name in special if name and any(name in mark for mark in self.marks))

    def of_tokens(self, special: Collection[str]) -> Channels:
        """The same marks with `TOKEN` before each name of a special token in them."""
        names = sorted(self.tokens(special), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")

        def named(marks: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(pattern.sub(lambda found: TOKEN + found.group(), mark) for mark in marks)

        return replace(
            self,
            reasoning=named(self.reasoning),
            answer=named(self.answer),
            between=named(self.between),
            message=named((self.message,))[0],
        )


# What a template that knows them contains, and the marks.
KNOWN: tuple[tuple[tuple[str, ...], Channels], ...] = (
    (("<|start|>", "<|message|>"), Channels((), (), ("<|end|>", "<|eom|>", "<|start|>"), "<|message|>", headed=True)),
    (("<|begin|>", "<|think|>", "<|content|>"), Channels(("<|think|>",), ("<|content|>",), ("<|end|>",), headed=True)),
    (
        ("<|open|>", "<|close|>", "<|sep|>"),
        Channels(
            ("<|open|>think<|sep|>",),
            ("<|open|>response<|sep|>",),
            ("<|close|>think<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        ),
    ),
    (("<|channel>", "<channel|>"), Channels(("<|channel>thought",), ("<channel|>",))),
    (("<|inner_prefix|>",), Channels(("<|inner_prefix|>",), ("<|inner_suffix|>",))),
    (
        ("<|START_THINKING|>",),
        Channels(
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>", "<|START_RESPONSE|>", "<|START_TEXT|>"),
            ("<|END_RESPONSE|>", "<|END_TEXT|>"),
        ),
    ),
    (("[THINK]",), Channels(("[THINK]",), ("[/THINK]",))),
    (
        ("[BEGIN FINAL RESPONSE]",),
        Channels(("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",), ("[END FINAL RESPONSE]",)),
    ),
)
TAG = re.compile(r"</?((?:\w+:)?think(?:ing)?(?::\w+)?)>")  # <think>, <seed:think>, <mm:think>, <think:opensource>, …
FOR_OTHERS = re.compile(r"analysis|\bto=(?!user\b|assistant\b)")  # a header of what is not for the user's eyes


def channels_of(template: str, opening: str) -> Channels | None:
    """How a model sets reasoning off, by its template's source and the `opening` it writes before an answer."""
    text = opening + template
    for signs, channels in KNOWN:
        if all(sign in text for sign in signs):
            return channels
    if not (tag := TAG.search(text)):
        return None
    channels = Channels((f"<{tag[1]}>",), (f"</{tag[1]}>",))
    if "<response></response>" in text:
        return replace(channels, answer=(*channels.answer, "<response>"), between=("</response>",))
    return channels


def inline_tags(channels: Channels | None) -> tuple[str, ...]:
    """Tags that templates look for inside of old answers (`<think>`, `</think>`)."""
    return tuple(mark for mark in channels.marks if TAG.fullmatch(mark)) if channels else ()


class State(Enum):
    """Where an answer is: nothing but space said, in a thought, in the answer itself, in a header."""

    FRESH, REASONING, ANSWER, BETWEEN = range(4)


class ReasoningParser:
    """Sorts the text of an answer, fed as it comes, into answer and reasoning.

    Text is held back while it could still become a mark. Space around reasoning is dropped, as are the line breaks
    between reasoning and answer. A tag spelt out in ordinary tokens counts only where the answer begins. Without
    `channels` all is answer, at once.
    """

    def __init__(self, channels: Channels | None = None, state: State = State.ANSWER, *, trims: bool = False) -> None:
        self.channels, self.state = channels or Channels((), ()), state
        self.names: frozenset[str] = frozenset()  # of special tokens that are to be fed as `TOKEN` and their name
        self._answer = self._reasoning = ""  # what is certain and was not taken yet
        self._held = ""
        self._trims = trims  # whether space before the answer belongs to the marks
        self._space = ""  # behind reasoning, where more may follow
        self._n_answer = self._n_reasoning = 0

    @classmethod
    def behind(cls, prompt: str, opening: str, channels: Channels, special: Collection[str]) -> ReasoningParser:
        """The parser of what follows the end of `prompt`; `special` are the names of all special tokens.

        A prompt that ends with neither a mark nor the template's `opening` is no turn of a chat: all is answer.
        """
        end = prompt.rstrip()
        if end.endswith(channels.reasoning):
            state = State.REASONING
        elif end.endswith((*channels.answer, *channels.between)):
            state = State.FRESH
        elif "".join(end.split()).endswith("".join(opening.split())):  # SentencePiece adds spaces
            state = State.BETWEEN if channels.headed else State.FRESH
        else:
            return cls()
        begins = state is State.FRESH and end.endswith(channels.answer)
        parser = cls(channels.of_tokens(special), state, trims=begins and not prompt.endswith("\n"))
        parser.names = channels.tokens(special)
        return parser

    def feed(self, text: str) -> None:
        """Take the next piece of text."""
        if not self.channels.marks:
            self._answer += text
            return
        self._held += text
        while self._step():
            pass

    def finish(self) -> None:
        """The answer has ended: what is held is no mark any more."""
        if self.state is State.FRESH:
            self._begin()
        held, self._held = self._held, ""
        silent = not self._n_answer and not self._n_reasoning
        if self.state is State.BETWEEN and silent and not held.lstrip().startswith((TOKEN, "to=")):
            self.state = State.ANSWER  # a model that leaves out the header
        self._say(held)

    def take_answer(self) -> str:
        """The text of the answer that became certain since the last call."""
        answer, self._answer = self._answer, ""
        return answer

    def take_reasoning(self) -> str:
        """The reasoning that became certain since the last call."""
        reasoning, self._reasoning = self._reasoning, ""
        return reasoning

    def _step(self) -> bool:
        """Say what is certain, up to the next mark and over it; False when more text is needed."""
        if self.state is State.FRESH:
            return self._open()
        marks = self._exits()
        found = min(((at, -len(m), m) for m in marks if (at := self._held.find(m)) >= 0), default=None)
        if found is None:
            safe = len(self._held) - overlap(self._held, marks)
            if self.state is not State.BETWEEN:  # a header is read when it is whole
                self._say(self._held[:safe])
                self._held = self._held[safe:]
            return False
        at, _, mark = found
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        self._say(before)
        self._enter(mark, before)
        return True

    def _open(self) -> bool:
        """Where nothing is said yet, a mark may follow after space; anything else is the answer."""
        c = self.channels
        text = self._held.lstrip()
        for mark in sorted((*c.reasoning, *c.answer, *c.between), key=len, reverse=True):
            if text.startswith(mark):
                self._held = text[len(mark) :]
                self._enter(mark, "")
                return True
        if not text or any(mark.startswith(text) for mark in c.marks):
            return False
        self._begin()
        return True

    def _exits(self) -> tuple[str, ...]:
        """The marks that end the present state."""
        c = self.channels
        if self.state is State.REASONING:
            return (*c.answer, *c.between)
        if self.state is State.BETWEEN:
            return (*c.reasoning, *c.answer, c.message) if c.message else (*c.reasoning, *c.answer)
        return (*c.between, *(mark for mark in (*c.reasoning, *c.answer) if mark.startswith(TOKEN)))

    def _enter(self, mark: str, header: str) -> None:
        """Go where a mark leads."""
        c = self.channels
        if mark in c.between:
            self.state = State.BETWEEN
        elif mark in c.reasoning or (mark == c.message and FOR_OTHERS.search(header)):
            self.state, self._space = State.REASONING, "\n" if self._n_reasoning else ""
        else:
            self.state, self._trims = State.FRESH, mark != c.message
            self._answer += "\n" if self._n_answer and not self._trims else ""  # a message after another

    def _say(self, text: str) -> None:
        if self.state is State.REASONING:
            text = self._space + text if self._n_reasoning else text.lstrip()
            said = text.rstrip()
            self._space = text[len(said) :] if said or self._n_reasoning else ""
            self._n_reasoning += len(said)
            self._reasoning += said.replace(TOKEN, "")
        elif self.state is State.ANSWER:
            self._n_answer += len(text)
            self._answer += text.replace(TOKEN, "")

    def _begin(self) -> None:
        """What is held is the answer, but for the line breaks that lead to it from reasoning."""
        self.state = State.ANSWER
        if self._trims:
            body = self._held.lstrip()
            space = self._held[: len(self._held) - len(body)]
            self._held = space.rpartition("\n")[2] + body if "\n" in space else body


def overlap(text: str, marks: Collection[str]) -> int:
    """Length of the longest end of `text` that is the beginning of one of `marks`."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-n:]) for mark in marks):
            return n
    return 0
