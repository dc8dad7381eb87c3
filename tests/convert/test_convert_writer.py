"""Writing GGUF: every type, whole or not at all, and without holding a tensor in memory."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from localspec.convert.writer import K_QUANTS, OUTTYPES, PLAIN, Tensor, check_options, write
from localspec.errors import ModelError, OptionError

RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((6, 256), np.float32)
ODD = RNG.standard_normal((4, 33), np.float32)
# Largest error for values of a standard normal distribution.
PRECISION = {"f32": 0.0, "f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-2, "q5_0": 0.2, "q5_1": 0.15, "q4_0": 0.4, "q4_1": 0.3}


def tensors() -> list[Tensor]:
    return [
        Tensor("token_embd.weight", MATRIX.shape, lambda: (MATRIX[i : i + 2] for i in (0, 2, 4))),
        Tensor.of("blk.0.attn_q.weight", ODD),
        Tensor.of("blk.0.attn_norm.weight", MATRIX[:1]),
        Tensor.of("blk.0.ffn_gate_inp.weight", MATRIX),
        Tensor.of("blk.0.ssm_dt.bias", MATRIX[0]),
        Tensor.of("rope_freqs.weight", MATRIX[0, :32]),
        Tensor.of("d2t", np.arange(5)),
    ]


def save(path: Path, outtype: str, **options: Any) -> dict[str, gguf.ReaderTensor]:
    write(GGUFWriter(None, "llama"), options.pop("tensors", tensors()), path, outtype=outtype, **options)
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def values(tensor: gguf.ReaderTensor) -> np.ndarray[Any, Any]:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("outtype", PLAIN)
def test_values_survive_as_far_as_the_type_allows(tmp_path: Path, outtype: str) -> None:
    found = save(tmp_path / "x.gguf", outtype)
    assert found["token_embd.weight"].tensor_type.name == outtype.upper()
    assert abs(values(found["token_embd.weight"]) - MATRIX).max() <= PRECISION[outtype]
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.fields["general.file_type"].contents() == PLAIN[outtype][1]


def test_what_must_not_be_quantised_is_not(tmp_path: Path) -> None:
    found = save(tmp_path / "x.gguf", "q4_0")
    kinds = {name: tensor.tensor_type.name for name, tensor in found.items()}
    assert kinds.pop("token_embd.weight") == "Q4_0"
    assert kinds.pop("blk.0.attn_q.weight") == "F16"  # 33 values do not divide into blocks of 32
    assert kinds.pop("d2t") == "I64"
    assert set(kinds.values()) == {"F32"}
    np.testing.assert_array_equal(found["d2t"].data, np.arange(5))
    np.testing.assert_array_equal(found["blk.0.ffn_gate_inp.weight"].data, MATRIX)


def test_blocks_are_rounded_as_the_whole_is(tmp_path: Path) -> None:
    found = save(tmp_path / "x.gguf", "q4_1")["token_embd.weight"]
    np.testing.assert_array_equal(found.data, gguf.quants.quantize(MATRIX, GGMLQuantizationType.Q4_1))


def test_what_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    large = [Tensor.of("a.weight", 1e5 * MATRIX)]
    with pytest.raises(ModelError, match=r"a\.weight has values that f16 cannot hold .*choose --outtype bf16"):
        save(tmp_path / "x.gguf", "f16", tensors=large)
    assert not left(tmp_path)
    assert abs(values(save(tmp_path / "x.gguf", "bf16", tensors=large)["a.weight"]) / 1e5 - MATRIX).max() < 2e-2


def test_progress_ends_at_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    save(tmp_path / "x.gguf", "f16", progress=lambda *args: seen.append(args))
    done = [n for _, n, _ in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][2]


# ---- K-quants


def llama(path: Path, outtype: str, **options: Any) -> dict[str, gguf.ReaderTensor]:
    """A model that llama.cpp's quantiser accepts."""
    made = GGUFWriter(None, "llama")
    for key in ("context_length", "block_count", "feed_forward_length", "attention.head_count"):
        made.add_uint32(f"llama.{key}", 1)
    made.add_uint32("llama.embedding_length", 256)
    made.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    made.add_tokenizer_model("gpt2")
    made.add_token_list(["a"] * 6)
    some = [Tensor.of("token_embd.weight", MATRIX), Tensor.of("blk.0.ffn_up.weight", MATRIX)]
    write(made, some, path, outtype=outtype, precision="f32", **options)
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("outtype", ["q4_k_m", "q6_k", "q2_k"])
def test_k_quants_are_made_by_llama_cpp(tmp_path: Path, outtype: str) -> None:
    seen: list[str] = []
    found = llama(tmp_path / "x.gguf", outtype, progress=lambda what, done, total: seen.append(what))
    assert found["blk.0.ffn_up.weight"].tensor_type.name == outtype.upper().removesuffix("_M")
    assert abs(values(found["blk.0.ffn_up.weight"]) - MATRIX).max() < (2.0 if outtype == "q2_k" else 0.4)
    assert list(dict.fromkeys(seen)) == ["Converting", f"Quantising as {outtype}"]
    assert left(tmp_path) == ["x.gguf"]


