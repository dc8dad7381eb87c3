"""Writes a trained drafter as a checkpoint in the form of the published ones, which vLLM, SGLang and llama.cpp know."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.dflash.format import OWN, tensor_names
from localspec.distill.export import tensors
from localspec.distill.model import Drafter, DrafterConfig
from localspec.errors import OptionError


def write_hf(
    drafter: Drafter,
    folder: Path,
    *,
    target_name: str,
    n_ctx_train: int = 32768,
    n_target_layers: int | None = None,
) -> None:
    """Write config.json and model.safetensors (float32) into the new folder `folder`, whole or not at all.

    The drafter's head comes along as `lm_head.weight`; if it knows a part of the vocabulary only, `d2t` says which,
    as EAGLE 3 has it: the token of row i is i + d2t[i]. vLLM applies that to DFlash 1 drafters, not to DFlash 2: to
    serve one there, train it with the whole vocabulary.

    Args:
        target_name: the target's repository or name; `localspec convert drafter` keeps it.
        n_ctx_train: context length to declare.
        n_target_layers: how many layers the target has, if known.

    Raises:
        OptionError: `folder` exists, or cannot be written.
    """
    from safetensors.numpy import save_file

    if folder.exists():
        raise OptionError(f"{folder} exists; choose another folder, or remove it.")
    part = folder.with_name(folder.name + ".part")
    try:
        part.mkdir(parents=True)
        config = _config(drafter.config, target_name, n_ctx_train, n_target_layers)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(dict(_tensors(drafter)), part / "model.safetensors", metadata={"format": "pt"})
        part.rename(folder)
    except OSError as error:
        raise OptionError(f"cannot write {folder} ({error.strerror or error}); choose another place.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _config(config: DrafterConfig, target_name: str, n_ctx_train: int, n_target_layers: int | None) -> dict[str, Any]:
    """The keys of the published config.json files, in their order."""
    sliding = config.sliding_window is not None
    return {
        "architectures": ["DFlash2DraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "is_causal": False,
        "dflash_config": {
            "block_size": config.block_size,
            "conv_group_size": config.conv_group,
            "conv_kernel_size": config.conv_taps,
            "mask_token_id": config.mask_token,
            "selector_rank": config.selector_rank,
            "selector_top_k": config.top_k,
            # The layers whose output is read; GGUF counts by the input.
            "target_layer_ids": [layer - 1 for layer in config.target_layers],
        },
        "draft_vocab_size": config.n_rows if config.own_head else config.n_vocab,
        "dtype": "float32",
        "eos_token_id": None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.n_embd,
        "initializer_range": 0.02,
        "intermediate_size": config.n_ff,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * config.n_layers,
        "max_position_embeddings": n_ctx_train,
        "max_window_layers": config.n_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "num_key_value_heads": config.n_kv_heads,
        "num_target_layers": n_target_layers,
        "pad_token_id": None,
        "rms_norm_eps": config.rms_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "sliding_window": config.sliding_window,
        "target_name": target_name,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
        "vocab_size": config.n_vocab,
    }


def _tensors(drafter: Drafter) -> Iterator[tuple[str, NDArray[Any]]]:
    """What `export` puts into a GGUF file, under the names of checkpoints."""
    table = tensor_names(drafter.config.n_layers, dflash2=True) | OWN
    theirs = {ours: name for name, (ours, _) in table.items()}
    for name, array in tensors(drafter):
        if name == "d2t":
            yield name, array.astype(np.int64) - np.arange(len(array))
        else:
            yield theirs[name], np.ascontiguousarray(array)
