"""A conversation: turns in, answers out, and nothing is read twice."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Unpack

from localspec.answer import Result, Stream
from localspec.errors import OptionError
from localspec.options import Options, with_options
from localspec.prompt import need_template
from localspec.template import ChatTemplate, Message


class Speaker(Protocol):
    """What a conversation needs of a pair."""

    @property
    def template(self) -> ChatTemplate | None: ...
    @property
    def target_path(self) -> Path: ...
    def stream(self, prompt: list[int], **options: Unpack[Options]) -> Stream: ...
    def ensure_open(self) -> None: ...
    def reading(self) -> AbstractContextManager[None]: ...


def answer_message(result: Result) -> Message:
    """An answer as a message of the conversation, for the template to show again as it sees fit."""
    message = {"role": "assistant", "content": result.text}
    return message | {"reasoning_content": result.reasoning} if result.reasoning else message


@dataclass
class _Turn:
    """A turn that was asked: the messages up to it, what the model read, the answer as it grows, and its stream."""

    asked: list[Message]
    rendered: str
    ids: list[int]
    result: Result
    stream: Callable[[], Stream | None]  # weak: a stream that its reader drops is over
    is_written: bool = False  # whether the conversation has it


class Chat:
    """Turns of one conversation with a pair.

    The tokens of every answer are kept as they were said, so a next turn adds to them and both models read nothing
    again. A turn is part of the conversation from the first word of its answer on. A new turn, `undo` and `clear` close
    a stream that is still open; closing or dropping it later changes nothing any more.
    """

    def __init__(self, pair: Speaker, *, system: str | None = None) -> None:
        self.pair, self._template = pair, need_template(pair.template, pair.target_path.name)
        self._messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._said: list[_Turn] = []  # of turns that were not taken back
        self._open: _Turn | None = None  # its answer may still grow
        self._asking = threading.RLock()

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, the answer under way included; may be assigned."""
        self._write()
        return self._messages

    @messages.setter
    def messages(self, messages: Sequence[Message]) -> None:
        if not isinstance(messages, Sequence):
            raise OptionError(f"messages must be a list of messages, not {messages!r}.")
        if bad := [one for one in messages if not (isinstance(one, Mapping) and {"role", "content"} <= one.keys())]:
            raise OptionError(f"a message needs a 'role' and a 'content' that are text, not {bad[0]!r}.")
        self._settle()
        self._messages, self._said = list(messages), []

    @with_options
    def send(self, text: str, **options: Unpack[Options]) -> Result:
        """The whole answer to one user turn."""
        self.pair.ensure_open()  # else a lock that was held during a fork would be waited for
        with self._asking, self.stream(text, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    @with_options
    def stream(self, text: str, **options: Unpack[Options]) -> Stream:
        """The answer to one user turn, chunk by chunk. A stream closed early keeps what was said until then.

        Raises what `Pair.stream` raises; the conversation is then as it was before.
        """
        self.pair.ensure_open()
        with self._asking, self.pair.reading():
            self._settle()
            turn: list[Message] = [*self._messages, {"role": "user", "content": text}]
            rendered = self._template.render(turn)
            ids = self._tokens(rendered)
            stream = self.pair.stream(ids, **options)
            self._open = _Turn(turn, rendered, ids, stream.result, weakref.ref(stream))
            return stream

    def _settle(self) -> None:
        """The open turn is over, with what was said until now; without a word it is as if it had not been asked."""
        if self._open and (stream := self._open.stream()):
            stream.close()
        self._write()
        if self._open and self._open.result.tokens:
            self._said.append(self._open)
        self._open = None

    def _write(self) -> None:
        """Bring what has been said of the open turn's answer into the conversation."""
        turn = self._open
        if turn and turn.result.tokens:
            answer = answer_message(turn.result)
            if not turn.is_written:
                self._messages, turn.is_written = [*turn.asked, answer], True
            elif len(self._messages) > len(turn.asked):  # else the user has shortened the list meanwhile
                self._messages[len(turn.asked)] = answer

    def _tokens(self, rendered: str) -> list[int]:
        """Tokens of the conversation: as they were said up to the last answer, then the text that is new."""
        if self._said:
            last = self._said[-1]
            said, words = self._template.said(last.result.tokens, last.result.text)
            text = last.rendered + said
            if rendered.startswith(text):
                return last.ids + words + self._template.tokenize(rendered[len(text) :], continues=True)
        return self._template.tokenize(rendered)  # the template rewrites old turns: re-read from where it differs

    def undo(self) -> str:
        """Take back the last turn; returns what the user had said. Raises OptionError if there is none."""
        self._settle()
        turns = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        if not turns:
            raise OptionError("there is no turn to take back.")
        text = self._messages[turns[-1]]["content"]
        self._messages = self._messages[: turns[-1]]
        self._said = [turn for turn in self._said if len(turn.asked) <= turns[-1]]
        return text

    def state(self) -> tuple[list[Message], list[_Turn]]:
        """The conversation as it is, for `restore`."""
        self._settle()
        return list(self._messages), list(self._said)

    def restore(self, state: tuple[list[Message], list[_Turn]]) -> None:
        """Go back to an earlier `state`."""
        self._settle()
        self._messages, self._said = list(state[0]), list(state[1])

    def clear(self) -> None:
        """Begin again, with the same system message."""
        self._settle()
        self._said = []
        self._messages = [m for m in self._messages[:1] if m["role"] == "system"]

    def __repr__(self) -> str:
        n = sum(message["role"] == "user" for message in self.messages)
        return f"<Chat of {n} {'turn' if n == 1 else 'turns'} with {self.pair.target_path.name}>"