def test_every_type_has_a_name_in_llama_cpp() -> None:
    assert {f"MOSTLY_{name.upper()}" for name in OUTTYPES if name != "f32"} <= set(gguf.LlamaFileType.__members__)
    assert not set(K_QUANTS) & set(PLAIN)


def test_a_refusal_of_the_quantiser_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot re-encode"):
        save(tmp_path / "x.gguf", "q4_k_m")  # lacks every key of a llama
    assert not left(tmp_path)


# ---- whole or not at all


def test_a_full_disk_is_one_sentence_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts() -> Iterator[Any]:
        yield MATRIX[:3]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        OptionError, match=r"cannot write .*x\.gguf \(No space left on device\); make room or"
    ) as caught:
        save(tmp_path / "x.gguf", "f16", tensors=[Tensor("a.weight", MATRIX.shape, parts)])
    assert "\n" not in str(caught.value)
    assert not left(tmp_path)


def test_a_failed_write_is_one_sentence_and_nothing_is_left(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OptionError, match=r"cannot write .*x\.gguf \(File too large\)"):
            save(tmp_path / "x.gguf", "f32", tensors=[Tensor.of("a.weight", np.zeros((1000, 256), np.float32))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not left(tmp_path)


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(OptionError, match=r"has 0\.0 GB free, this takes 0\.1 GB"):
        save(tmp_path / "x.gguf", "f16")
    assert not left(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError("damaged")])
def test_whatever_interrupts_leaves_nothing(tmp_path: Path, error: Any) -> None:
    def parts() -> Iterator[Any]:
        yield MATRIX[:3]
        raise error

    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ModelError):
        save(tmp_path / "x.gguf", "f16", tensors=[Tensor("a.weight", MATRIX.shape, parts)])
    assert not left(tmp_path)


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(OptionError, match=r"exists; choose another name with -o, or overwrite it with --force"):
        save(path, "f16")
    assert path.read_bytes() == b"mine"
    save(path, "f16", force=True)
    assert path.read_bytes()[:4] == b"GGUF"


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is a folder; give -o the name of a file"):
        save(tmp_path, "f16")
    with pytest.raises(OptionError, match="is not a folder; create it"):
        save(tmp_path / "none" / "x.gguf", "f16")
    with pytest.raises(OptionError, match=r"'q3' is not one of f32, f16, .*q6_k"):
        save(tmp_path / "x.gguf", "q3")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, path: Path | None = None) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(GGUFWriter, "write_header_to_file", refuse)
    with pytest.raises(OptionError, match=r"cannot write .*x\.gguf \(Permission denied\)"):
        save(tmp_path / "x.gguf", "f16")


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    n_rows, n_columns = 12_000, 4096  # 98 MB in bf16, 197 MB in float32
    block = np.zeros((512, n_columns), np.float32)
    big = Tensor(
        "token_embd.weight", (n_rows, n_columns), lambda: (block[: min(512, n_rows - i)] for i in range(0, n_rows, 512))
    )
    tracemalloc.start()
    try:
        save(tmp_path / "x.gguf", "bf16", tensors=[big])
        assert tracemalloc.get_traced_memory()[1] < 80e6
    finally:
        tracemalloc.stop()
    assert (tmp_path / "x.gguf").stat().st_size > 2 * n_rows * n_columns


def test_a_tensor_of_the_wrong_size_is_a_fault_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="came as 12 bytes instead of 16"):
        save(tmp_path / "x.gguf", "f16", tensors=[Tensor("a.weight", (4, 2), lambda: [MATRIX[:3, :2]])])
    assert not left(tmp_path)


def test_only_files_are_replaced_and_links_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="a device or a pipe"):
        check_options(tmp_path / "pipe", "f32", force=True)
    (tmp_path / "file.gguf").write_bytes(b"old")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "file.gguf")
    save(tmp_path / "link.gguf", "f32", force=True)
    assert (tmp_path / "link.gguf").is_symlink()
    assert (tmp_path / "file.gguf").read_bytes()[:4] == b"GGUF"
