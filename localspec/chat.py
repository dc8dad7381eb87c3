"""A conversation: turns in, answers out, and a memory that reads only what is new."""

from __future__ import annotations

import codecs
from collections.abc import Generator
from pathlib import Path
from typing import Protocol, Unpack

from localspec.answer import Chunk, Result, Stream
from localspec.errors import OptionError, TemplateError
from localspec.llama import Vocab
from localspec.options import Options
from localspec.text import ChatTemplate, Message


class Speaker(Protocol):
    """What a conversation needs of a pair."""

    @property
    def template(self) -> ChatTemplate | None: ...
    @property
    def vocab(self) -> Vocab: ...
    @property
    def target_path(self) -> Path: ...
    def stream(self, prompt: list[int], **options: Unpack[Options]) -> Stream: ...


def need_template(pair: Speaker) -> ChatTemplate:
    """The pair's chat template; TemplateError if the model has none."""
    if pair.template is None:
        raise TemplateError(
            f"{pair.target_path.name} has no chat template, so it cannot chat; use `localspec run` with plain text."
        )
    return pair.template


class Chat:
    """Turns of one conversation with a pair.

    The tokens of every answer are kept as they were said, so a next turn adds to them and both memories re-read
    nothing. `messages` is the conversation so far; `system` comes first where given.
    """

    def __init__(self, pair: Speaker, *, system: str | None = None) -> None:
        self.pair, self._template = pair, need_template(pair)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._said: list[tuple[str, list[int]]] = []  # after each answer: all text and all tokens so far

    def send(self, text: str, **options: Unpack[Options]) -> Result:
        """The whole answer to one user turn; options as in `Pair.stream`."""
        stream = self.stream(text, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, text: str, **options: Unpack[Options]) -> Stream:
        """The answer to one user turn, chunk by chunk. A stream closed early keeps what was said until then.

        Raises what `Pair.stream` raises; the conversation is then as it was before.
        """
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        rendered = self._template.render(turn)
        ids = self._tokens(rendered)
        stream = self.pair.stream(ids, **options)
        return stream.wrap(self._listen(turn, rendered, ids, stream))

    def _listen(self, turn: list[Message], rendered: str, ids: list[int], stream: Stream) -> Generator[Chunk]:
        """Pass chunks on; whatever ends the stream, the turn and what was said of the answer are kept."""
        try:
            yield from stream
        finally:
            result = stream.result
            if result.tokens:  # else it was interrupted before the first word: as if it had not been asked
                self.messages = [*turn, {"role": "assistant", "content": result.text}]
                self._said.append((rendered + result.text, ids + self._words(result)))

    def _words(self, result: Result) -> list[int]:
        """The answer as it was said, or made from its text where that was cut short (at a stop string)."""
        vocab = self.pair.vocab
        said = [token for token in result.tokens if not vocab.is_eog(token)]
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # as the stream: half a character is dropped
        spoken = decode(b"".join(map(vocab.piece, said)))
        return said if spoken == result.text else vocab.tokenize(result.text)

    def _tokens(self, rendered: str) -> list[int]:
        """Tokens of the conversation: as they were said up to the last answer, then the text that is new."""
        if self._said:
            text, ids = self._said[-1]
            if rendered.startswith(text):
                return ids + self._template.tokenize(rendered[len(text) :])
        return self._template.tokenize(rendered)  # the template rewrites old turns: re-read from where it differs

    def undo(self) -> str:
        """Take back the last turn; returns what the user had said. Raises OptionError if there is none."""
        if not self._said:
            raise OptionError("there is no turn to take back.")
        self._said.pop()
        text = self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        return text

    def state(self) -> tuple[list[Message], list[tuple[str, list[int]]]]:
        """The conversation as it is, for `restore`."""
        return list(self.messages), list(self._said)

    def restore(self, state: tuple[list[Message], list[tuple[str, list[int]]]]) -> None:
        """Go back to an earlier `state`."""
        self.messages, self._said = list(state[0]), list(state[1])

    def clear(self) -> None:
        """Begin again, with the same system message."""
        self._said.clear()
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
