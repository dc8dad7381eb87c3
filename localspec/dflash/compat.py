"""Can these files work together? Checked on their headers, before llama.cpp would abort the process.

Each check raises ModelError (a file cannot take its role) or PairError (both can, but not together) with one
sentence. The facts are those of the llama.cpp in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import numpy as np

from localspec.dflash.format import MAX_BLOCK, MAX_LAYERS
from localspec.errors import ModelError, PairError
from localspec.llama.header import I64, Header

# What `load_arch_hparams` and `load_arch_tensors` of src/models/dflash.cpp ask for, as `dflash.KEY`.
NEEDED = ("context_length", "embedding_length", "attention.layer_norm_rms_epsilon")
NEEDED_BY_DFLASH2 = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
LONGEST_DRAFT = 32  # tokens, besides the anchor


def check_target(target: Header) -> None:
    """Refuse a file that is no text model llama.cpp can run."""
    if not target.arch:
        raise ModelError(f"{target.path} names no architecture (general.architecture); it is not a model.")
    if target.arch.startswith("dflash") or target.arch.endswith("dflash-draft"):
        raise ModelError(
            f"{target.name} is a drafter ({target.arch}), not a target; give the model with -m and this file with -md."
        )
    if target.n_vocab == 0:
        raise ModelError(f"{target.name} has no vocabulary (tokenizer.ggml.tokens); it cannot write text.")
    _check_layer_count(target)


def check_drafter(drafter: Header) -> None:
    """Refuse a file that is not a DFlash drafter llama.cpp can run."""
    if drafter.arch != "dflash":
        raise ModelError(_not_a_drafter(drafter))
    _check_layer_count(drafter)
    if "markov_w1.weight" in drafter.tensors or drafter.get("dflash.hyper_connection_count"):
        raise ModelError(
            f"{drafter.name} is a DSpark drafter (it has a Markov head); localspec runs DFlash 1 and DFlash 2 drafters."
        )
    layers = drafter.ints("dflash.target_layers")
    if not layers or len(set(layers)) < len(layers):
        found = f"reads the target layers {list(layers)}" if layers else "does not say which target layers it reads"
        raise ModelError(f"{drafter.name} {found} (dflash.target_layers); convert it again.")
    pool = drafter.number("dflash.selector_top_k")
    if pool and "selector_hidden.weight" not in drafter.tensors:
        raise ModelError(
            f"{drafter.name} claims a pool of {pool} candidates "
            "(dflash.selector_top_k) but has no selector_hidden.weight; convert it again."
        )
    n_slots = block_size(drafter)
    if not 2 <= n_slots <= MAX_BLOCK:
        raise ModelError(
            f"{drafter.name} has block size {n_slots} (dflash.block_size); localspec takes 2 to {MAX_BLOCK}."
        )
    mask = drafter.number("tokenizer.ggml.mask_token_id", -1)
    if not 0 <= mask < drafter.n_vocab:
        found = "no mask token" if mask == -1 else f"mask token {mask}"
        raise ModelError(
            f"{drafter.name} has {found} (tokenizer.ggml.mask_token_id) for its vocabulary of {drafter.n_vocab:,}; "
            "convert it again with the mask token of its config.json."
        )
    _check_keys(drafter)
    _check_heads(drafter)
    _check_reduced_vocabulary(drafter)


def check_pair(target: Header, drafter: Header) -> None:
    """Refuse two files that do not belong together."""
    n_target, n_drafter = target.number("{arch}.embedding_length"), drafter.number("dflash.embedding_length")
    if n_target != n_drafter:
        raise PairError(
            f"the drafter {drafter.name} reads hidden states of width {n_drafter}, the target {target.name} has width "
            f"{n_target}; it was made for another model."
        )
    n_layer = target.number("{arch}.block_count") - target.number("{arch}.nextn_predict_layers")  # none of MTP layers
    layers = drafter.ints("dflash.target_layers")
    if bad := [layer for layer in layers if not 0 <= layer < n_layer]:
        raise PairError(
            f"the drafter {drafter.name} reads layer {bad[0]} of its target, but {target.name} has layers 0 to "
            f"{n_layer - 1}; it was made for another model."
        )
    _check_vocabularies(target, drafter)


def draft_max(drafter: Header | None, n_ctx: int, *, recurrent: bool) -> int:
    """The longest draft one pass of the target verifies.

    A recurrent target keeps a copy of its state for every token it may have to take back, so it gets a block at most.
    """
    if drafter is None:
        return 0
    n_slots = block_size(drafter) - 1
    return n_slots if recurrent else max(n_slots, min(LONGEST_DRAFT, n_ctx // 4))


def block_size(drafter: Header) -> int:
    """Slots of a block, the anchor's included (llama.cpp's default where the file is silent)."""
    return drafter.number("dflash.block_size", 16)


def _not_a_drafter(drafter: Header) -> str:
    if "dflash" in drafter.arch:
        return (
            f"{drafter.name} has architecture {drafter.arch!r}, a fork's drafter format that llama.cpp does not load; "
            "look for a GGUF with architecture 'dflash'."
        )
    what = f"a {drafter.arch} model" if drafter.arch else "a GGUF file without architecture"
    return f"{drafter.name} is {what}, not a drafter (architecture 'dflash'); give the drafter with -md."


def _check_layer_count(header: Header) -> None:
    n = header.number("{arch}.block_count")
    if not 0 < n <= MAX_LAYERS:
        raise ModelError(
            f"{header.name} claims {n} layers ({header.arch}.block_count); llama.cpp takes 1 to {MAX_LAYERS}."
        )


def _check_keys(drafter: Header) -> None:
    is_dflash2 = "selector_hidden.weight" in drafter.tensors
    needed = NEEDED + (NEEDED_BY_DFLASH2 if is_dflash2 else ())
    if drafter.number("dflash.attention.sliding_window"):
        needed += ("attention.sliding_window_pattern",)
    if lacking := [f"dflash.{key}" for key in needed if drafter.get(f"dflash.{key}") in (None, 0)]:
        raise ModelError(f"{drafter.name} lacks {', '.join(lacking)}, without which it cannot run; convert it again.")
    if not is_dflash2:
        return
    width, group, k = (
        drafter.number(f"dflash.{key}") for key in ("embedding_length", "conv_group_size", "selector_top_k")
    )
    if width % group:
        raise ModelError(
            f"{drafter.name} has width {width}, which groups of {group} (dflash.conv_group_size) do not divide."
        )
    if width < k * (k + 1):
        raise ModelError(
            f"{drafter.name} has width {width}, but a pool of {k} candidates (dflash.selector_top_k) takes at least "
            f"{k * (k + 1)}."
        )


def _check_heads(drafter: Header) -> None:
    heads, kv_heads = (drafter.ints(f"dflash.attention.head_count{s}") for s in ("", "_kv"))
    if not heads or heads[0] < 1:
        raise ModelError(f"{drafter.name} names no attention heads (dflash.attention.head_count).")
    if kv_heads and (kv_heads[0] < 1 or heads[0] % kv_heads[0]):
        raise ModelError(
            f"{drafter.name} has {heads[0]} query heads for {kv_heads[0]} key-value heads, which does not divide."
        )
    key, value = (drafter.number(f"dflash.attention.{s}_length") for s in ("key", "value"))
    if key != value:
        raise ModelError(f"{drafter.name} has keys of {key} and values of {value} floats; they must be equal.")


def _check_reduced_vocabulary(drafter: Header) -> None:
    info = drafter.tensors.get("d2t")
    if info is None:
        return
    if info.type != I64 or len(info.shape) != 1:
        raise ModelError(f"{drafter.name} has a d2t table that is not a list of int64; convert it again.")
    if "output.weight" not in drafter.tensors:
        raise ModelError(f"{drafter.name} keeps {info.shape[0]} tokens (d2t) but has no output.weight for them.")
    ids = drafter.read_i64("d2t")
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= drafter.n_vocab:
        raise ModelError(
            f"{drafter.name} maps drafted tokens to ids {ids.min()} to {ids.max()} (d2t), its vocabulary has "
            f"{drafter.n_vocab:,}; convert it again."
        )
    k = drafter.number("dflash.selector_top_k")
    distinct = len(np.unique(ids))
    if distinct < len(ids) or len(ids) < max(k, 1):
        raise ModelError(
            f"{drafter.name} keeps {len(ids)} tokens, {distinct} of them distinct (d2t), for a pool of {max(k, 1)}; "
            "convert it again."
        )


def _check_vocabularies(target: Header, drafter: Header) -> None:
    if target.n_vocab != drafter.n_vocab:
        raise PairError(
            f"the drafter {drafter.name} has a vocabulary of {drafter.n_vocab:,} tokens, the target {target.name} "
            f"one of {target.n_vocab:,}; it was made for another model."
        )
    theirs, ours = target.strings["tokenizer.ggml.tokens"], drafter.strings["tokenizer.ggml.tokens"]
    if theirs[1] and ours[1] and theirs != ours:
        raise PairError(
            f"the drafter {drafter.name} and the target {target.name} both have {target.n_vocab:,} tokens, but not the "
            f"same ones (SHA-256 {ours[1][:12]} and {theirs[1][:12]}); it was made for another model."
        )
