"""Checkpoints of drafters in every published form, tiny, and what llama.cpp's own converter makes of them.

As a script, with a llama.cpp source tree of commit 0c1e57098, torch and transformers installed:

    python tests/drafter_checkpoints.py PATH/TO/llama.cpp

writes drafter_checkpoints.json anew: for each form the keys, and each tensor's type, shape and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import torch
from safetensors.torch import save_file

from localspec.dflash.format import OWN, tensor_names
from localspec.distill.start import TargetFile

EXPECTED = Path(__file__).with_suffix(".json")
N_VOCAB, N_EMBD, N_ROWS = 320, 288, 100
MASK = tiny.token_id("<|mask|>")
SIZES = {"H": 288, "N": 576, "A": 4, "Q": 128, "K": 64, "D": 32, "F": 96, "V": 320, "O": 320, "2": 2, "T": 2}
SIZES |= {"C": 72, "R": 32}

# z-lab/Qwen3.8-27B-DFlash2, with smaller numbers
DFLASH_2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "is_causal": False,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": MASK,
        "selector_rank": 32,
        "selector_top_k": 16,
        "target_layer_ids": [0, 2],
    },
    "dtype": "bfloat16",
    "eos_token_id": 5,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": N_EMBD,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention"] * 2,
    "max_position_embeddings": 262144,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "pad_token_id": 5,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "transformers_version": "5.15.0",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": N_VOCAB,
}
# z-lab/Qwen3-8B-DFlash-b16
DFLASH_1: dict[str, Any] = {
    **{key: value for key, value in DFLASH_2.items() if key not in ("is_causal", "rope_parameters", "pad_token_id")},
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 3,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
    "layer_types": ["full_attention"] * 2,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "type": "yarn",
}


@dataclass(frozen=True)
class Form:
    """One form of checkpoint; `own` names the tensors of `OWN` it brings."""

    config: dict[str, Any]
    outtype: str = "f32"
    target: str = "llama"  # architecture
    own: tuple[str, ...] = ()
    sinks: bool = False
    mask_embedding: bool = False
    dtype: torch.dtype = field(default=torch.bfloat16)


FORMS = {
    "qwen3.8-dflash2": Form(DFLASH_2, target="qwen35", outtype="bf16"),
    "muse-dflash2": Form(
        DFLASH_2
        | {
            "dflash_config": DFLASH_2["dflash_config"]
            | {"block_size": 16, "final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404},
        },
        outtype="f16",
    ),
    "own-dflash2": Form(
        DFLASH_2
        | {"dflash_config": DFLASH_2["dflash_config"] | {"input_embedding_scale": 1.5}, "use_sliding_window": False}
        | {"layer_types": ["full_attention"] * 2, "sliding_window": None},
        own=("embed_tokens.weight", "lm_head.weight"),
        outtype="q8_0",
        dtype=torch.float32,
    ),
    "qwen3-dflash": Form(DFLASH_1 | {"tie_word_embeddings": True}, outtype="q8_0"),
    "causal-dflash": Form(DFLASH_1 | {"dflash_config": DFLASH_1["dflash_config"] | {"causal": True}}, outtype="f16"),
    "qwen3.6-dflash": Form(  # mixed layers, a window and no word on causality
        DFLASH_1
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 2048,
            "use_sliding_window": True,
            "final_logit_softcapping": 30.0,
        },
        outtype="f16",
        target="qwen35",
    ),
    "qwen3.5-dflash": Form(DFLASH_1 | {"rope_scaling": YARN}, target="qwen35", dtype=torch.float16),
    "mimo-dflash": Form(
        {key: value for key, value in DFLASH_1.items() if key not in ("layer_types", "use_sliding_window")}
        | {
            "dflash_config": DFLASH_1["dflash_config"]
            | {"num_anchors": 4096, "block_size": 8, "loss_decay_gamma": 7.0, "use_swa": True, "swa_window_size": 1024}
            | {"backbone_rotary_base": 5000000, "attention_value_scale": 0.612, "attention_sink_bias": True},
            "block_size": 8,
            "partial_rotary_factor": 0.5,
            "sliding_window": 1024,
            "v_head_dim": 32,
        },
        outtype="bf16",
        sinks=True,
        mask_embedding=True,
    ),
}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers from -0.5 to 0.5, the same on every machine."""
    n = np.arange(int(np.prod(shape)), dtype=np.int64)
    return torch.from_numpy(((n * 7919 + seed * 104729) % 10007 / 10007 - 0.5).astype(np.float32).reshape(shape))


