"""Products of packed weights: as near to exact arithmetic as ggml's, and the same to the last bit in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import native_ops as ops
import numpy as np
import psutil
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from localspec.llama import Context, Model, native

ENCODINGS = [
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q8_0,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
    Kind.IQ4_NL,
    Kind.IQ4_XS,
]
SUPER = {Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS}  # blocks of 256
encodings = pytest.mark.parametrize("kind", ENCODINGS, ids=lambda kind: kind.name)


@pytest.fixture(params=ops.sets(), ids=ops.name_of)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[int]:
    """Every one that this CPU has; the best one again afterwards."""
    assert ops.library().localspec_kernels_use(request.param)
    yield request.param
    ops.library().localspec_kernels_use(max(ops.sets()))


def random(*shape: int, seed: int = 0) -> ops.Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def multiply(kind: Kind, w: ops.Floats, x: ops.Floats, where: int) -> ops.Floats:
    with ops.weights(kind, ops.quantise(kind, w), w.shape, where) as weights:
        return ops.mul_mat(weights, x, n_threads=2)


def exact(kind: Kind, w: ops.Floats, x: ops.Floats) -> np.ndarray:
    return x.astype(np.float64) @ ops.dequantise(kind, ops.quantise(kind, w), w.shape).swapaxes(-1, -2)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def test_there_are_kernels_or_a_reason_why_not() -> None:
    """With none all cases below are left out; a CPU that has a wider set has AVX2 too."""
    assert native.state().detail
    assert (1 in ops.sets()) == (native.state().library is not None and ops.library().localspec_kernels_enable() > 0)


# --- right


@encodings
@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["even", "outliers"])
def test_no_further_from_exact_arithmetic_than_ggml(instruction_set: int, kind: Kind, spread: float) -> None:
    """Where ggml rounds in the same places (a scale for 32 activations) chance decides the last permille."""
    w, x = random(160, 1024), random(48, 1024, seed=1)
    x[:, ::97] *= spread
    expected = exact(kind, w, x)
    mine, stock = (rms(multiply(kind, w, x, where()) - expected) for where in (ops.ours, ops.theirs))
    assert mine <= stock * 1.003
    assert mine < 0.02 * rms(expected)


@encodings
def test_any_shape(instruction_set: int, kind: Kind) -> None:
    k = 256 if kind in SUPER else 96
    for rows, n in [(16, 1), (48, 3), (523, 5), (1000, 40)]:
        w, x = random(rows, k), random(n, k, seed=1)
        expected = exact(kind, w, x)
        assert rms(multiply(kind, w, x, ops.ours()) - expected) < 0.02 * rms(expected)


@encodings
def test_planes_are_repeated_along_those_of_the_activations(instruction_set: int, kind: Kind) -> None:
    w, x = random(2, 3, 32, 256), random(4, 6, 5, 256, seed=1)
    expected = exact(kind, w.repeat(2, axis=0).repeat(2, axis=1), x)
    assert rms(multiply(kind, w, x, ops.ours()) - expected) < 0.02 * rms(expected)


@encodings
@pytest.mark.parametrize("shared", [True, False], ids=["one input for all experts", "one for each"])
def test_experts(instruction_set: int, kind: Kind, shared: bool) -> None:
    """Every result has the bits of its expert's own product; experts that nobody chose are left out."""
    w, ids = random(6, 48, 256), np.random.default_rng(2).permuted(np.tile(np.arange(5), (9, 1)), axis=1)[:, :3]
    x = random(9, 1 if shared else 3, 256, seed=1)
    data = ops.quantise(kind, w)
    with ops.weights(kind, data, w.shape, ops.ours()) as experts:
        found = ops.mul_mat_id(experts, x, ids, n_threads=2)
    each = data.reshape(6, -1)
    for token, chosen in enumerate(ids):
        for used, expert in enumerate(chosen):
            with ops.weights(kind, each[expert], w.shape[1:], ops.ours()) as alone:
                column = x[token, 0 if shared else used]
                assert np.array_equal(found[token, used], ops.mul_mat(alone, column[None])[0])


@encodings
def test_rows_of_a_weight_through_a_view(instruction_set: int, kind: Kind) -> None:
    w, x = random(64, 256), random(3, 256, seed=1)
    with ops.weights(kind, ops.quantise(kind, w), w.shape, ops.ours()) as whole:
        assert np.array_equal(ops.mul_mat(whole, x, first_row=16, rows=32), ops.mul_mat(whole, x)[:, 16:48])


# --- the same bits


@encodings
def test_the_same_bits_in_any_batch_with_any_number_of_threads(instruction_set: int, kind: Kind) -> None:
    w, x = random(112, 512), random(33, 512, seed=1)
    with ops.weights(kind, ops.quantise(kind, w), w.shape, ops.ours()) as weights:
        alone = np.concatenate([ops.mul_mat(weights, column[None]) for column in x])
        for width in range(1, 34):
            for n_threads in (1, 2, 4):
                assert np.array_equal(ops.mul_mat(weights, x[-width:], n_threads=n_threads), alone[-width:])


@encodings
def test_the_same_bits_with_every_instruction_set(instruction_set: int, kind: Kind) -> None:
    w, x = random(80, 768), random(7, 768, seed=1)
    with ops.weights(kind, ops.quantise(kind, w), w.shape, ops.ours()) as weights:
        found = ops.mul_mat(weights, x)
        ops.library().localspec_kernels_use(ops.sets()[0])
        assert np.array_equal(found, ops.mul_mat(weights, x))


# --- values that are not nice


