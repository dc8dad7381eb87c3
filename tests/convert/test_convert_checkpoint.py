"""Reading checkpoints: what is whole is read to the bit, what is not is refused in one sentence."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from localspec.convert.checkpoint import INDEX, Checkpoint, Config
from localspec.errors import ModelError

TENSORS = {
    "bf16": torch.randn(5, 7).bfloat16(),
    "f16": torch.randn(4, 3).half(),
    "f32": torch.randn(2, 3, 2),
    "f64": torch.randn(3).double(),
    "i64": torch.arange(6),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
    "bool": torch.tensor([True, False]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 7}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def header(folder: Path) -> dict[str, Any]:
    data = (folder / "model.safetensors").read_bytes()
    return dict(json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]]))


def write(folder: Path, header: object, n_data: int, name: str = "model.safetensors") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(n_data))


# ---- whole


def test_values_are_those_written(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.names()) == set(TENSORS)
    for name in ("bf16", "f16", "f32", "f64", "i64", "scalar", "empty"):
        found = checkpoint.tensor(name)
        assert found.dtype == (np.int64 if name == "i64" else np.float32)
        np.testing.assert_array_equal(found, TENSORS[name].to(torch.int64 if name == "i64" else torch.float32).numpy())
    assert checkpoint.dtype("bf16") == "BF16"
    assert checkpoint.left() == ["bool"]


def test_rows_and_blocks_are_parts_of_the_tensor(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    whole = checkpoint.tensor("bf16")
    np.testing.assert_array_equal(checkpoint.rows("bf16", 2, 4), whole[2:4])
    blocks = list(checkpoint.blocks("bf16", n_values=15))
    assert [len(block) for block in blocks] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(blocks), whole)


@pytest.mark.parametrize(
    ("dtypes", "precision"),
    [((torch.bfloat16,) * 2, "bf16"), ((torch.float16,) * 2, "f16"), ((torch.bfloat16, torch.float16), "f32")],
)
def test_precision_is_one_that_loses_nothing(folder: Path, dtypes: tuple[torch.dtype, ...], precision: str) -> None:
    matrices = {str(i): torch.zeros(2, 2, dtype=dtype) for i, dtype in enumerate(dtypes)}
    save_file(matrices | {"vector": torch.zeros(3)}, folder / "model.safetensors")
    assert Checkpoint(folder).precision() == precision


def test_shards_are_one_checkpoint(folder: Path) -> None:
    shard(folder)
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.names()) == {"a", "b"}
    np.testing.assert_array_equal(checkpoint.tensor("b"), np.ones((2, 2)))


def test_files_of_the_hugging_face_cache_are_links(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(folder / f"blob-{name[0]}")
        (folder / name).symlink_to(f"blob-{name[0]}")
    assert Checkpoint(folder).shape("bf16") == (5, 7)


def shard(folder: Path) -> dict[str, str]:
    (folder / "model.safetensors").unlink()
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for i, (name, file) in enumerate(weight_map.items()):
        save_file({name: torch.full((2, 2), float(i))}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


# ---- not whole

BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "header bomb": (lambda d: (d / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}"), "cut off"),
    "header too long": (
        lambda d: write(d, b"{" + b" " * 100_000_001 + b"}", 0),
        "header of 100,000,003 bytes, more than",
    ),
    "shorter than a length": (lambda d: (d / "model.safetensors").write_bytes(b"abc"), "cut off or no safetensors"),
    "truncated": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-1]),
        "cut off or has bytes to spare",
    ),
    "bytes to spare": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes() + b"x"),
        "cut off or has bytes to spare",
    ),
    "not JSON": (lambda d: write(d, b"{'a': 1}", 0), "its JSON cannot be read"),
    "not UTF-8": (lambda d: write(d, b'{"\xff": 1}', 0), "its JSON cannot be read"),
    "deep": (lambda d: write(d, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 0), "nested too deeply"),
    "a list": (lambda d: write(d, [1, 2], 0), "holds a list instead of"),
    "a name twice": (lambda d: write(d, b'{"a": {}, "a": {}}', 0), "a name comes twice"),
    "unknown dtype": (lambda d: write(d, entry(dtype="F12"), 4), "describes tensor 'a' as"),
    "negative shape": (lambda d: write(d, entry(shape=[-1, -1]), 4), "describes tensor 'a' as"),
    "float shape": (lambda d: write(d, entry(shape=[1.0]), 4), "describes tensor 'a' as"),
    "huge shape": (lambda d: write(d, entry(shape=[1 << 40, 1 << 40]), 4), "does not fill its place"),
    "backwards": (lambda d: write(d, entry(data_offsets=[4, 0]), 4), "does not fill its place"),
    "outside": (lambda d: write(d, entry(data_offsets=[1 << 62, (1 << 62) + 4]), 4), "does not fill its place"),
    "overlap": (lambda d: write(d, entry() | {"b": entry()["a"]}, 4), "does not fill its place"),
    "hole": (lambda d: write(d, entry() | {"b": entry(data_offsets=[8, 12])["a"]}, 12), "does not fill its place"),
    "no entry": (lambda d: write(d, {"a": 3}, 0), "describes tensor 'a' as 3"),
    "no config": (lambda d: (d / "config.json").unlink(), "is not a checkpoint: it has no config.json"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "holds a list"),
    "config is cut off": (lambda d: (d / "config.json").write_text('{"a": '), "its JSON cannot be read"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "it has no safetensors file"),
    "pickles": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "run code when they are read"),
    "two files": (
        lambda d: (d / "model.safetensors").rename(d / "a.safetensors") and save(d),
        "2 safetensors files but",
    ),
    "shard above": (lambda d: index(d, "../x.safetensors"), "no safetensors file beside it"),
    "absolute shard": (lambda d: index(d, "/etc/x.safetensors"), "no safetensors file beside it"),
    "shard of Windows": (lambda d: index(d, "..\\x.safetensors"), "no safetensors file beside it"),
    "shard on a drive": (lambda d: index(d, "c:x.safetensors"), "no safetensors file beside it"),
    "pickled shard": (lambda d: index(d, "model-1.bin"), "no safetensors file beside it"),
    "missing shard": (lambda d: index(d, "model-3.safetensors"), "lacks model-3.safetensors"),
    "a folder instead of a file": (
        lambda d: (d / "model.safetensors").unlink() or (d / "model.safetensors").mkdir(),
        "cannot read",
    ),
    "a file in a circle": (
        lambda d: (d / "model.safetensors").unlink() or (d / "model.safetensors").symlink_to(d / "model.safetensors"),
        "cannot read",
    ),
    "empty index": (lambda d: (d / INDEX).write_text("{}"), "has no weight_map"),
    "index knows more": (lambda d: index(d, "model-1.safetensors", "c"), "tensor 'c' is not in model-1"),
    "index knows less": (lambda d: shard(d) and forget(d, "b"), "is not in model.safetensors.index.json"),
}


def entry(**changes: object) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}


def save(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "b.safetensors")


def index(folder: Path, file: str, name: str = "a") -> None:
    weight_map = shard(folder) | {name: file}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def forget(folder: Path, name: str) -> None:
    save_file({"a": torch.zeros(1), name: torch.zeros(1)}, folder / "model-1.safetensors")


@pytest.mark.parametrize("what", BREAK)
def test_what_is_not_whole_is_refused_in_one_sentence(folder: Path, what: str) -> None:
    change, words = BREAK[what]
    change(folder)
    with pytest.raises(ModelError) as caught:
        Checkpoint(folder)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 600


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a checkpoint"):
        Checkpoint(tmp_path / "none")


def test_a_pickle_is_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(ModelError, match="Python pickles"):
        Checkpoint(folder)
    assert not (folder / "hacked").exists()


def test_a_missing_tensor_and_an_unreadable_one_are_named(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    with pytest.raises(ModelError, match="no tensor 'head'"):
        checkpoint.tensor("head")
    with pytest.raises(ModelError, match="holds BOOL tensors"):
        checkpoint.tensor("bool")


def test_a_file_that_shrinks_while_it_is_read(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(300)
    with pytest.raises(ModelError, match="became shorter"):
        [checkpoint.tensor(name) for name in ("f64", "i64", "f32", "bf16", "f16")]


# ---- config.json


def config(**values: object) -> Config:
    return Config(values, "config.json")


def test_config_remembers_what_was_asked_for() -> None:
    values = config(a=1, b=2.5, c="x", d=None, e=False, rope={"theta": 1, "odd": 2, "off": 0})
    assert (values.whole("a"), values.real("b"), values.get("d", 7)) == (1, 2.5, 7)
    assert values.section("rope").whole("theta") == 1
    assert values.left() == ["c", "rope.odd"]
    assert values.left({"c", "odd"}) == []
    assert "d" not in values


@pytest.mark.parametrize("value", [1.5, "1", True, -1, 1 << 31, [1]])
def test_whole_numbers(value: object) -> None:
    with pytest.raises(ModelError, match="as 'n'; a whole number belongs there"):
        config(n=value).whole("n")


@pytest.mark.parametrize("value", ["1", True, float("nan"), float("inf"), 1e39, {}])
def test_numbers(value: object) -> None:
    with pytest.raises(ModelError, match="as 'x'; a number belongs there"):
        config(x=value).real("x")


def test_other_values() -> None:
    with pytest.raises(ModelError, match="has no 'n', which is needed"):
        config().whole("n")
    with pytest.raises(ModelError, match="an object belongs there"):
        config(rope=3).section("rope")
    with pytest.raises(ModelError, match=r"'gelu' as 'act'; llama\.cpp's graph only does 'silu'"):
        config(act="gelu").only("act", "silu")
    config().only("act", "silu")
