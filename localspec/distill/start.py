"""A drafter to start training from: shapes, vocabulary and first weights, out of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, TokenType
from torch import Tensor

from localspec.distill.model import Drafter, DrafterConfig, Layer
from localspec.distill.store import Data
from localspec.distill.windows import Ints, answer_counts, feature_rms, split
from localspec.errors import ModelError, OptionError
from localspec.llama import read_header


@dataclass(frozen=True)
class Shape:
    """What a drafter is made of; the rest is the target's (width, heads, feed-forward, rotation)."""

    n_layers: int = 2
    block_size: int = 8
    n_rows: int = 8192  # tokens it can draft
    n_tapped: int | None = None  # layers it reads, of those collected; None: all
    selector_rank: int = 64
    top_k: int = 16
    conv_group: int = 16
    conv: bool = True  # False: the convolutions stay the identity
    own_head: bool = True  # False: share the target's, which llama.cpp then reads from the target's file
    copy_layers: bool = True  # start from the target's last layers, else from random ones


# Weights of these store the query and key rows of a head for interleaved RoPE.
INTERLEAVED_ROPE = frozenset({"llama"})
END_OF_GENERATION = frozenset(
    """<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <end_of_turn> <|end|>
    <|return|> <|call|> </s> <EOT> <|endofturn|>""".split()  # noqa: SIM905
)


class TargetFile:
    """What training needs of the target's GGUF."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = GGUFReader(path)
        self.architecture = str(self.reader.fields["general.architecture"].contents())
        self.tokens: list[str] = self.reader.fields["tokenizer.ggml.tokens"].contents()
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def number(self, key: str, default: float | None = None) -> float:
        """The value of `<architecture>.<key>`."""
        field = self.reader.fields.get(f"{self.architecture}.{key}")
        if field is not None:
            value = field.contents()
            return float(max(value) if isinstance(value, list) else value)  # a list has an entry per layer
        if default is None:
            raise ModelError(f"{self.path.name} does not say {self.architecture}.{key}.")
        return default

    def tensor(self, name: str) -> Tensor | None:
        """A tensor dequantised to float32, or None."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values, np.float32))

    def special_tokens(self) -> dict[str, int]:
        """Token ids that have a role: {"bos": 1, "eos": 2, ...}."""
        prefix, suffix = "tokenizer.ggml.", "_token_id"
        return {
            key.removeprefix(prefix).removesuffix(suffix): int(field.contents())
            for key, field in self.reader.fields.items()
            if key.startswith(prefix) and key.endswith(suffix)
        }

    def tokenizer_sha256(self) -> str:
        """The hash of the vocabulary, as `localspec.llama.read_header` computes it."""
        return read_header(self.path).strings["tokenizer.ggml.tokens"][1]

    def end_tokens(self) -> set[int]:
        """Tokens that end an answer."""
        special = self.special_tokens()
        ends = {special[role] for role in ("eos", "eot", "eom") if role in special}
        return ends | {i for i, text in enumerate(self.tokens) if text in END_OF_GENERATION}


def mask_token(target: TargetFile, counts: Ints) -> int:
    """The control or unused token without a role that the data contains least; of equals the first.

    Args:
        counts: how often each token occurs anywhere in the data, [n_vocab].

    Raises:
        ModelError: there is none.
    """
    types = target.reader.fields["tokenizer.ggml.token_type"].contents()
    taken = set(target.special_tokens().values()) | target.end_tokens()
    special = (TokenType.CONTROL, TokenType.UNUSED)
    free = [token for token, kind in enumerate(types) if kind in special and token not in taken]
    if not free:
        raise ModelError(
            f"{target.path.name} has no free special token to mark empty slots with: every control or unused token of "
            "its vocabulary has a role."
        )
    return min(free, key=lambda token: int(counts[token]))


def kept_tokens(target: TargetFile, counts: Ints, n_rows: int, mask: int) -> Tensor:
    """The `n_rows` most frequent tokens and those that end answers, ascending, int64 [n_rows]."""
    if not 0 < n_rows <= len(counts):
        raise OptionError(f"A drafter cannot keep {n_rows} of the {len(counts)} tokens it may say.")
    rank = counts.copy()
    rank[list(target.end_tokens())] = counts.max() + 1
    rank[mask] = -1
    kept = np.argsort(-rank, kind="stable")[:n_rows]
    return torch.from_numpy(np.sort(kept))


def tapped(layers: Sequence[int], n: int | None) -> tuple[int, ...]:
    """`n` of the collected layers, evenly spread and the last among them; all of them for None.

    Raises:
        OptionError: there are not so many.
    """
    if n is None:
        return tuple(layers)
    if not 0 < n <= len(layers):
        raise OptionError(f"A drafter cannot read {n} of the {len(layers)} layers that were collected.")
    picked = np.linspace(len(layers) - 1, 0, n).round().astype(int)
    return tuple(sorted(layers[i] for i in picked))


