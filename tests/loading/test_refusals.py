"""Whatever file a user hands over, `load` says in one sentence why it will not do, and never takes the process down.

The files are loaded in a child process, as a user's script would; what may not happen there is a crash or a log line.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

Load = Callable[..., tuple[str, str]]

CHILD = """
import json, sys
import localspec
for line in sys.stdin:
    try:
        with localspec.load(**json.loads(line)) as pair:
            said = ["fine", pair.generate([1, 2, 3], max_tokens=4).finish_reason]
    except localspec.LocalspecError as error:
        said = [type(error).__name__, str(error)]
    print(json.dumps(said), flush=True)
"""


class Child:
    """A process that loads what it is told; a new one after each that dies."""

    def __init__(self, folder: Path) -> None:
        self._stderr = folder / "stderr"
        self._environment = os.environ | {"LOCALSPEC_CACHE": str(folder / "cache")}  # no trace in the user's
        self._process: subprocess.Popen[str] | None = None

    def load(self, **options: Any) -> tuple[str, str]:
        """The error's class and sentence (or "fine" and the end) of loading a pair and saying four tokens."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"n_threads": 1} | options, default=str), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process died ({self._process.wait()}): {self._stderr.read_text()[-800:]}"
        assert self._stderr.read_text() == ""
        kind, text = json.loads(answer)
        return kind, text

    def _start(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": self._environment}
        with self._stderr.open("w") as stderr:
            self._process = subprocess.Popen([sys.executable, "-c", CHILD], stderr=stderr, **pipes)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    child = Child(tmp_path_factory.mktemp("child"))
    yield child.load
    child.close()


def assert_refused(said: tuple[str, str], kind: str, *words: str) -> None:
    assert said[0] == kind, said
    assert "\n" not in said[1]
    assert said[1].endswith(".")
    for word in words:
        assert word in said[1]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_target(tmp_path_factory.mktemp("target") / "target.gguf")


def test_a_good_pair_loads(load: Load, target: Path, tmp_path: Path) -> None:
    draft = tiny.write_drafter(tmp_path / "drafter.gguf", target)
    assert load(target=target, draft=draft, n_ctx=256) == ("fine", "length")


# --- files that are no model


def gguf(n_tensors: int, n_keys: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + body


ARCH = struct.pack("<Q", 20) + b"general.architecture"
BOMBS = {
    "empty": b"",
    "three bytes": b"GGU",
    "magic only": b"GGUF",
    "old version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "version of tomorrow": b"GGUF" + struct.pack("<IQQ", 999, 0, 0),
    "other byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "nothing inside": gguf(0, 0),
    "2^60 keys": gguf(0, 2**60),
    "2^60 tensors": gguf(2**60, 0),
    "key of 2^60 bytes": gguf(0, 1, struct.pack("<Q", 2**60) + b"general.name"),
    "text of 2^60 bytes": gguf(0, 1, ARCH + struct.pack("<IQ", 8, 2**60) + b"llama"),
    "array of 2^60 numbers": gguf(0, 1, ARCH + struct.pack("<IIQ", 9, 4, 2**60)),
    "array of 2^60 texts": gguf(0, 1, ARCH + struct.pack("<IIQ", 9, 8, 2**60)),
    "unknown type": gguf(0, 1, ARCH + struct.pack("<IQ", 77, 1)),
    "array of arrays": gguf(0, 1, ARCH + struct.pack("<IIQ", 9, 9, 1)),
    "architecture is a number": gguf(0, 1, ARCH + struct.pack("<II", 4, 7)),
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(500),
    "text": b"not a model\n",
    "pickle": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=list(BOMBS))
def test_a_file_that_is_no_model(load: Load, target: Path, tmp_path: Path, data: bytes) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    assert_refused(load(target=bad), "ModelError", "bad.gguf")
    assert_refused(load(target=target, draft=bad), "ModelError", "bad.gguf")


def test_paths_that_are_no_files(load: Load, target: Path, tmp_path: Path) -> None:
    for path, why in ((tmp_path, "directory"), (tmp_path / "absent.gguf", "no such file"), (Path("a\0b"), "null")):
        assert_refused(load(target=path), "ModelError", why)
        assert_refused(load(target=target, draft=path), "ModelError", why)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.999])
