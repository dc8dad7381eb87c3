"""Where prefill passes are cut, so that a prompt whose prefix is in the KV cache gives the answer of a full prefill.

Where a kernel rounds by the width of a pass, so do the keys and values it leaves. Then only such cells may be used
again as a fresh reading would leave: passes over prompts begin and end at fixed positions, whatever was cached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """Passes over prompts end at multiples of `most` tokens, and at the last multiple of `block`.

    `block` 1 says that passes of all widths leave the same. `strict`: what was said, in other passes than a prompt is
    read in, is read again when it becomes part of a prompt.
    """

    block: int = 1
    most: int = 512
    strict: bool = False

    def keeps(self, n: int, n_read: int, end: int) -> int:
        """How many of `n` cached positions, the first `n_read` of them prefilled, serve a prompt up to `end`."""
        if self.block == 1 or (n > n_read + 1 and not self.strict):  # behind a prompt lies its last token in any case
            return n
        n = min(n, n_read)
        return n if n == n_read == end else n - n % self.block

    def mark(self, n: int, end: int) -> int:
        """The last place up to `n` at which a pass may end when a prompt is read to `end`."""
        return end if n >= end else n - n % self.block

    def chunks(self, start: int, end: int, marks: Collection[int] = (), n_batch: int = 512) -> Iterator[slice]:
        """The passes from `start` to `end`, over `n_batch` tokens at most; one ends at each of `marks`."""
        most = min(self.most, n_batch)
        stops = {end, end - end % self.block, *marks}
        while start < end:
            stop = min(start - start % most + most, *(stop for stop in stops if stop > start))
            yield slice(start, stop)
            start = stop
