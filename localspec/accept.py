"""Which drafted tokens survive verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def sample_and_match(
    rows: NDArray[np.float32],
    draft: Sequence[int],
    choose: Callable[[NDArray[np.float32], list[int]], int],
) -> list[int]:
    """The tokens this round emits: the accepted drafts, then the target's own next token (the bonus).

    `rows` [len(draft) + 1, n_vocab] are the target's logits behind the anchor and behind each drafted token. The
    target chooses at each position as it would without a drafter; drafted tokens only decide how many of its choices
    this one batch can answer. So this is lossless for any `choose(row, emitted so far)`.
    """
    emitted: list[int] = []
    for row, drafted in zip(rows, [*draft, None], strict=True):
        token = choose(row, emitted)
        emitted.append(token)
        if token != drafted:
            break
    return emitted
