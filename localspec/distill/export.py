"""Writes a trained drafter as GGUF, with the names llama.cpp's `dflash` architecture reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from torch import Tensor, nn

from localspec.convert.target import value_type
from localspec.dflash.format import ARCH, size_keys
from localspec.distill.model import BlockConv, Drafter, DrafterConfig
from localspec.distill.windows import answer_counts
from localspec.errors import OptionError
from localspec.storage import replacing

if TYPE_CHECKING:
    from localspec.distill.start import TargetFile
    from localspec.distill.store import Data
    from localspec.distill.train import Trained

ENCODINGS = {
    "f32": (GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q5_0": (GGMLQuantizationType.Q5_0, gguf.LlamaFileType.MOSTLY_Q5_0),
    "q4_1": (GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
COARSER = ("q4_0", "q4_1", "q5_0")  # than q8_0, smallest first

Provenance = Mapping[str, str | int | float | Sequence[float]]


def export(
    drafter: Drafter,
    target: Path,
    path: Path,
    *,
    encoding: str = "q8_0",
    name: str = "DFlash 2 drafter",
    n_ctx_train: int | None = None,
    provenance: Provenance | None = None,
) -> None:
    """Write `drafter` to `path`, whole or not at all.

    Args:
        drafter: the trained model.
        target: the target's GGUF; its tokenizer is copied, so that llama.cpp can compare.
        encoding: of the matrices, one of `ENCODINGS`; norms and convolution bases are float32, and a matrix whose
            rows no block of the encoding divides is float16.
        n_ctx_train: context length to declare; default: the target's.
        provenance: where the weights come from and what they are good for; written as `localspec.<key>`, a sequence
            as an array of float32.

    Raises:
        OptionError: unknown encoding.
    """
    if encoding not in ENCODINGS:
        raise OptionError(f"Encoding {encoding!r} is not one of {', '.join(ENCODINGS)}.")
    reader = GGUFReader(target)
    with replacing(path) as part:
        writer = GGUFWriter(part, ARCH)
        writer.add_name(name)
        writer.add_file_type(ENCODINGS[encoding][1])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_shape(writer, drafter.config, n_ctx_train or _context_length(reader))
        for key, value in (provenance or {}).items():
            if isinstance(value, (str, int, float)):
                writer.add_key_value(f"localspec.{key}", value, _value_type(value))
            else:
                writer.add_array(f"localspec.{key}", [float(x) for x in value])
        _copy_tokenizer(writer, reader, drafter.config.mask_token)
        for tensor_name, array in tensors(drafter):
            _add_tensor(writer, tensor_name, array, ENCODINGS[encoding][0])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def provenance(trained: Trained, data: Data, target: TargetFile) -> dict[str, Any]:
    """Who a drafter was trained for, on what and how far; what `export` writes into its GGUF.

    Acceptance lengths are those on held-out chats in torch. `calibration` holds a temperature per slot: the pool's
    scores divided by it are the log-odds of its candidates.
    """
    facts: dict[str, Any] = {
        "version": version("localspec"),
        "target_name": data.meta.target,
        "target_sha256": data.meta.target_sha256,
        "tokenizer_sha256": target.tokenizer_sha256(),
        "chat_mode": _chat_mode(data, target),
        "data_tokens": len(data.tokens),
        "data_chats": len(data.chats),
        "training_steps": trained.step,
        "training_anchors": trained.n_anchors,
        "training_seconds": round(trained.elapsed_s),
    }
    for text, figures in trained.figures.items():
        facts[f"acceptance_length.{text}"] = figures["acceptance_length"]
    return facts | {"calibration": trained.calibration}


def _chat_mode(data: Data, target: TargetFile) -> str:
    """How the target spoke in training: "plain" text, "chat", or "thinking" before it answered a chat."""
    if "tokenizer.chat_template" not in target.reader.fields:
        return "plain"
    if "</think>" not in target.tokens:
        return "chat"
    n_thoughts = answer_counts(data, data.chats)[target.tokens.index("</think>")]
    return "thinking" if 2 * n_thoughts > len(data.chats) else "chat"


def tensors(drafter: Drafter) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    """Every tensor under its GGUF name, as a numpy array (dimensions reversed to ggml's `ne`)."""
    if drafter.config.own_head:
        yield "output.weight", _numpy(drafter.head.weight)
        if drafter.config.n_rows < drafter.config.n_vocab:
            yield "d2t", drafter.kept.numpy().astype(np.int64)
    yield "fc.weight", _numpy(drafter.fc.weight * drafter.feature_scale)
    yield "enc.output_norm.weight", _numpy(drafter.context_norm.weight)
    yield "output_norm.weight", _numpy(drafter.output_norm.weight)
    yield "selector_hidden.weight", _numpy(drafter.selector.hidden.weight)
    predecessor = _numpy(drafter.selector.predecessor)
    yield "selector_predecessor.weight", predecessor[drafter.row_of.numpy()]
    successor = _numpy(drafter.selector.successor)
    unused = np.zeros_like(successor[:1])
    yield "selector_successor.weight", np.concatenate((successor, unused))[drafter.row_of.numpy()]
    for i, layer in enumerate(drafter.layers):
        for short, module in _layer_modules(layer):
            if isinstance(module, BlockConv):
                yield f"blk.{i}.{short}_base", _numpy(module.base)
                yield f"blk.{i}.{short}_proj.weight", _numpy(module.proj.weight)
            else:
                yield f"blk.{i}.{short}.weight", _numpy(module.weight)


def _layer_modules(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    names = {
        "attn_norm": "attn_norm",
        "attn_conv": "attn_conv",
        "attn_q": "attn.q",
        "attn_k": "attn.k",
        "attn_v": "attn.v",
        "attn_output": "attn.o",
        "attn_q_norm": "attn.q_norm",
        "attn_k_norm": "attn.k_norm",
        "ffn_norm": "ffn_norm",
        "ffn_conv": "ffn_conv",
        "ffn_gate": "gate",
        "ffn_up": "up",
        "ffn_down": "down",
    }
    for short, attribute in names.items():
        yield short, layer.get_submodule(attribute)


def _numpy(weight: Tensor) -> npt.NDArray[np.float32]:
    return weight.detach().float().cpu().numpy()


def _add_tensor(writer: GGUFWriter, name: str, array: npt.NDArray[np.generic], qtype: GGMLQuantizationType) -> None:
    if name == "d2t":
        writer.add_tensor(name, array)
        return
    if array.ndim != 2:
        qtype = GGMLQuantizationType.F32
    elif array.shape[1] % gguf.GGML_QUANT_SIZES[qtype][0]:
        qtype = GGMLQuantizationType.F16
    writer.add_tensor(name, gguf.quants.quantize(array, qtype), raw_dtype=qtype)


def _add_shape(writer: GGUFWriter, config: DrafterConfig, n_ctx_train: int) -> None:
    keys = size_keys(config, n_ctx_train=n_ctx_train, dflash2=True)
    keys |= {"rope.dimension_count": config.head_dim, "rope.freq_base": config.rope_theta}
    keys |= {"attention.layer_norm_rms_epsilon": config.rms_eps, "attention.causal": False}
    if config.sliding_window is not None:
        keys["attention.sliding_window"] = config.sliding_window
        keys["attention.sliding_window_pattern"] = [True] * config.n_layers
    for name, value in keys.items():
        writer.add_key_value(f"{ARCH}.{name}", value, value_type(value))


def _copy_tokenizer(writer: GGUFWriter, reader: GGUFReader, mask_token: int) -> None:
    for field in reader.fields.values():
        if not field.name.startswith("tokenizer.") or field.name == "tokenizer.chat_template":
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(field.name, field.contents())
        else:
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_mask_token_id(mask_token)


def _context_length(reader: GGUFReader) -> int:
    architecture = reader.fields["general.architecture"].contents()
    return int(reader.fields[f"{architecture}.context_length"].contents())


def _value_type(value: str | int | float) -> GGUFValueType:
    if isinstance(value, str):
        return GGUFValueType.STRING
    return GGUFValueType.UINT64 if isinstance(value, int) else GGUFValueType.FLOAT32