def test_a_file_cut_off(load: Load, target: Path, tmp_path: Path, share: float) -> None:
    speaker, draft = tmp_path / "t.gguf", tiny.write_drafter(tmp_path / "d.gguf", target)
    speaker.write_bytes(target.read_bytes())
    for path in (speaker, draft):
        tiny.truncate(path, int(path.stat().st_size * share))
    assert_refused(load(target=speaker), "ModelError", "t.gguf", "download")
    assert_refused(load(target=target, draft=draft), "ModelError", "d.gguf", "download")


# --- files in the wrong place


def test_a_target_as_drafter_and_the_other_way_round(load: Load, target: Path, tmp_path: Path) -> None:
    draft = tiny.write_drafter(tmp_path / "drafter.gguf", target)
    assert_refused(load(target=target, draft=target), "ModelError", "llama", "not a drafter", "-md")
    assert_refused(load(target=draft, draft=target), "ModelError", "is a drafter", "-m")
    assert_refused(load(target=draft), "ModelError", "is a drafter", "-m")


@pytest.mark.parametrize("arch", ["dflash-draft", "dflash2"])
def test_a_forks_format(load: Load, target: Path, tmp_path: Path, arch: str) -> None:
    draft = tiny.write_drafter(tmp_path / "drafter.gguf", target, arch=arch)
    assert_refused(load(target=target, draft=draft), "ModelError", "fork", arch)


def test_a_layer_whose_input_llama_cpp_does_not_show(load: Load, tmp_path: Path) -> None:
    """Of a qwen2 it is the output of the layer before; layer 0 has none before it."""
    speaker = tiny.write_target(tmp_path / "target.gguf", "qwen2")
    draft = tiny.write_drafter(tmp_path / "drafter.gguf", speaker, target_layers=[0, 2])
    assert_refused(load(target=speaker, draft=draft), "PairError", "layer 0", "qwen2", "-md")
    assert load(target=speaker, n_ctx=256) == ("fine", "length")
    draft = tiny.write_drafter(tmp_path / "drafter.gguf", speaker, target_layers=[1, 2])
    assert load(target=speaker, draft=draft, n_ctx=256) == ("fine", "length")


@pytest.mark.parametrize("arch", ["nonsense", "clip", "bert", "t5", "mamba", "whisper"])
def test_a_target_of_another_kind(load: Load, tmp_path: Path, arch: str) -> None:
    speaker = tiny.write_target(
        tmp_path / "target.gguf",
        overrides={"general.architecture": arch, f"{arch}.block_count": 4, f"{arch}.embedding_length": 288},
    )
    assert_refused(load(target=speaker), "ModelError", "target.gguf")


# --- pairs that do not fit


@pytest.fixture
def pair_with(load: Load, target: Path, tmp_path: Path) -> Load:
    """Load the good target with a drafter written with `options`."""
    return lambda **options: load(
        target=target, draft=tiny.write_drafter(tmp_path / "drafter.gguf", target, **options), n_ctx=256
    )


def test_a_vocabulary_of_another_size(load: Load, target: Path, tmp_path: Path) -> None:
    other = tiny.write_target(tmp_path / "other.gguf", n_vocab=400)
    draft = tiny.write_drafter(tmp_path / "drafter.gguf", other)
    assert_refused(load(target=target, draft=draft), "PairError", "400", "320", "another model")


def test_a_vocabulary_with_other_tokens(pair_with: Load) -> None:
    tokens = [token.replace("unused", "spare") for token in tiny._vocabulary(320)[0]]
    said = pair_with(overrides={"tokenizer.ggml.tokens": tokens})
    assert_refused(said, "PairError", "320", "not the same ones", "SHA-256")


