"""An answer on its way: chunks, the result that grows with them, and the stream that yields them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from localspec.engine.stats import Stats


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
