"""The DFlash format: one table of keys, tensors and shapes, for whoever reads or writes a drafter's file.

Keys and tensors are those that `load_arch_hparams` and `load_arch_tensors` of llama.cpp's src/models/dflash.cpp ask
for; checkpoint names are those of the published Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

ARCH = "dflash"
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_BLOCK = 128  # published drafters have 8 to 16 slots; a verify of a whole block must fit one batch

Keys = dict[str, bool | int | float | str | list[int] | list[bool]]


class Sizes(Protocol):
    """The sizes of a drafter; `conv_group` and what follows are those of DFlash 2."""

    @property
    def n_embd(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def n_ff(self) -> int: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def target_layers(self) -> Sequence[int]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def conv_taps(self) -> int: ...
    @property
    def conv_group(self) -> int: ...
    @property
    def selector_rank(self) -> int: ...
    @property
    def top_k(self) -> int: ...


def size_keys(sizes: Sizes, *, n_ctx_train: int, dflash2: bool) -> Keys:
    """The keys of a drafter's sizes, without their prefix `dflash.`."""
    keys: Keys = {
        "context_length": n_ctx_train,
        "embedding_length": sizes.n_embd,
        "block_count": sizes.n_layers,
        "feed_forward_length": sizes.n_ff,
        "attention.head_count": sizes.n_heads,
        "attention.head_count_kv": sizes.n_kv_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "block_size": sizes.block_size,
        "target_layers": list(sizes.target_layers),
    }
    selector: Keys = {
        "conv_kernel_size": sizes.conv_taps,
        "conv_group_size": sizes.conv_group,
        "selector_rank": sizes.selector_rank,
        "selector_top_k": sizes.top_k,
    }
    return keys | selector if dflash2 else keys


def axes(sizes: Sizes) -> dict[str, int]:
    """What the letters of the shapes below stand for."""
    return {
        "H": sizes.n_embd,
        "N": sizes.n_embd * len(sizes.target_layers),
        "A": sizes.n_heads,
        "Q": sizes.n_heads * sizes.head_dim,
        "K": sizes.n_kv_heads * sizes.head_dim,
        "D": sizes.head_dim,
        "F": sizes.n_ff,
        "V": sizes.n_vocab,
        "O": sizes.n_rows,
        "2": 2,
        "T": sizes.conv_taps,
        "C": 2 * sizes.conv_taps * sizes.n_embd // max(sizes.conv_group, 1),
        "R": sizes.selector_rank,
    }


# Checkpoint name -> (GGUF name, shape); the letters are those of `axes`.
Table = dict[str, tuple[str, str]]
BACKBONE: Table = {
    "fc.weight": ("fc.weight", "H N"),
    "hidden_norm.weight": ("enc.output_norm.weight", "H"),
    "norm.weight": ("output_norm.weight", "H"),
}
LAYER: Table = {
    "input_layernorm.weight": ("attn_norm.weight", "H"),
    "self_attn.q_proj.weight": ("attn_q.weight", "Q H"),
    "self_attn.k_proj.weight": ("attn_k.weight", "K H"),
    "self_attn.v_proj.weight": ("attn_v.weight", "K H"),
    "self_attn.o_proj.weight": ("attn_output.weight", "H Q"),
    "self_attn.q_norm.weight": ("attn_q_norm.weight", "D"),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", "D"),
    "post_attention_layernorm.weight": ("ffn_norm.weight", "H"),
    "mlp.gate_proj.weight": ("ffn_gate.weight", "F H"),
    "mlp.up_proj.weight": ("ffn_up.weight", "F H"),
    "mlp.down_proj.weight": ("ffn_down.weight", "H F"),
}
SINKS: Table = {"self_attn.attention_sink_bias": ("attn_sinks.weight", "A")}
CONVOLUTIONS: Table = {
    "attention_conv.base_kernel": ("attn_conv_base", "2 T H"),
    "attention_conv.kernel_projection.weight": ("attn_conv_proj.weight", "C H"),
    "mlp_conv.base_kernel": ("ffn_conv_base", "2 T H"),
    "mlp_conv.kernel_projection.weight": ("ffn_conv_proj.weight", "C H"),
}
SELECTOR: Table = {
    "candidate_selector.predecessor_codebook": ("selector_predecessor.weight", "V R"),
    "candidate_selector.successor_codebook": ("selector_successor.weight", "V R"),
    "candidate_selector.hidden_projection.weight": ("selector_hidden.weight", "R H"),
}
OWN: Table = {  # what a drafter may bring instead of borrowing it
    "embed_tokens.weight": ("token_embd.weight", "V H"),
    "lm_head.weight": ("output.weight", "O H"),
    "d2t": ("d2t", "O"),
}


def tensor_names(n_layers: int, *, dflash2: bool, sinks: bool = False) -> Table:
    """The tensors every checkpoint has: checkpoint name -> (GGUF name, shape)."""
    layer = LAYER | (CONVOLUTIONS if dflash2 else {}) | (SINKS if sinks else {})
    table = BACKBONE | (SELECTOR if dflash2 else {})
    for i in range(n_layers):
        table |= {f"layers.{i}.{theirs}": (f"blk.{i}.{ours}", axes) for theirs, (ours, axes) in layer.items()}
    return table