@encodings
@pytest.mark.parametrize("size", [0.0, 1e-37, 1e-30, 1e30])
def test_sizes_of_activations(instruction_set: int, kind: Kind, size: float) -> None:
    """Relative precision is kept, where ggml's scales of 16 bits become zero or infinite; below 1e-36 all is zero."""
    w, x = random(48, 256), random(4, 256, seed=1)
    x /= np.abs(x).max()
    found = multiply(kind, w, x * np.float32(size), ops.ours())
    if size < 1e-36:
        assert not found.any()
    else:
        expected = exact(kind, w, x)
        assert rms(found / np.float64(size) - expected) < 0.02 * rms(expected)


@encodings
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 13, 255])
def test_what_is_not_finite_makes_its_column_so_and_no_other(
    instruction_set: int, kind: Kind, value: float, place: int
) -> None:
    w, x = random(48, 256), random(6, 256, seed=1)
    clean = multiply(kind, w, x, ops.ours())
    x[4, place] = value
    found, stock = multiply(kind, w, x, ops.ours()), multiply(kind, w, x, ops.theirs())
    assert not np.isfinite(found[4]).any()  # ggml sometimes loses a NaN: the maximum of a block with one may be finite
    assert not np.isfinite(found[~np.isfinite(stock)]).any()
    others = [0, 1, 2, 3, 5]
    assert np.array_equal(found[others], clean[others])


@encodings
def test_weights_with_scales_of_zero_and_of_the_largest_size(instruction_set: int, kind: Kind) -> None:
    w, x = random(48, 512), random(3, 512, seed=1)
    w[::3] = 0
    w[1::3] *= 300
    expected = exact(kind, w, x)
    found = multiply(kind, w, x, ops.ours())
    assert not found[:, ::3].any()
    assert rms(found - expected) < 0.02 * rms(expected)


# --- the buffer


@encodings
def test_a_packed_weight_is_read_and_written_as_the_file_has_it(kind: Kind) -> None:
    w = random(3, 40, 512)
    data = ops.quantise(kind, w)
    with ops.weights(kind, data, w.shape, ops.ours()) as weights:
        assert np.array_equal(weights.get(), data)
        size = data.size
        for begin, end in [(0, 1), (7, size // 3), (size // 2 - 1, size // 2 + 999), (size - 5, size)]:
            assert np.array_equal(weights.get(begin, end - begin), data[begin:end])
            data[begin:end] ^= 0x5A
            weights.set(data[begin:end], begin)
            assert np.array_equal(weights.get(), data)
        weights.memset(3, 100, 1000)
        data[100:1100] = 3
        assert np.array_equal(weights.get(), data)


@encodings
def test_packed_weights_take_no_more_memory_than_3_percent(kind: Kind) -> None:
    for rows in (16, 523, 4096):
        with ops.weights(kind, None, (rows, 512), ops.ours()) as weights:
            assert weights.allocated <= 1.03 * weights.n_bytes + 64


@encodings
def test_what_would_need_more_is_left_to_ggml(kind: Kind) -> None:
    for rows, ours in [(8, False), (24, False), (523, True), (48, True)]:
        with ops.weights(kind, None, (rows, 512), ops.ours()) as weights:
            assert ops.supported(weights, (2, 512)) == ours


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q2_K, Kind.Q3_K], ids=lambda kind: kind.name)
def test_encodings_without_kernels_are_left_to_ggml(kind: Kind) -> None:
    with ops.weights(kind, None, (64, 512), ops.ours()) as weights:
        assert not ops.supported(weights, (2, 512))


def test_freed_weights_are_the_systems_again() -> None:
    process = psutil.Process()
    data = ops.quantise(Kind.Q8_0, random(4096, 4096))  # 18 MB
    before = 0
    for i in range(8):
        with ops.weights(Kind.Q8_0, data, (4096, 4096), ops.ours()) as weights:
            ops.mul_mat(weights, random(1, 4096))
        if i == 1:
            before = process.memory_info().rss
    assert process.memory_info().rss - before < data.nbytes // 2


# --- through llama.cpp


def write_model(path: Path, kind: Kind) -> None:
    """A one-layer llama whose head is its embedding table: read by rows as the file has it, multiplied with packed."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(320)
    writer.add_tokenizer_model("none")
    shapes = {f"blk.0.attn_{name}": (256, 256) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (512, 256), "blk.0.ffn_up": (512, 256), "blk.0.ffn_down": (256, 512)}
    for seed, (name, shape) in enumerate((shapes | {"token_embd": (320, 256)}).items()):
        data = ops.quantise(kind, 0.05 * random(*shape, seed=seed))
        writer.add_tensor(f"{name}.weight", data.reshape(shape[0], -1), raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path: Path, widths: list[int], *, repack: bool) -> ops.Floats:
    """Those of the same tokens, decoded so many at a time."""
    rows = []
    with Model(path, repack=repack) as model, Context(model, n_ctx=64, n_batch=64, n_threads=2, exact=True) as context:
        for width in widths:
            start = sum(map(len, rows))
            context.decode(np.arange(start, start + width, dtype=np.int32), start)
            rows.append(context.logits(width).copy())
    return np.concatenate(rows)


@encodings
def test_a_model_with_a_tied_head(instruction_set: int, kind: Kind, tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", kind)
    alone = logits(tmp_path / "m.gguf", [1] * 24, repack=True)
    assert np.array_equal(alone, logits(tmp_path / "m.gguf", [2, 8, 1, 13], repack=True))
    stock = logits(tmp_path / "m.gguf", [24], repack=False)
    assert not np.array_equal(alone, stock)  # it is ours that was tried
    assert np.abs(alone - stock).max() < 0.05 * np.abs(stock).max()
