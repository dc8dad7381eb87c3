"""Attention of the native part against float64, against ggml's own, and against itself in other batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ggml_graph import (
    AVX2,
    AVX512,
    BF16,
    F16,
    F32,
    SETS,
    Array,
    Graph,
    decode,
    encode,
    instruction_set,
    needs_native,
    stock_attention,
)

Floats = npt.NDArray[np.float32]
pytestmark = needs_native


@pytest.fixture(params=SETS, ids=lambda number: {AVX2: "avx2", AVX512: "avx512"}[number])
def kernels(request: pytest.FixtureRequest) -> Any:
    with instruction_set(request.param):
        yield request.param


@dataclass(frozen=True)
class Case:
    """One attention: queries [streams, columns, heads, size], keys and values [streams, cells, KV heads, size]."""

    q: Array
    k: Array
    v: Array
    mask: Array | None  # F16 [streams, columns, cells]
    kinds: tuple[int, int]
    scale: float
    bias: float = 0.0
    cap: float = 0.0
    sinks: Array | None = None  # F32 [heads]

    def run(self, n_threads: int = 1) -> Floats:
        """[streams, columns, heads, value size]; laid out as llama.cpp does, heads of a cell side by side."""
        graph = Graph(32)
        q, k, v = (
            graph.swap_rows(graph.tensor(values, kind))
            for values, kind in ((self.q, F32), (self.k, self.kinds[0]), (self.v, self.kinds[1]))
        )
        mask = graph.tensor(self.mask[:, None], F16) if self.mask is not None else None
        result = graph.ggml.ggml_flash_attn_ext(graph.context, q, k, v, mask, self.scale, self.bias, self.cap)
        if self.sinks is not None:
            graph.ggml.ggml_flash_attn_ext_add_sinks(result, graph.tensor(self.sinks, F32))
        return graph.compute(result, (*self.q.shape[:3], self.v.shape[3]), n_threads)

    def columns(self, which: slice | list[int]) -> Case:
        return replace(self, q=self.q[:, which], mask=None if self.mask is None else self.mask[:, which])

    def cells(self, which: Any) -> Case:
        mask = None if self.mask is None else self.mask[..., which]
        return replace(self, k=self.k[:, which], v=self.v[:, which], mask=mask)

    def exact(self) -> npt.NDArray[np.float64]:
        """In float64."""
        group = self.q.shape[2] // self.k.shape[2]
        k, v = (np.repeat(decode(x, kind), group, 2) for x, kind in zip((self.k, self.v), self.kinds, strict=True))
        scores = np.einsum("snhd,schd->snhc", self.q.astype(np.float64), k) * self.scale
        if self.mask is not None:
            scores += self.mask.astype(np.float64)[:, :, None]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("snhc,schd->snhd", weights / weights.sum(-1, keepdims=True), v)


def case(
    columns: int,
    cells: int,
    *,
    heads: tuple[int, int] = (9, 3),
    size: tuple[int, int] = (64, 64),
    kinds: tuple[int, int] = (F16, F16),
    streams: int = 1,
    hidden: float = 0.3,
    seed: int = 0,
) -> Case:
    rng = np.random.default_rng(seed)
    q = rng.normal(0, 1.5, (streams, columns, heads[0], size[0])).astype(np.float32)
    k = encode(rng.normal(size=(streams, cells, heads[1], size[0])), kinds[0])
    v = encode(rng.normal(size=(streams, cells, heads[1], size[1])), kinds[1])
    mask = np.where(rng.random((streams, columns, cells)) < hidden, -np.inf, 0).astype(np.float16)
    mask[..., 0] = 0  # no column sees nothing
    return Case(q, k, v, mask, kinds, size[0] ** -0.5)


def causal(columns: int, past: int, cells: int, **options: Any) -> Case:
    """`columns` tokens behind `past`, in memory padded to `cells`."""
    whole = case(columns, cells, **options)
    seen = np.arange(cells) <= past + np.arange(columns)[:, None]
    return replace(whole, mask=np.where(seen, 0, -np.inf).astype(np.float16)[None])


def error(found: Floats, exact: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((found - exact) ** 2)))


SHAPES = {
    "default pair": ((9, 3), (64, 64)),
    "Qwen2.5-1.5B": ((12, 2), (128, 128)),
    "no groups": ((4, 4), (32, 32)),
    "one KV head": ((16, 1), (192, 128)),
    "odd sizes": ((6, 2), (80, 48)),
    "large": ((2, 1), (256, 256)),
    "small": ((5, 1), (16, 16)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kinds", [(F16, F16), (BF16, BF16), (F16, BF16), (BF16, F16)])
@pytest.mark.parametrize(("columns", "cells"), [(1, 1000), (8, 333), (2, 17)])
def test_no_less_exact_than_ggml(kernels: int, name: str, kinds: tuple[int, int], columns: int, cells: int) -> None:
    heads, size = SHAPES[name]
    this = case(columns, cells, heads=heads, size=size, kinds=kinds)
    exact = this.exact()
    with stock_attention():
        stock = error(this.run(), exact)
    assert error(this.run(), exact) <= stock


@pytest.mark.parametrize("columns", [1, 8, 70])  # ggml tiles from 64 columns on
def test_floats_are_as_exact_as_floats(kernels: int, columns: int) -> None:
    this = case(columns, 500, kinds=(F32, F32))
    exact = this.exact()
    with stock_attention():
        stock = error(this.run(), exact)
    assert error(this.run(), exact) <= 1.25 * stock  # both round in the last bits of a float, in another order


def test_wide_batches_are_as_exact_as_ggml_tiles(kernels: int) -> None:
    this = causal(70, 90, 256)
    exact = this.exact()
    with stock_attention():
        stock = error(this.run(), exact)
    assert error(this.run(), exact) <= 1.25 * stock  # F32 throughout in both


@pytest.mark.parametrize("past", [0, 600])
@pytest.mark.parametrize("name", ["default pair", "Qwen2.5-1.5B", "odd sizes"])
def test_same_bits_in_any_batch(kernels: int, name: str, past: int) -> None:
    heads, size = SHAPES[name]
    whole = causal(33, past, past + 64, heads=heads, size=size)
    expected = np.concatenate([whole.columns(slice(i, i + 1)).run() for i in range(33)], axis=1)
    for width in (2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33):
        found = whole.columns(slice(33 - width, 33)).run(n_threads=width % 3 + 1)
        assert np.array_equal(found, expected[:, 33 - width :]), width


def test_same_bits_in_prefill(kernels: int) -> None:
    prefill = causal(130, 0, 256)
    found = prefill.run(n_threads=2)
    for column in (0, 1, 31, 32, 64, 129):
        assert np.array_equal(prefill.columns([column]).run(), found[:, [column]]), column


@pytest.mark.parametrize("cells", [200, 256, 257, 1000, 2048])
@pytest.mark.parametrize("columns", [1, 8, 33])
def test_same_bits_with_any_number_of_threads(kernels: int, columns: int, cells: int) -> None:
    this = case(columns, cells)
    alone = this.run(n_threads=1)
    for n_threads in (2, 3, 4, 7):
        assert np.array_equal(this.run(n_threads), alone), n_threads


def test_same_bits_however_far_the_memory_is_padded(kernels: int) -> None:
    longest = causal(8, 290, 1024)
    expected = longest.run()
    for cells in (298, 299, 320, 333, 512, 768):
        assert np.array_equal(longest.cells(slice(cells)).run(), expected), cells


def test_hidden_cells_add_nothing(kernels: int) -> None:
    """A column's cells alone give what they give among those of other branches and sequences."""
    tree = case(24, 700, hidden=0.6, seed=3)
    found = tree.run(n_threads=2)
    assert tree.mask is not None
    for column in range(24):
        seen = tree.mask[0, column] == 0
        alone = replace(tree.columns([column]).cells(seen), mask=None)
        assert np.array_equal(alone.run(), found[:, [column]]), column


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65504])
def test_whatever_hidden_cells_hold(kernels: int, value: float) -> None:
    this = causal(8, 100, 256)
    expected = this.run()
    k, v = this.k.copy(), this.v.copy()
    k[:, 108:], v[:, 108:] = value, value  # behind all columns
    k[:, 104], v[:, 104] = value, value  # seen by columns 4 to 7
    found = replace(this, k=k, v=v).run(n_threads=2)
    assert np.array_equal(found[:, :4], expected[:, :4])


