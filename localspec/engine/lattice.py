"""The candidate pool of one drafted block: which tokens each slot may hold, and how well neighbours fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Lattice:
    """Candidates of `n_slots` slots, K a slot.

    `ids` int32 [n_slots, K]: the tokens, in no particular order.
    `scores` float32 [n_slots, K, K]: `scores[t, a, b]` rates candidate b of slot t behind candidate a of slot t - 1,
    in logits. Slot 0's predecessor is the anchor, so its K rows are equal.
    """

    ids: NDArray[np.int32]
    scores: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)


def unpack(rows: NDArray[np.float32], top_k: int) -> Lattice:
    """A DFlash 2 lattice out of llama.cpp's packed rows.

    `rows` float32 [n_slots, ≥ K + K²], one a slot after the anchor's: K ids as floats (exact below 2²⁴), then K × K
    scores by predecessor (`build_dflash2_selector` in llama.cpp's `src/models/dflash.cpp`). Both are copied.
    """
    n, k = len(rows), top_k
    return Lattice(rows[:, :k].astype(np.int32), rows[:, k : k + k * k].reshape(n, k, k).astype(np.float32))


def from_logits(logits: NDArray[np.float32], top_k: int) -> Lattice:
    """A DFlash 1 pool: the `top_k` best of each row of `logits` [n_slots, n_vocab], without pair scores."""
    ids = np.argpartition(logits, -top_k, axis=1)[:, -top_k:]
    best = np.take_along_axis(logits, ids, axis=1)
    scores = np.broadcast_to(best[:, None, :], (len(logits), top_k, top_k))
    return Lattice(ids.astype(np.int32), scores.astype(np.float32))
