"""Selecting from a lattice what to send to verification."""

from __future__ import annotations

from localspec.lattice import Lattice


def greedy(lattice: Lattice) -> list[int]:
    """The greedy walk: in each slot the best candidate behind the one just picked. Token ids, one a slot."""
    path, row = [], 0
    for ids, scores in zip(lattice.ids, lattice.scores, strict=True):
        row = int(scores[row].argmax())
        path.append(int(ids[row]))
    return path