def test_a_target_of_another_width(load: Load, tmp_path: Path) -> None:
    wide = tiny.write_target(tmp_path / "wide.gguf", n_embd=320)
    draft = tiny.write_drafter(tmp_path / "drafter.gguf", tiny.write_target(tmp_path / "narrow.gguf"))
    assert_refused(load(target=wide, draft=draft), "PairError", "288", "320", "another model")


@pytest.mark.parametrize("layers", [[1, 4], [1, 99], [0, 2**31 - 1]])
def test_layers_the_target_does_not_have(pair_with: Load, layers: list[int]) -> None:
    said = pair_with(target_layers=layers)
    assert_refused(said, "PairError", str(layers[-1]), "0 to 3", "another model")


# --- drafters that are not whole


def d2t(*ids: int) -> dict[str, np.ndarray]:
    return {"d2t": np.array(ids, np.int64)}


BROKEN: dict[str, dict[str, Any]] = {
    "no mask token": {"drop_keys": ["tokenizer.ggml.mask_token_id"]},
    "mask token outside": {"overrides": {"tokenizer.ggml.mask_token_id": 320}},
    "no target layers": {"drop_keys": ["dflash.target_layers"]},
    "a layer twice": {"target_layers": [1, 1]},
    "no heads": {"drop_keys": ["dflash.attention.head_count"]},
    "heads that do not divide": {"overrides": {"dflash.attention.head_count_kv": 3}},
    "keys wider than values": {"overrides": {"dflash.attention.value_length": 16}},
    "no block": {"overrides": {"dflash.block_size": 1}},
    "a block of 4 billion": {"overrides": {"dflash.block_size": 2**32 - 1}},
    "no selector": {"drop_tensors": ["selector_hidden.weight"]},
    "half a selector": {"drop_tensors": ["selector_successor.weight"]},
    "no selector rank": {"drop_keys": ["dflash.selector_rank"]},
    "no convolution": {"drop_tensors": ["blk.0.attn_conv_base"]},
    "no convolution width": {"drop_keys": ["dflash.conv_kernel_size"]},
    "convolution groups that do not divide": {"overrides": {"dflash.conv_group_size": 17}},
    "a pool too large for its rows": {"overrides": {"dflash.selector_top_k": 17}},
    "no fusion": {"drop_tensors": ["fc.weight"]},
    "fusion of another width": {"replace_tensors": {"fc.weight": np.zeros((288, 288), np.float32)}},
    "no norm": {"drop_tensors": ["output_norm.weight"]},
    "no attention": {"drop_tensors": ["blk.0.attn_q.weight"]},
    "more layers than tensors": {"overrides": {"dflash.block_count": 3}},
    "10,000 layers": {"overrides": {"dflash.block_count": 10_000}},
    "window without pattern": {"sliding_window": 16, "drop_keys": ["dflash.attention.sliding_window_pattern"]},
    "d2t outside": {"n_kept_vocab": 40, "replace_tensors": d2t(*range(39), 320)},
    "d2t negative": {"n_kept_vocab": 40, "replace_tensors": d2t(*range(39), -1)},
    "d2t twice": {"n_kept_vocab": 40, "replace_tensors": d2t(*range(39), 3)},
    "d2t of floats": {"n_kept_vocab": 40, "replace_tensors": {"d2t": np.zeros(40, np.float32)}},
    "d2t without head": {"n_kept_vocab": 40, "drop_tensors": ["output.weight"]},
    "d2t shorter than its head": {"n_kept_vocab": 40, "replace_tensors": d2t(*range(30))},
    "d2t smaller than the pool": {
        "n_kept_vocab": 10,
        "replace_tensors": d2t(*range(10)) | {"output.weight": np.zeros((10, 288), np.float32)},
    },
    "a Markov head": {"replace_tensors": {"markov_w1.weight": np.zeros((320, 8), np.float32)}},
    "a block size in words": {"overrides": {"dflash.block_size": "eight"}},
    "a mask in words": {"overrides": {"tokenizer.ggml.mask_token_id": "<|mask|>"}},
    "layers in words": {"overrides": {"dflash.target_layers": ["one", "three"]}},
    "no tokenizer": {"drop_keys": ["tokenizer.ggml.tokens"]},
}