def test_not_a_number_ends_up_where_ggml_has_it(kernels: int) -> None:
    this = causal(4, 60, 64)
    q, k, v = this.q.copy(), this.k.copy(), this.v.copy()
    q[0, 0, 2, 5] = np.nan  # one head of one column
    k[0, 61, 1, 7] = np.nan  # the heads of one group, from column 1 on
    v[0, 62, 2, 9] = np.nan  # one dimension, from column 2 on
    v[0, 63, 2, 10] = np.inf  # from column 3 on
    broken = replace(this, q=q, k=k, v=v)
    found = broken.run()
    with stock_attention():
        stock = broken.run()
    assert np.array_equal(np.isnan(found), np.isnan(stock))
    assert np.array_equal(np.isinf(found), np.isinf(stock))
    assert np.isnan(found).any()
    assert np.isinf(found).any()


def test_a_column_that_sees_nothing_is_zero(kernels: int) -> None:
    this = case(3, 64)
    assert this.mask is not None
    this.mask[0, 1] = -np.inf
    found = this.run()
    assert not found[0, 1].any()
    assert found[0, 0].any()


def test_without_a_mask_all_cells_are_seen(kernels: int) -> None:
    this = case(8, 77, hidden=0.0)
    assert np.array_equal(replace(this, mask=None).run(), this.run())


