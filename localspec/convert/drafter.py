"""A DFlash drafter's checkpoint -> GGUF, with the names that llama.cpp's `dflash` architecture reads.

Checkpoints of `DFlashDraftModel` and `DFlash2DraftModel`. `drafter_keys` reads their config.json,
`drafter_tensors` their weights; what a drafter takes from its target comes from `drafter_target`.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from gguf import GGUFWriter

from localspec.convert.checkpoint import Checkpoint, origin
from localspec.convert.drafter_keys import IGNORED, Shape, keys_of
from localspec.convert.drafter_target import MASK, TOKENS, Source, open_target, vocabulary_hash
from localspec.convert.drafter_tensors import Tensors
from localspec.convert.target import add_metadata, value_type
from localspec.convert.writer import Report, check_options, write
from localspec.dflash.format import Keys
from localspec.errors import ModelError, PairError

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")


def convert(
    folder: Path,
    out: Path,
    *,
    target: Path,
    outtype: str | None = None,
    force: bool = False,
    progress: Report | None = None,
) -> None:
    """Convert the drafter's checkpoint in `folder` to `out`, whole or not at all.

    Args:
        target: the target's checkpoint folder or GGUF, for the vocabulary and all that the drafter has to fit.
        outtype: one of `writer.OUTTYPES`; by default the checkpoint's own precision.
        force: overwrite `out`.

    Raises:
        ModelError: `folder` is no DFlash checkpoint, is damaged, or has a tensor or key that is not accounted for.
        PairError: drafter and target are not for each other.
        OptionError: unknown `outtype`, or `out` exists or cannot be written.
    """
    check_options(out, "f32" if outtype is None else outtype, force=force)
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    shape = Shape.read(config, dflash2=_is_dflash2(checkpoint))
    source = open_target(target)
    _check_pair(checkpoint, shape, source)
    tensors = Tensors(checkpoint, shape, source)
    scale = 1.0 if "embed_tokens.weight" in tensors.place else source.multiplier
    keys = keys_of(config, shape, mrope=source.has_mrope, embedding_scale=scale) | _provenance(checkpoint, source)
    if left := config.left(IGNORED):
        raise ModelError(
            f"{config.name} has {left[0]!r}, which has no place in a drafter's GGUF; remove it if it means nothing."
        )

    writer, listed = GGUFWriter(None, "dflash"), list(tensors)
    add_metadata(writer, folder, listed)
    source.add_vocabulary(writer)
    tokens = writer.kv_data[0][TOKENS].value
    keys |= {"localspec.tokenizer_sha256": vocabulary_hash(tokens), MASK: shape.mask_token}
    for name, value in keys.items():
        writer.add_key_value(name, value, value_type(value))
    precision = checkpoint.precision()
    write(writer, listed, out, outtype=outtype or precision, precision=precision, force=force, progress=progress)


def _is_dflash2(checkpoint: Checkpoint) -> bool:
    found = checkpoint.config.get("architectures", [])
    if found not in [[name] for name in ARCHITECTURES]:
        what = ", ".join(map(str, found)) if isinstance(found, list) and found else "a model without architecture"
        raise ModelError(
            f"{checkpoint.folder} holds {what}, not a drafter ({' or '.join(ARCHITECTURES)}); llama.cpp's own "
            "convert_hf_to_gguf.py, run with --target-model-dir, may know it."
        )
    return bool(found == [ARCHITECTURES[1]])


def _check_pair(checkpoint: Checkpoint, shape: Shape, source: Source) -> None:
    """PairError where the two cannot work together: the rules of `compat.check_pair`, before anything is made."""
    n_layers = checkpoint.config.whole("num_target_layers", source.n_layers)
    last = max(shape.target_layers)  # counted as llama.cpp does, by what a layer takes in
    rules = [
        (shape.n_embd == source.n_embd, f"reads hidden states of width {shape.n_embd}", f"has width {source.n_embd}"),
        (shape.n_vocab == source.n_vocab, f"has {shape.n_vocab:,} tokens", f"has {source.n_vocab:,}"),
        (n_layers == source.n_layers, f"is for a target of {n_layers} layers", f"has {source.n_layers}"),
        (last < source.n_layers, f"reads layer {last - 1}", f"shows its layers 0 to {source.n_layers - 2}"),
    ]
    for holds, ours, theirs in rules:
        if not holds:
            raise PairError(
                f"the drafter in {checkpoint.folder} {ours}, the target {source.name} {theirs}; it was made for "
                "another model."
            )


def _provenance(checkpoint: Checkpoint, source: Source) -> Keys:
    """Whose drafter this is."""
    ours, theirs = origin(checkpoint.folder), origin(source.path)
    dflash = checkpoint.config.section("dflash_config")
    dflash.only("thinking", None, True, False, "on", "off")
    thinking = dflash.get("thinking", None)
    keys = {
        "localspec.version": version("localspec"),
        "localspec.target_name": checkpoint.config.get("target_name", source.name),
        **_repository("source", ours),
        **_repository("target", theirs),
        "localspec.thinking": {True: "on", False: "off"}.get(thinking, thinking),
    }
    return {name: str(value) for name, value in keys.items() if value is not None}


def _repository(whose: str, where: tuple[str, str] | None) -> dict[str, str]:
    return {f"localspec.{whose}_repo": where[0], f"localspec.{whose}_revision": where[1]} if where else {}