@pytest.mark.parametrize("options", BROKEN.values(), ids=list(BROKEN))
def test_a_drafter_that_is_not_whole(pair_with: Load, options: dict[str, Any]) -> None:
    assert_refused(pair_with(**options), "ModelError", "drafter.gguf")


BROKEN_TARGETS: dict[str, dict[str, Any]] = {
    "no vocabulary": {"drop_keys": ["tokenizer.ggml.tokens"]},
    "no tokenizer model": {"drop_keys": ["tokenizer.ggml.model"]},
    "no merges": {"drop_keys": ["tokenizer.ggml.merges"]},
    "no embeddings": {"drop_tensors": ["token_embd.weight"]},
    "no norm": {"drop_tensors": ["output_norm.weight"]},
    "no layers": {"overrides": {"llama.block_count": 0}},
    "10,000 layers": {"overrides": {"llama.block_count": 10_000}},
    "one layer too many": {"overrides": {"llama.block_count": 5}},
    "no width": {"drop_keys": ["llama.embedding_length"]},
    "no heads": {"overrides": {"llama.attention.head_count": 0}},
    "vocabulary of numbers": {"overrides": {"tokenizer.ggml.tokens": [1, 2, 3]}},
    "fewer tokens than embeddings": {"overrides": {"tokenizer.ggml.tokens": ["a", "b"]}},
    "no context length": {"drop_keys": ["llama.context_length"]},
    "a context length in words": {"overrides": {"llama.context_length": "long"}},
    "an end token outside": {"overrides": {"tokenizer.ggml.eos_token_id": 9_999_999}},
}
HARMLESS = {"an end token outside"}  # llama.cpp drops such an id with a warning


@pytest.mark.parametrize("name", BROKEN_TARGETS)
def test_a_target_that_is_not_whole(load: Load, tmp_path: Path, name: str) -> None:
    said = load(target=tiny.write_target(tmp_path / "target.gguf", **BROKEN_TARGETS[name]), n_ctx=256)
    if name in HARMLESS:
        assert said[0] == "fine"
    else:
        assert_refused(said, "ModelError", "target.gguf")


# --- sizes


def test_sizes_that_cannot_be(load: Load, target: Path) -> None:
    for options, words in (
        ({"n_ctx": 0}, ("n_ctx", "0")),
        ({"n_ctx": -5}, ("n_ctx", "-5")),
        ({"n_ctx": 2**24 + 1}, ("n_ctx", "16,777,217")),
        ({"n_ctx": 2**32 + 5}, ("n_ctx", "4,294,967,301")),
    ):
        assert_refused(load(target=target, **options), "OptionError", *words)


@pytest.mark.parametrize("n_threads", [0, -1, 513, 10**6])
def test_numbers_of_threads_that_cannot_be(load: Load, target: Path, n_threads: int) -> None:
    assert_refused(load(target=target, n_threads=n_threads), "OptionError", "n_threads", f"{n_threads:,}")


@pytest.mark.parametrize("n_ctx", [3, 4, 7, 16])
def test_a_tiny_context_ends_the_answer(load: Load, target: Path, tmp_path: Path, n_ctx: int) -> None:
    draft = tiny.write_drafter(tmp_path / "drafter.gguf", target)
    assert load(target=target, draft=draft, n_ctx=n_ctx) == ("fine", "context" if n_ctx < 6 else "length")


def test_a_context_smaller_than_the_prompt(load: Load, target: Path) -> None:
    assert_refused(load(target=target, n_ctx=2), "OptionError", "3 tokens", "-c")


@pytest.mark.parametrize("bend", [lambda ctx: ctx, lambda ctx: ctx * 3])
def test_a_context_beyond_the_training_length_is_the_users_choice(
    load: Load, target: Path, bend: Callable[[int], int]
) -> None:
    assert load(target=target, n_ctx=bend(4096)) == ("fine", "length")
