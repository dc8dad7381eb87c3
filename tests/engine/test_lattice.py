"""The candidate pool: out of llama.cpp's packed rows, and out of plain logits."""

from __future__ import annotations

import numpy as np
import pytest

from localspec.engine import lattice
from localspec.engine.lattice import Lattice


def packed(ids: list[list[int]], scores: np.ndarray, width: int) -> np.ndarray:
    """Rows as `build_dflash2_selector` writes them: K ids, K × K scores by predecessor, zeros."""
    rows = np.zeros((len(ids), width), np.float32)
    k = len(ids[0])
    for row, slot_ids, slot_scores in zip(rows, ids, scores, strict=True):
        row[:k] = slot_ids
        for pred in range(k):
            for cand in range(k):
                row[k + pred * k + cand] = slot_scores[pred, cand]
    return rows


def test_unpack_reads_predecessors_as_rows_and_candidates_as_columns() -> None:
    ids = [[7, 3], [5, 9]]
    scores = np.array([[[1, 2], [1, 2]], [[3, 4], [5, 6]]], np.float32)
    pool = lattice.unpack(packed(ids, scores, width=20), 2)
    assert pool.ids.tolist() == ids
    assert pool.scores.tolist() == scores.tolist()
    assert pool.scores[1, 0, 1] == 4  # candidate 1 of slot 1 behind candidate 0 of slot 0


def test_unpack_gives_the_documented_types_and_shapes() -> None:
    pool = lattice.unpack(np.zeros((7, 288), np.float32), 16)
    assert (pool.ids.dtype, pool.scores.dtype) == (np.int32, np.float32)
    assert (pool.ids.shape, pool.scores.shape) == ((7, 16), (7, 16, 16))
    assert len(pool) == 7


def test_unpack_copies_because_the_next_decode_overwrites_the_rows() -> None:
    rows = packed([[7, 3]], np.ones((1, 2, 2)), width=6)
    pool = lattice.unpack(rows, 2)
    rows[:] = -1
    assert pool.ids.tolist() == [[7, 3]]
    assert (pool.scores == 1).all()


@pytest.mark.parametrize("token", [0, 1, 248_319, 2**24 - 1])
def test_unpack_keeps_large_ids_exact(token: int) -> None:
    assert lattice.unpack(packed([[token]], np.zeros((1, 1, 1)), width=2), 1).ids.tolist() == [[token]]


def test_unpack_no_slots() -> None:
    pool = lattice.unpack(np.zeros((0, 288), np.float32), 16)
    assert len(pool) == 0
    assert pool.scores.shape == (0, 16, 16)


def test_from_logits_takes_the_best_of_each_row() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    pool = lattice.from_logits(logits, 16)
    for row, ids, scores in zip(logits, pool.ids, pool.scores, strict=True):
        assert set(ids.tolist()) == set(np.argsort(-row)[:16].tolist())
        for pred in range(16):
            assert scores[pred].tolist() == row[ids].tolist()


def test_from_logits_gives_the_documented_types_and_copies() -> None:
    logits = np.arange(40, dtype=np.float32).reshape(2, 20)
    pool = lattice.from_logits(logits, 4)
    before = pool.scores.copy()
    logits[:] = 0
    assert (pool.ids.dtype, pool.scores.dtype) == (np.int32, np.float32)
    assert (pool.scores == before).all()


def test_from_logits_passes_over_tokens_a_reduced_head_cannot_say() -> None:
    logits = np.full((1, 30), -np.inf, np.float32)
    logits[0, [3, 8, 21]] = [1.0, 3.0, 2.0]
    pool = lattice.from_logits(logits, 3)
    assert set(pool.ids[0].tolist()) == {3, 8, 21}


def test_a_lattice_is_frozen() -> None:
    pool = Lattice(np.zeros((1, 2), np.int32), np.zeros((1, 2, 2), np.float32))
    with pytest.raises(AttributeError):
        pool.ids = np.zeros((1, 2), np.int32)  # type: ignore[misc]