def fresh_drafter(target: TargetFile, data: Data, shape: Shape) -> Drafter:
    """A drafter that fits the target and the data; see `initialise` for its weights."""
    counts = np.bincount(data.tokens, minlength=data.meta.n_vocab)
    mask = mask_token(target, counts)
    training, _ = split(data)
    kept = kept_tokens(target, answer_counts(data, training), shape.n_rows, mask)
    n_embd, n_heads = int(target.number("embedding_length")), int(target.number("attention.head_count"))
    config = DrafterConfig(
        n_embd=n_embd,
        n_layers=shape.n_layers,
        n_heads=n_heads,
        n_kv_heads=int(target.number("attention.head_count_kv", n_heads)),
        head_dim=int(target.number("attention.key_length", n_embd // n_heads)),
        n_ff=int(target.number("feed_forward_length")),
        rope_theta=target.number("rope.freq_base", 10000.0),
        rms_eps=target.number("attention.layer_norm_rms_epsilon"),
        target_layers=tapped(data.meta.layers, shape.n_tapped),
        n_vocab=data.meta.n_vocab,
        n_rows=shape.n_rows,
        mask_token=mask,
        block_size=shape.block_size,
        selector_rank=shape.selector_rank,
        top_k=shape.top_k,
        conv_group=shape.conv_group,
        conv=shape.conv,
        own_head=shape.own_head,
    )
    drafter = Drafter(config, embeddings(target), kept)
    initialise(drafter, target, data, copy_layers=shape.copy_layers)
    return drafter


def check_same(config: DrafterConfig, wanted: Mapping[str, Any]) -> None:
    """Raises OptionError where the drafter to begin with is not as `wanted`; it may have more layers."""
    for name, value in wanted.items():
        known = getattr(config, name)
        if known == value or (name == "n_layers" and known > value):
            continue
        same = "as many or fewer" if name == "n_layers" else "the same"
        raise OptionError(
            f"the drafter to begin with has {name} = {known}, this one is to have {value}; choose {same}, or begin "
            "without it."
        )


@torch.no_grad()
def inherit(fresh: Drafter, config: DrafterConfig, weights: Mapping[str, Tensor]) -> Drafter:
    """A drafter that goes on from another one's weights but drafts the tokens `fresh` does, with as many layers.

    Tokens that only `fresh` drafts keep its rows of the head, and what the other one made of all tokens it could not
    draft, as predecessors. Of more layers the first ones are taken, which have learnt to read embeddings: begun with
    the last ones, drafters did worse.

    Raises:
        OptionError: they differ in more than the drafted tokens, or `fresh` has more layers.
    """
    check_same(
        config, {name: value for name, value in vars(fresh.config).items() if name not in ("n_rows", "mask_token")}
    )
    n_layers, n_rows = fresh.config.n_layers, fresh.config.n_rows
    drafter = Drafter(replace(config, n_layers=n_layers, n_rows=n_rows), fresh.embeddings, fresh.kept)
    rows = weights["row_of"][fresh.kept]
    known = rows < config.other_row
    left_out = tuple(f"layers.{i}." for i in range(n_layers, config.n_layers))
    state = {name: tensor for name, tensor in weights.items() if not name.startswith(left_out)}
    state |= {"kept": fresh.kept, "row_of": fresh.row_of}
    state["head.weight"] = fresh.head.weight.clone()
    state["head.weight"][known] = weights["head.weight"][rows[known]]
    state["selector.successor"] = torch.zeros_like(fresh.selector.successor)
    state["selector.successor"][known] = weights["selector.successor"][rows[known]]
    other = torch.tensor([config.other_row])
    state["selector.predecessor"] = weights["selector.predecessor"][torch.cat((rows, other))]
    drafter.load_state_dict(state)
    return drafter


def embeddings(target: TargetFile) -> Tensor:
    """The target's token embeddings, float32 [n_vocab, H], which a drafter shares."""
    found = target.tensor("token_embd.weight")
    if found is None:
        raise ModelError(f"{target.path.name} has no token embeddings.")
    return found


@torch.no_grad()
def initialise(drafter: Drafter, target: TargetFile, data: Data, *, copy_layers: bool) -> None:
    """Head and final norm from the target; `fc` averages the tapped layers, each channel scaled
    to one; with `copy_layers`, the last layers of the target where shapes agree."""
    config = drafter.config
    head = target.tensor("output.weight")
    drafter.head.weight.copy_((drafter.embeddings if head is None else head)[drafter.kept])
    _copy(drafter.output_norm.weight, target.tensor("output_norm.weight"))
    drafter.feature_scale.copy_(torch.from_numpy(1.0 / feature_rms(data, config.target_layers)))
    average = torch.eye(config.n_embd).repeat(1, len(config.target_layers))
    drafter.fc.weight.add_(average / len(config.target_layers))
    first = int(target.number("block_count")) - config.n_layers
    for i, layer in enumerate(drafter.layers):
        if copy_layers and first + i >= 0:
            assert isinstance(layer, Layer)
            _copy_layer(layer, target, first + i)


def _copy_layer(layer: Layer, target: TargetFile, index: int) -> None:
    def source(name: str) -> Tensor | None:
        return target.tensor(f"blk.{index}.{name}.weight")

    half_split = target.architecture not in INTERLEAVED_ROPE
    for name, projection in (("attn_q", layer.attn.q), ("attn_k", layer.attn.k)):
        weight = source(name)
        if weight is not None and not half_split:
            weight = unpermute(weight, layer.attn.head_dim)
        _copy(projection.weight, weight)
    _copy(layer.attn.v.weight, source("attn_v"))
    _copy(layer.attn.o.weight, source("attn_output"))
    _copy(layer.attn_norm.weight, source("attn_norm"))
    _copy(layer.ffn_norm.weight, source("ffn_norm"))
    _copy(layer.gate.weight, source("ffn_gate"))
    _copy(layer.up.weight, source("ffn_up"))
    _copy(layer.down.weight, source("ffn_down"))


def unpermute(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from interleaved to half-split RoPE order, [n_heads * D, H]."""
    pairs: Tensor = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def _copy(parameter: Tensor, source: Tensor | None) -> None:
    if source is not None and source.shape == parameter.shape:
        parameter.copy_(source)
