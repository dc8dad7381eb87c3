"""An answer on its way: chunks, the result that grows with them, and the stream that yields them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from localspec.engine.stats import Stats
from localspec.turns import Turns

SHOWN = 60  # characters of an answer that its repr shows


@dataclass(frozen=True)
class Chunk:
    """What one round added: `text` of the answer and `reasoning` before it that are now certain, `tokens`, and how many
    of these the drafter had guessed.
    """

    text: str
    tokens: list[int]
    n_accepted: int
    reasoning: str = ""

    @property
    def drafted(self) -> list[bool]:
        """For each token, whether it was drafted (the last one of a round usually is the target's own)."""
        return [i < self.n_accepted for i in range(len(self.tokens))]


@dataclass(repr=False)
class Result:
    """An answer: its `text`, and in `reasoning` what the model thought before it, where its chat template sets that off
    (`<think>`, channels). `tokens` has everything the target said, an end-of-generation token included; `finish_reason`
    is "stop", "length", "context" (the context is full) or "cancelled".
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"
    stats: Stats = field(default_factory=Stats)
    reasoning: str = ""

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[: SHOWN - 1]}…"
        rate = f"{self.stats.predicted_per_second:.1f} tokens/s"
        return f"<Result {text!r}, {len(self.tokens):,} tokens, {self.finish_reason}, {rate}>"


class Stream(Iterator[Chunk]):
    """An answer on its way: an iterator over its chunks; `result` grows with them.

    `close`, leaving a `with` block or dropping the stream ends the answer there and makes room for the next one.
    """

    def __init__(self, chunks: Iterator[Chunk], result: Result, turns: Turns | None = None) -> None:
        self.result = result
        self._chunks, self._turns = chunks, turns or Turns()
        self._has_begun = self._has_ended = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        """The next round's chunk. Raises OptionError where another answer has taken this one's place."""
        if self._has_ended:
            raise StopIteration
        work = object()
        try:
            self._turns.begin(work, self, first=not self._has_begun)
            self._has_begun = True
            chunk = self._advance()
        finally:
            self._turns.leave(work)
        if chunk is None:
            raise StopIteration
        return chunk

    def _advance(self) -> Chunk | None:
        """The next chunk, None at the end; that and any error are the end of the answer."""
        try:
            chunk = next(self._chunks, None)
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self.close()
        return chunk

    def close(self) -> None:
        """Stop the answer here; what was said stays in `result`."""
        self._has_ended = True
        self._turns.end(self)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stream {'ended' if self._has_ended else 'open'}: {self.result!r}>"
