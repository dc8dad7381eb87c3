"""What a drafter's file takes from its target: what it has to fit, the vocabulary, embeddings and head if need be.

The target is a GGUF file or the checkpoint it was made from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from localspec.compat import check_target
from localspec.convert.checkpoint import Checkpoint, Config, read_json
from localspec.convert.shard import Array
from localspec.errors import ModelError
from localspec.llama import read_header

BLOCK = 1 << 22  # values read at a time
TOKENS, MASK = "tokenizer.ggml.tokens", "tokenizer.ggml.mask_token_id"
EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
HEADS = ("lm_head.weight", "model.language_model.lm_head.weight")


@dataclass(frozen=True)
class Matrix:
    """A tensor on disk; `rows(start, stop)` reads part of it along its first axis."""

    shape: tuple[int, ...]
    rows: Callable[[int, int], Array]

    def parts(self) -> Iterator[Array]:
        step = max(1, BLOCK // max(1, int(np.prod(self.shape[1:]))))
        for start in range(0, self.shape[0], step):
            yield self.rows(start, min(start + step, self.shape[0]))


@dataclass(frozen=True)
class Source:
    """A target, as far as its drafters are concerned.

    `multiplier`: what its graph multiplies its embeddings by; llama.cpp hands drafters the bare table. `matrix` takes
    GGUF's names, "token_embd.weight" or "output.weight"; `add_vocabulary` writes the keys `tokenizer.*`.
    """

    path: Path
    name: str
    n_embd: int
    n_vocab: int
    n_layers: int
    has_mrope: bool
    multiplier: float
    add_vocabulary: Callable[[GGUFWriter], None]
    matrix: Callable[[str], Matrix]


def open_target(path: Path) -> Source:
    """Raises ModelError for anything but a model's GGUF file or checkpoint folder."""
    return _from_checkpoint(path) if path.is_dir() else _from_gguf(path)


def origin(path: Path) -> tuple[str, str] | None:
    """Repository and revision of a file or folder in the Hugging Face cache, None elsewhere."""
    parts = path.absolute().parts
    for name, above, revision in zip(parts, parts[1:], parts[2:], strict=False):
        if above == "snapshots" and name.startswith("models--"):
            return name.removeprefix("models--").replace("--", "/"), revision
    return None


def vocabulary_hash(tokens: Sequence[str]) -> str:
    """SHA-256 of the token texts as `llama.header` computes it, so that both can be compared."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(token.encode() + b"\0")
    return digest.hexdigest()


# --- GGUF


def _from_gguf(path: Path) -> Source:
    header = read_header(path, vocabulary=False)
    check_target(header)
    reader = GGUFReader(path)
    n_embd = header.number("{arch}.embedding_length")
    return Source(
        path,
        str(header.get("general.name", path.stem)),
        n_embd,
        header.n_vocab,
        header.number("{arch}.block_count") - header.number("{arch}.nextn_predict_layers"),
        any(header.ints("{arch}.rope.dimension_sections")),
        _multiplier(header.arch, n_embd),
        lambda writer: _copy_vocabulary(writer, reader),
        lambda name: _gguf_matrix(path, reader, name),
    )


def _multiplier(family: str, n_embd: int) -> float:
    """Gemma's models scale their embeddings in the graph, and their drafters were trained on scaled ones."""
    return n_embd**0.5 if family.startswith("gemma") else 1.0


def _copy_vocabulary(writer: GGUFWriter, reader: GGUFReader) -> None:
    for field in reader.fields.values():
        if field.name.startswith("tokenizer.") and field.name != MASK:
            is_array = field.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if is_array else None)


def _gguf_matrix(path: Path, reader: GGUFReader, name: str) -> Matrix:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tensor = tensors.get(name) or tensors.get("token_embd.weight")  # without a head of its own the table serves
    if tensor is None:
        raise ModelError(f"{path} has no token_embd.weight, which its drafter borrows; give the whole model.")
    shape = tuple(int(n) for n in reversed(tensor.shape))

    def rows(start: int, stop: int) -> Array:
        return gguf.quants.dequantize(tensor.data[start:stop], tensor.tensor_type)

    return Matrix(shape, rows)


# --- checkpoint


def _from_checkpoint(folder: Path) -> Source:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a checkpoint: it has no config.json; give the target's folder or its GGUF.")
    config = Config(read_json(folder / "config.json"), f"{folder.name}/config.json")
    text = config.section("text_config") if "text_config" in config else config
    family = str(text.get("model_type", ""))
    n_embd = text.whole("hidden_size")
    rope = text.section("rope_parameters" if "rope_parameters" in text else "rope_scaling")
    repository = origin(folder)
    return Source(
        folder,
        repository[0] if repository else folder.name,
        n_embd,
        text.whole("vocab_size"),
        text.whole("num_hidden_layers"),
        "mrope_section" in rope or family.startswith("qwen3_5"),
        _multiplier(family, n_embd),
        lambda writer: _make_vocabulary(writer, folder),
        lambda name: _checkpoint_matrix(folder, name, bool(text.get("tie_word_embeddings", False))),
    )


def _make_vocabulary(writer: GGUFWriter, folder: Path) -> None:
    raise NotImplementedError


def _checkpoint_matrix(folder: Path, name: str, tied: bool) -> Matrix:
    checkpoint = Checkpoint(folder)
    wanted = EMBEDDINGS if name == "token_embd.weight" or tied else HEADS
    found = next((theirs for theirs in wanted if theirs in checkpoint), None)
    if found is None:
        raise ModelError(f"{folder} has no {wanted[0]}, which its drafter borrows; give the target's GGUF instead.")
    return Matrix(checkpoint.shape(found), lambda start, stop: checkpoint.rows(found, start, stop))
