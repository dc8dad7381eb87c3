"""Selecting from a lattice what to send to verification."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localspec.lattice import Lattice


@dataclass(frozen=True)
class Path:
    """A chain of tokens, one a slot, and for each the probability that it and all before it survive verification."""

    tokens: list[int]
    survival: list[float]


def greedy(lattice: Lattice) -> Path:
    """The greedy walk: in each slot the best candidate behind the one just picked.

    Survival is the running product of the row softmax at the picks, P_t(b|a) = exp S_t[a,b] / Σ_c exp S_t[a,c].
    """
    tokens, survival, row, alive = [], [], 0, 1.0
    for ids, scores in zip(lattice.ids, lattice.scores, strict=True):
        behind = scores[row]
        row = int(behind.argmax())
        alive /= float(np.exp(behind - behind[row]).sum())
        tokens.append(int(ids[row]))
        survival.append(alive)
    return Path(tokens, survival)
