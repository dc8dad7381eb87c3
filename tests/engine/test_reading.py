"""How prompts are read: what is in the KV cache after reading on is what reading afresh leaves."""

from __future__ import annotations

import random

import pytest

from localspec.engine.reading import Reading

Cell = tuple[int, int] | str  # the pass that made it, or that it was said


def read(reading: Reading, cells: list[Cell], n_read: int, n_common: int, end: int) -> list[Cell]:
    """The cells of a prompt of `end` tokens, `n_common` of which the KV cache holds."""
    kept = reading.keeps(n_common, n_read, end)
    assert kept <= n_common
    out = cells[:kept]
    for chunk in reading.chunks(kept, end):
        assert chunk.start == len(out)
        assert 0 < chunk.stop - chunk.start <= reading.most
        out += [(chunk.start, chunk.stop)] * (chunk.stop - chunk.start)
    assert len(out) == end
    return out


@pytest.mark.parametrize("block", [8, 32, 128])
@pytest.mark.parametrize("seed", range(20))
def test_a_prompt_whose_beginning_was_read_is_read_as_afresh(block: int, seed: int) -> None:
    """Passes over whole blocks leave the same whatever their number: a cell is known by its block."""
    draw = random.Random(seed)
    reading = Reading(block, most=128)
    first, end = draw.randrange(1, 400), draw.randrange(1, 400)
    common = draw.randrange(min(first, end) + 1)
    before = read(reading, [], 0, 0, first)
    again = by_block(read(reading, before, first, common, end), block)
    assert again == by_block(read(reading, [], 0, 0, end), block)


def by_block(cells: list[Cell], block: int) -> list[Cell]:
    def known(i: int, cell: Cell) -> Cell:
        is_whole = isinstance(cell, tuple) and not (cell[0] % block or cell[1] % block)
        return (i // block, -1) if is_whole else cell

    return [known(i, cell) for i, cell in enumerate(cells)]


def test_what_was_said_is_kept_unless_reading_is_strict() -> None:
    cells = [*read(Reading(32), [], 0, 0, 50), *["said"] * 60]
    assert read(Reading(32), cells, 50, 110, 120).count("said") == 60
    strict = read(Reading(32, strict=True), cells, 50, 110, 120)
    assert by_block(strict, 32) == by_block(read(Reading(32), [], 0, 0, 120), 32)


def test_the_very_same_prompt_is_not_read_again() -> None:
    for reading in (Reading(32), Reading(32, strict=True), Reading()):
        assert reading.keeps(50, 50, 50) == 50


def test_where_all_passes_leave_the_same_everything_is_kept() -> None:
    assert Reading().keeps(77, 50, 90) == 77
    assert [(c.start, c.stop) for c in Reading().chunks(77, 1100)] == [(77, 512), (512, 1024), (1024, 1100)]
