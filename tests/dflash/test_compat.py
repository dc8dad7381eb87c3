"""One test for each reason to refuse two files, on hand-made headers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from localspec.dflash import compat
from localspec.errors import LocalspecError, ModelError, PairError
from localspec.llama import Header, Model, TensorInfo, read_header

VOCABULARY = (100, "a" * 64)
F32, I64 = 0, 27
DFLASH2 = ("dflash.block_size", "dflash.conv_kernel_size", "dflash.conv_group_size", "dflash.selector_rank")


def target(arch: str = "llama", **values: Any) -> Header:
    keys: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": "Big",
        f"{arch}.block_count": 30,
        f"{arch}.embedding_length": 576,
    }
    return Header(Path("big.gguf"), 1000, keys | values, {"tokenizer.ggml.tokens": VOCABULARY}, {})


def drafter(
    drop: tuple[str, ...] = (), tensors: tuple[str, ...] = ("selector_hidden.weight",), **values: Any
) -> Header:
    keys: dict[str, Any] = {
        "general.architecture": "dflash",
        "dflash.block_count": 2,
        "dflash.embedding_length": 576,
        "dflash.context_length": 8192,
        "dflash.attention.layer_norm_rms_epsilon": 1e-6,
        "dflash.block_size": 8,
        "dflash.conv_kernel_size": 3,
        "dflash.conv_group_size": 16,
        "dflash.selector_rank": 64,
        "dflash.target_layers": (2, 11, 29),
        "dflash.selector_top_k": 16,
        "dflash.attention.head_count": 9,
        "dflash.attention.head_count_kv": 3,
        "dflash.attention.key_length": 64,
        "dflash.attention.value_length": 64,
        "tokenizer.ggml.mask_token_id": 99,
    }
    keys = {name: value for name, value in (keys | values).items() if name not in drop}
    infos = {name: TensorInfo(F32, (576, 64), 0, 1) for name in tensors}
    return Header(Path("small.gguf"), 1000, keys, {"tokenizer.ggml.tokens": VOCABULARY}, infos)


def key(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def refusal(kind: type[LocalspecError], *words: str) -> Any:
    """Expect `kind` in one sentence that has all the words."""
    pattern = "".join(f"(?=.*{word})" for word in words)
    return pytest.raises(kind, match=rf"(?s)^{pattern}[^\n]*\.$")


def test_a_good_pair_passes() -> None:
    compat.check_target(target())
    compat.check_drafter(drafter())
    compat.check_pair(target(), drafter())


def test_silent_keys_mean_llama_cpps_defaults() -> None:
    silent = drafter(
        drop=("dflash.attention.key_length", "dflash.attention.value_length", "dflash.attention.head_count_kv")
    )
    compat.check_drafter(silent)
    compat.check_drafter(drafter(drop=(*DFLASH2, "dflash.selector_top_k"), tensors=()))
    assert compat.block_size(drafter(drop=("dflash.block_size",))) == 16


def test_a_dflash_1_drafter_has_no_selector() -> None:
    compat.check_drafter(drafter(drop=("dflash.selector_top_k",), tensors=()))


# --- the target


def test_a_target_without_architecture() -> None:
    with refusal(ModelError, "big.gguf", "general.architecture"):
        compat.check_target(target(**key("general.architecture", "")))


@pytest.mark.parametrize("arch", ["dflash", "dflash-draft", "qwen3-dflash-draft"])
def test_a_drafter_given_as_target(arch: str) -> None:
    with refusal(ModelError, "drafter", arch, "-md"):
        compat.check_target(target(arch))


def test_a_target_without_vocabulary() -> None:
    with refusal(ModelError, "big.gguf", "vocabulary"):
        compat.check_target(replace(target(), strings={}))


@pytest.mark.parametrize("n", [0, 513, 2**32 - 1, -1])
def test_a_target_with_an_impossible_number_of_layers(n: int) -> None:
    with refusal(ModelError, str(n), "512"):
        compat.check_target(target(**key("llama.block_count", n)))


@pytest.mark.parametrize("value", ["30", 30.0, (1.5,)])
def test_a_number_of_layers_that_is_no_number(value: Any) -> None:
    with refusal(ModelError, "llama.block_count"):
        compat.check_target(target(**key("llama.block_count", value)))


# --- the drafter


def test_a_target_given_as_drafter() -> None:
    with refusal(ModelError, "llama model", "not a drafter", "-md"):
        compat.check_drafter(target())


def test_a_drafter_without_architecture() -> None:
    with refusal(ModelError, "small.gguf", "not a drafter"):
        compat.check_drafter(drafter(drop=("general.architecture",)))


@pytest.mark.parametrize("arch", ["dflash-draft", "dflash2", "qwen3-dflash"])
def test_a_forks_format(arch: str) -> None:
    with refusal(ModelError, "fork", arch):
        compat.check_drafter(drafter(**key("general.architecture", arch)))


@pytest.mark.parametrize(
    "header",
    [
        drafter(tensors=("markov_w1.weight", "selector_hidden.weight")),
        drafter(**key("dflash.hyper_connection_count", 4)),
    ],
)
def test_a_dspark_drafter(header: Header) -> None:
    with refusal(ModelError, "DSpark"):
        compat.check_drafter(header)


def test_a_drafter_that_names_no_target_layers() -> None:
    with refusal(ModelError, "target_layers"):
        compat.check_drafter(drafter(drop=("dflash.target_layers",)))


def test_a_drafter_that_reads_a_layer_twice() -> None:
    with refusal(ModelError, "target_layers", "2, 2"):
        compat.check_drafter(drafter(**key("dflash.target_layers", (2, 2))))


@pytest.mark.parametrize("size", [0, 1, 129, 2**32 - 1])
def test_a_block_too_small_or_too_large(size: int) -> None:
    with refusal(ModelError, str(size), "dflash.block_size"):
        compat.check_drafter(drafter(**key("dflash.block_size", size)))


@pytest.mark.parametrize("size", [2, 8, 16, 128])
def test_blocks_of_any_other_size(size: int) -> None:
    compat.check_drafter(drafter(**key("dflash.block_size", size)))


@pytest.mark.parametrize("mask", [None, 100, 2**32 - 1])
def test_a_missing_or_impossible_mask_token(mask: int | None) -> None:
    name = "tokenizer.ggml.mask_token_id"
    header = drafter(drop=(name,)) if mask is None else drafter(**key(name, mask))
    with refusal(ModelError, "no mask token" if mask is None else f"mask token {mask}", name, "100"):
        compat.check_drafter(header)


@pytest.mark.parametrize("heads", [None, 0])
def test_a_drafter_without_heads(heads: int | None) -> None:
    name = "dflash.attention.head_count"
    with refusal(ModelError, name):
        compat.check_drafter(drafter(drop=(name,)) if heads is None else drafter(**key(name, heads)))


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_heads_that_do_not_divide(kv_heads: int) -> None:
    with refusal(ModelError, "9", str(kv_heads)):
        compat.check_drafter(drafter(**key("dflash.attention.head_count_kv", kv_heads)))


def test_keys_and_values_of_different_width() -> None:
    with refusal(ModelError, "64", "32"):
        compat.check_drafter(drafter(**key("dflash.attention.value_length", 32)))


def test_a_pool_without_selector() -> None:
    with refusal(ModelError, "16", "selector"):
        compat.check_drafter(drafter(tensors=()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dflash.block_size", "eight"),
        ("dflash.target_layers", "all"),
        ("dflash.target_layers", (1.0, 2.0)),
        ("tokenizer.ggml.mask_token_id", "<mask>"),
        ("dflash.selector_top_k", 16.0),
        ("dflash.attention.key_length", "64"),
    ],
)
def test_keys_of_another_type(name: str, value: Any) -> None:
    with refusal(ModelError, name):
        compat.check_drafter(drafter(**key(name, value)))


# --- the reduced vocabulary


def reduced(tmp_path: Path, ids: list[int], *, kind: int = I64, shape: tuple[int, ...] | None = None) -> Header:
    """A drafter whose d2t table lies in a real file."""
    path = tmp_path / "small.gguf"
    path.write_bytes(b"head" + np.array(ids, np.int64).tobytes())
    info = TensorInfo(kind, shape or (len(ids),), 4, 8 * len(ids))
    head = TensorInfo(F32, (576, len(ids)), 0, 1)
    tensors = {"d2t": info, "output.weight": head, "selector_hidden.weight": head}
    return replace(drafter(), path=path, tensors=tensors)


def test_a_reduced_vocabulary_passes(tmp_path: Path) -> None:
    compat.check_drafter(reduced(tmp_path, [*range(16), 99]))


def test_a_reduced_vocabulary_of_another_type(tmp_path: Path) -> None:
    with refusal(ModelError, "d2t", "int64"):
        compat.check_drafter(reduced(tmp_path, list(range(16)), kind=F32))


def test_a_reduced_vocabulary_of_another_shape(tmp_path: Path) -> None:
    with refusal(ModelError, "d2t"):
        compat.check_drafter(reduced(tmp_path, list(range(16)), shape=(4, 4)))


@pytest.mark.parametrize("bad", [-1, 100, 2**62])
def test_a_reduced_vocabulary_with_an_id_outside(tmp_path: Path, bad: int) -> None:
    with refusal(ModelError, "d2t", str(bad), "100"):
        compat.check_drafter(reduced(tmp_path, [*range(16), bad]))


def test_a_reduced_vocabulary_smaller_than_the_pool(tmp_path: Path) -> None:
    with refusal(ModelError, "d2t", "15", "16"):
        compat.check_drafter(reduced(tmp_path, list(range(15))))


def test_a_reduced_vocabulary_that_names_a_token_twice(tmp_path: Path) -> None:
    with refusal(ModelError, "d2t", "17", "16"):
        compat.check_drafter(reduced(tmp_path, [*range(16), 3]))


def test_a_reduced_vocabulary_without_a_head(tmp_path: Path) -> None:
    header = reduced(tmp_path, list(range(16)))
    del header.tensors["output.weight"]
    with refusal(ModelError, "d2t", "output.weight"):
        compat.check_drafter(header)


# --- the two together


def test_hidden_states_of_another_width() -> None:
    with refusal(PairError, "small.gguf", "576", "Big", "960"):
        compat.check_pair(target(**key("llama.embedding_length", 960)), drafter())


@pytest.mark.parametrize("layer", [30, 31, -1, 2**31 - 1])
def test_a_layer_the_target_does_not_have(layer: int) -> None:
    with refusal(PairError, "small.gguf", str(layer), "0 to 29"):
        compat.check_pair(target(), drafter(**key("dflash.target_layers", (0, layer))))


def test_the_layers_that_predict_several_tokens_have_no_inputs() -> None:
    with refusal(PairError, "29", "0 to 28"):
        compat.check_pair(target(**key("llama.nextn_predict_layers", 1)), drafter())


def test_a_vocabulary_of_another_size() -> None:
    other = replace(drafter(), strings={"tokenizer.ggml.tokens": (101, "a" * 64)})
    with refusal(PairError, "101", "100"):
        compat.check_pair(target(), other)


def test_a_vocabulary_of_the_same_size_with_other_tokens() -> None:
    other = replace(drafter(), strings={"tokenizer.ggml.tokens": (100, "b" * 64)})
    with refusal(PairError, "b" * 12, "a" * 12):
        compat.check_pair(target(), other)


@pytest.mark.parametrize(
    "lacking", [*DFLASH2, "dflash.selector_top_k", "dflash.context_length", "dflash.attention.layer_norm_rms_epsilon"]
)
def test_a_dflash_2_drafter_that_llama_cpp_would_not_load(tmp_path: Path, lacking: str) -> None:
    partner = tiny.write_target(tmp_path / "t.gguf")
    path = tiny.write_drafter(tmp_path / "d.gguf", partner, drop_keys=(lacking,))
    with refusal(ModelError, f"lacks {lacking}"):
        compat.check_drafter(read_header(path))
    with pytest.raises(ModelError):
        Model(path)
    Model(tiny.write_drafter(path, partner)).close()


def test_a_sliding_window_without_its_pattern() -> None:
    with refusal(ModelError, "lacks dflash.attention.sliding_window_pattern"):
        compat.check_drafter(drafter(**key("dflash.attention.sliding_window", 512)))


def test_sizes_of_dflash_2_that_do_not_go_together() -> None:
    with refusal(ModelError, "576", "groups of 50", "conv_group_size"):
        compat.check_drafter(drafter(**key("dflash.conv_group_size", 50)))
    with refusal(ModelError, "576", "pool of 24", "at least 600"):
        compat.check_drafter(drafter(**key("dflash.selector_top_k", 24)))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="is a pipe"):
        read_header(tmp_path / "pipe.gguf")
