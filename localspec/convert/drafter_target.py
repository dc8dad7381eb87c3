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
from gguf import GGUFValueType, GGUFWriter

from localspec.convert.checkpoint import Checkpoint, Config, origin, read_json
from localspec.convert.families import FAMILIES
from localspec.convert.shard import Array
from localspec.convert.tokenizer import add_vocabulary
from localspec.dflash.compat import check_target
from localspec.errors import ModelError
from localspec.llama import Header, read_header, read_typed

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


def vocabulary_hash(tokens: Sequence[str | bytes]) -> str:
    """SHA-256 of the token texts as `llama.header` computes it, so that both can be compared."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update((token if isinstance(token, bytes) else token.encode()) + b"\0")
    return digest.hexdigest()


# --- GGUF


def _from_gguf(path: Path) -> Source:
    header = read_header(path)
    check_target(header)
    n_embd = header.number("{arch}.embedding_length")
    return Source(
        path,
        str(header.get("general.name", path.stem)),
        n_embd,
        header.n_vocab,
        header.number("{arch}.block_count") - header.number("{arch}.nextn_predict_layers"),
        any(header.ints("{arch}.rope.dimension_sections")),
        _multiplier(header.arch, n_embd),
        lambda writer: _copy_vocabulary(writer, path),
        lambda name: _gguf_matrix(header, name),
    )


def _multiplier(family: str, n_embd: int) -> float:
    """Gemma's models scale their embeddings in the graph, and their drafters were trained on scaled ones."""
    return n_embd**0.5 if family.startswith("gemma") else 1.0


def _copy_vocabulary(writer: GGUFWriter, path: Path) -> None:
    for name, kind, element, value in read_typed(path, "tokenizer."):
        if name != MASK and value != []:
            sub_type = None if element is None else GGUFValueType(element)
            writer.add_key_value(name, value, GGUFValueType(kind), sub_type)


def _gguf_matrix(header: Header, name: str) -> Matrix:
    info = header.tensors.get(name) or header.tensors.get("token_embd.weight")  # which is the head if there is none
    if info is None or len(info.shape) != 2:
        raise ModelError(f"{header.path} has no token_embd.weight, which its drafter borrows; give the whole model.")
    n_rows, n_bytes = info.shape[1], info.n_bytes // info.shape[1]

    def rows(start: int, stop: int) -> Array:
        data = np.fromfile(header.path, np.uint8, (stop - start) * n_bytes, offset=info.offset + start * n_bytes)
        return gguf.quants.dequantize(data.reshape(stop - start, n_bytes), gguf.GGMLQuantizationType(info.type))

    try:
        rows(0, 1)
    except NotImplementedError as error:
        kind = gguf.GGMLQuantizationType(info.type).name
        raise ModelError(f"{header.path} keeps what its drafter borrows as {kind}; give a target in Q8_0.") from error
    return Matrix((n_rows, info.shape[0]), rows)


# --- checkpoint


def _from_checkpoint(folder: Path) -> Source:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a checkpoint: it has no config.json; give the target's folder or its GGUF.")
    config = Config(read_json(folder / "config.json"), f"{folder.name}/config.json")
    text = config.section("text_config") if "text_config" in config else config
    kind = str(text.get("model_type", ""))
    n_embd, n_vocab = text.whole("hidden_size"), text.whole("vocab_size")
    found = config.get("architectures", [])
    family = next((FAMILIES[name] for name in FAMILIES if found == [name]), None)
    rope = text.section("rope_parameters" if "rope_parameters" in text else "rope_scaling")
    tied = any(part.get("tie_word_embeddings", False) is True for part in (config, text))
    repository = origin(folder)
    return Source(
        folder,
        repository[0] if repository else folder.name,
        n_embd,
        n_vocab,
        text.whole("num_hidden_layers"),
        "mrope_section" in rope or kind.startswith("qwen3_5"),
        _multiplier(kind, n_embd),
        lambda writer: _make_vocabulary(writer, folder, n_vocab, family.arch if family else ""),
        lambda name: _checkpoint_matrix(folder, name, tied),
    )


def _make_vocabulary(writer: GGUFWriter, folder: Path, n_vocab: int, arch: str) -> None:
    try:
        add_vocabulary(writer, folder, n_vocab, arch=arch)
    except ModelError as error:
        raise ModelError(
            f"{str(error).rstrip('.')}; the target's GGUF, given with --target, would do as well."
        ) from error


def _checkpoint_matrix(folder: Path, name: str, tied: bool) -> Matrix:
    checkpoint = Checkpoint(folder)
    wanted = EMBEDDINGS if name == "token_embd.weight" or tied else HEADS
    found = next((theirs for theirs in wanted if theirs in checkpoint), None)
    if found is None:
        raise ModelError(f"{folder} has no {wanted[0]}, which its drafter borrows; give the target's GGUF instead.")
    return Matrix(checkpoint.shape(found), lambda start, stop: checkpoint.rows(found, start, stop))
