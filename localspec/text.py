"""Text to tokens, and tokens back to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.errors import OptionError
from localspec.llama import Vocab
from localspec.reasoning import TOKEN, ReasoningParser, overlap


def encode_plain(vocab: Vocab, text: str) -> list[int]:
    """Token ids of text for a model without chat template, with the model's own BOS."""
    return vocab.tokenize(text, add_special=True)


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

    `parser` tells reasoning from the answer; without one all is answer. Stop strings are looked for in the answer only.
    Text is held back while it could still become a stop string or a mark, or is part of a character. `finish_reason` is
    None until the end, then "stop" (end-of-generation token or stop string) or "length" (`max_tokens`, which counts
    all tokens).
    """

    def __init__(self, vocab: Vocab, limits: Limits, parser: ReasoningParser | None = None) -> None:
        self._vocab, self._limits, self._parser = vocab, limits, parser or ReasoningParser()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held, self._ready = "", ""
        self._is_cut = False  # at a stop string
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
        """The text of the answer that became certain since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def reasoning(self) -> str:
        """The reasoning that became certain since the last call."""
        return self._parser.take_reasoning()

    def flush(self) -> str:
        """The rest, when the answer has ended without a stop string; half a character is dropped."""
        if not self._is_cut:
            self._parser.finish()
            self._release()
        self._ready, self._held = self._ready + self._held, ""
        return self.text()

    def _take(self, token: int) -> None:
        self.n_tokens += 1
        if self._vocab.is_eog(token):
            self.finish_reason = "stop"
            return
        self._parser.feed(self._decoder.decode(self._bytes(token)))
        self._release()
        if self.n_tokens == self._limits.max_tokens and not self.finish_reason:
            self.finish_reason = "length"

    def _bytes(self, token: int) -> bytes:
        names = self._parser.names
        if names and (name := self._vocab.text(token)) in names:
            return (TOKEN + name).encode()
        return self._vocab.piece(token)

    def _release(self) -> None:
        """Make certain what no stop string can take back any more; end at one."""
        self._held += self._parser.take_answer()
        stops = self._limits.stop
        cut = min((at for stop in stops if (at := self._held.find(stop)) >= 0), default=None)
        if cut is not None:
            self._ready, self._held = self._ready + self._held[:cut], ""
            self._is_cut, self.finish_reason = True, "stop"
            return
        safe = len(self._held) - overlap(self._held, stops)
        self._ready, self._held = self._ready + self._held[:safe], self._held[safe:]
