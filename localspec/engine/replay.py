"""Passes that were verified, computed again: the same tokens in the same batches, without accepting anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localspec.engine.paths import Draft
from localspec.engine.target import Target

Rounds = Sequence[tuple[Draft, Sequence[int]]]  # what each round verified, and the tokens it emitted


def replay(target: Target, anchor: int, rounds: Rounds, at: int) -> NDArray[np.float32] | None:
    """Logits of token `at` of those that `rounds` emitted; `target` holds the prompt up to its last token, `anchor`.

    None where the rounds do not come to it: what they emitted was neither drafted nor a pass's last token.
    """
    left = at
    for draft, said in rounds:
        rows, path = target.verify(anchor, draft), along(draft, said[:left])
        if len(said) > left:
            return rows[path[-1]].copy() if len(path) == left + 1 else None
        if len(path) < len(said):
            return None
        target.commit(path[: len(said)])
        anchor, left = said[-1], left - len(said)
    return None


def along(draft: Draft, said: Sequence[int]) -> list[int]:
    """Rows of the pass over an anchor and `draft`, down from the anchor's as far as `said` was drafted."""
    rows = [0]
    for token in said:
        under = [i for i, parent in enumerate(draft.parents) if parent == rows[-1] - 1 and draft.tokens[i] == token]
        if not under:
            break
        rows.append(under[0] + 1)
    return rows