def test_masks_may_hold_any_bias(kernels: int) -> None:
    this = case(4, 90)
    assert this.mask is not None
    biased = replace(this, mask=this.mask - np.float16(1) * np.arange(90, dtype=np.float16) / np.float16(16))
    assert error(biased.run(), biased.exact()) < 1e-6


def test_streams_are_apart(kernels: int) -> None:
    both = case(5, 64, streams=2)
    found = both.run(n_threads=2)
    for s in range(2):
        one = replace(both, **{name: getattr(both, name)[s : s + 1] for name in ("q", "k", "v", "mask")})
        assert np.array_equal(one.run(), found[s : s + 1])


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e4])
def test_nasty_magnitudes(kernels: int, magnitude: float) -> None:
    this = case(3, 100, kinds=(F32, F32))
    scaled = replace(this, q=this.q * np.float32(magnitude), v=this.v * np.float32(magnitude))
    exact = scaled.exact()
    assert np.allclose(scaled.run(), exact, rtol=2e-2, atol=1e-6 * magnitude)


def test_instruction_sets_agree() -> None:
    found = []
    for number in SETS:
        with instruction_set(number):
            found.append(case(8, 300, kinds=(F16, BF16)).run())
    assert all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize("what", ["ALiBi", "soft cap", "sinks", "head size"])
def test_the_rest_is_left_to_ggml(what: str) -> None:
    this = case(4, 100, heads=(4, 2), size=(24, 24) if what == "head size" else (32, 32))
    changed = replace(
        this,
        bias=8.0 if what == "ALiBi" else 0.0,
        cap=20.0 if what == "soft cap" else 0.0,
        sinks=np.ones(4, np.float32) if what == "sinks" else None,
    )
    with stock_attention():
        stock = changed.run()
    assert np.array_equal(changed.run(), stock)
