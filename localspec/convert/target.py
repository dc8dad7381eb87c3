"""A target's checkpoint as GGUF."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType, GGUFWriter

from localspec.convert.checkpoint import Checkpoint, origin
from localspec.convert.families import FAMILIES, IGNORED, family_of
from localspec.convert.foreign import convert_with_llama_cpp
from localspec.convert.tokenizer import add_vocabulary
from localspec.convert.writer import Report, Tensor, check_options, write
from localspec.errors import ModelError


def convert(
    folder: Path,
    out: Path,
    *,
    outtype: str | None = None,
    force: bool = False,
    progress: Report | None = None,
    llama_cpp: Path | None = None,
) -> None:
    """Write the model in `folder` (config.json, tokenizer.json, safetensors) to the GGUF file `out`.

    `outtype` is one of `writer.OUTTYPES`, by default the checkpoint's own precision. `llama_cpp`: a folder with
    llama.cpp's source, whose converter is run instead. Raises ModelError for a checkpoint that is damaged, unknown, or
    has anything that would be lost; OptionError as `write` does.
    """
    check_options(out, "f32" if outtype is None else outtype, force=force)
    checkpoint = Checkpoint(folder)
    architecture, precision = _architecture(checkpoint), checkpoint.precision()
    outtype = outtype or precision
    if llama_cpp is not None:
        convert_with_llama_cpp(llama_cpp, folder, out, outtype=outtype, precision=precision, progress=progress)
        return
    if architecture.startswith("DFlash"):
        raise ModelError(f"{folder} is a drafter ({architecture}); use localspec convert drafter, with its --target.")
    if architecture not in FAMILIES:
        raise ModelError(
            f"{folder} is a {architecture}; localspec converts {', '.join(FAMILIES)}; for others let llama.cpp's own "
            "convert_hf_to_gguf.py do it: --llama-cpp DIR, the folder of llama.cpp's source that holds it."
        )
    for name in ("metadata", "gguf.vocab"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what matters of their warnings is an error here
    family = family_of(checkpoint, architecture)
    writer, tensors = GGUFWriter(None, family.arch), family.tensors()
    add_metadata(writer, folder, tensors)
    for key, value in family.keys().items():
        writer.add_key_value(f"{family.arch}.{key}", value, value_type(value))
    add_vocabulary(writer, folder, family.n_vocab, arch=family.arch)
    _check_left(checkpoint)
    write(writer, tensors, out, outtype=outtype, precision=precision, force=force, progress=progress)


def _architecture(checkpoint: Checkpoint) -> str:
    names = checkpoint.config.get("architectures", [])
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"{checkpoint.config.name} names no architecture ('architectures' is {names!r}).")
    return names[0]


def _check_left(checkpoint: Checkpoint) -> None:
    """Nothing of the checkpoint may be lost unnoticed."""
    if keys := checkpoint.config.left(IGNORED):
        raise ModelError(
            f"{checkpoint.config.name} has {keys[0]!r} ({len(keys)} such keys), which localspec does not know; "
            "remove it there if it changes nothing of what the model computes."
        )
    if names := checkpoint.left():
        raise ModelError(
            f"{checkpoint.folder} has {len(names)} tensors that no {_architecture(checkpoint)} has, {names[0]!r} among "
            "them; the model would not be the same without."
        )


def add_metadata(writer: GGUFWriter, folder: Path, tensors: list[Tensor]) -> None:
    """Name, licence, base model and sampling advice from README.md, generation_config.json and the folder's name."""
    counts, folder = [math.prod(tensor.shape) for tensor in tensors], folder.absolute()
    try:
        cached = origin(folder)  # there the folder's name is but a revision
        metadata = gguf.Metadata.load(None, folder, cached and cached[0].partition("/")[2], sum(counts))
        metadata.name = metadata.name or folder.name
        experts = [(n, t.shape[0]) for n, t in zip(counts, tensors, strict=True) if "_exps." in t.name]
        if metadata.size_label is None:
            one = sum(n // n_expert for n, n_expert in experts)
            shared = sum(counts) - sum(n for n, _ in experts)
            metadata.size_label = gguf.size_label(sum(counts), shared, one, experts[0][1] if experts else 0)
        writer.add_type(gguf.GGUFType.MODEL)
        metadata.set_gguf_meta_model(writer)
    except Exception as error:  # gguf takes README.md as it comes
        reason = " ".join(str(error).split())
        raise ModelError(f"the head of {folder / 'README.md'} cannot be read ({reason}); mend or remove it.") from error


def value_type(value: Any) -> GGUFValueType:
    """llama.cpp reads counts as unsigned; the package would guess signed."""
    if isinstance(value, int) and not isinstance(value, bool):
        return GGUFValueType.UINT32
    return GGUFValueType.get_type(value)