def write_checkpoint(folder: Path, form: Form) -> Path:
    """Write the checkpoint of a form into the new folder `folder`."""
    dflash2 = form.config["architectures"] == ["DFlash2DraftModel"]
    table = tensor_names(2, dflash2=dflash2, sinks=form.sinks) | {name: OWN[name] for name in form.own}
    tensors = {
        name: values(tuple(SIZES[axis] for axis in axes.split()), seed).to(form.dtype)
        for seed, (name, (_, axes)) in enumerate(table.items())
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(form.config, indent=2))
    save_file(tensors, folder / "model.safetensors")
    if form.mask_embedding:
        state = {"mask_token_id": MASK, "embedding": values((N_EMBD,), 99).to(form.dtype)}
        torch.save(state, folder / "mask_embedding.pt")
    return folder


def contents(path: Path) -> dict[str, dict[str, Any]]:
    """What a drafter's file holds, its vocabulary aside."""
    reader = gguf.GGUFReader(path)
    keys = {
        name: [found.types[-1].name, found.contents()]
        for name, found in reader.fields.items()
        if not name.startswith(("GGUF.", "tokenizer.")) or name == "tokenizer.ggml.mask_token_id"
    }
    tensors = {
        tensor.name: [
            tensor.tensor_type.name,
            [int(n) for n in tensor.shape],
            hashlib.sha256(tensor.data.tobytes()).hexdigest()[:16],
        ]
        for tensor in reader.tensors
    }
    return {"keys": keys, "tensors": tensors}


# --- llama.cpp's side


def write_target_folder(folder: Path, arch: str) -> Path:
    """As much of a target's checkpoint as llama.cpp's converter reads for a drafter, with the tiny target's weights."""
    file = TargetFile(tiny.write_target(folder / "target.gguf", arch))
    config: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    if arch == "qwen35":
        config = {"text_config": config | {"rope_parameters": {"mrope_section": [3, 3, 2]}}}
    (folder / "config.json").write_text(json.dumps(config))
    found = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    tensors = {theirs: file.tensor(ours) for theirs, ours in found.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def run_llama_cpp(llama_cpp: Path) -> Callable[[Form, Path], Path]:
    """llama.cpp's converter with its vocabulary left out, as (form, working folder) -> file."""
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        del sys.modules[name]
    import gguf as theirs
    from conversion import get_model_class

    model_class: Any = get_model_class("DFlashDraftModel")
    model_class.set_vocab = lambda self: self.gguf_writer.add_mask_token_id(
        self.hparams["dflash_config"]["mask_token_id"]
    )
    types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}

    def convert(form: Form, folder: Path) -> Path:
        out = folder / "drafter.gguf"
        checkpoint = write_checkpoint(folder / "drafter", form)
        target = write_target_folder(folder, form.target)
        file_type = theirs.LlamaFileType[types[form.outtype]]
        with torch.inference_mode():
            model_class(checkpoint, file_type, out, target_model_dir=target).write()
        return out

    return convert


def main() -> None:
    convert = run_llama_cpp(Path(sys.argv[1]))
    expected = {}
    for name, form in FORMS.items():
        with tempfile.TemporaryDirectory() as folder:
            expected[name] = contents(convert(form, Path(folder)))
    EXPECTED.write_text(_lines(expected) + "\n")


def _lines(value: Any, depth: int = 3) -> str:
    """JSON with a line for each key and tensor."""
    if not depth:
        return json.dumps(value)
    inside = ",\n".join(f"{json.dumps(key)}: {_lines(inner, depth - 1)}" for key, inner in value.items())
    return f"{{\n{inside}\n}}"


if __name__ == "__main__":
    main()
