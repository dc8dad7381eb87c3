"""The DFlash 2 drafter as a torch module: one pass over a block gives a pool of tokens per slot.

Shapes use these letters:

    W windows (pieces of chats)      H width of target and drafter       D size of a head
    S context tokens of a window     B block size, anchor included       R rank of the selector
    A anchors of a window            K candidates per slot               V rows of the (reduced) head

Weights are float32; everything is computed in the dtype of `features`, norms, rotations and
softmax sums in float32. Tokens are ids of the target's vocabulary, *rows* are rows of the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that determines a drafter's shapes and its forward pass."""

    n_embd: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    rope_theta: float
    rms_eps: float
    target_layers: tuple[int, ...]  # the target's layers whose inputs are read, as GGUF counts them
    n_vocab: int  # tokens of the target
    n_rows: int  # tokens the drafter can propose
    mask_token: int
    block_size: int = 8
    conv_taps: int = 2
    conv_group: int = 16
    selector_rank: int = 64
    top_k: int = 16
    sliding_window: int | None = None
    conv: bool = True  # False: the convolutions stay the identity
    own_head: bool = True  # False: the target's head as it is, of all its tokens; `n_rows` then bounds training alone

    @property
    def n_slots(self) -> int:
        """Tokens proposed per block: slot 0 is the anchor."""
        return self.block_size - 1

    @property
    def n_features(self) -> int:
        """Width of one row of features."""
        return len(self.target_layers) * self.n_embd

    @property
    def other_row(self) -> int:
        """The row that stands for every token outside the reduced vocabulary."""
        return self.n_rows


class Linear(nn.Linear):
    """Float32 master weights, computing in the dtype of the input; no bias."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class Rotary:
    """RoPE in the half-split (NeoX) layout for one set of positions, in float32.

    `positions` [...] gives angles that apply to [..., n_heads, D].
    """

    def __init__(self, positions: Tensor, head_dim: int, theta: float) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
        angle = positions[..., None, None].float() * theta**-exponent
        self.cos, self.sin = angle.cos(), angle.sin()

    def __call__(self, x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        rotated = torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1)
        return rotated.to(x.dtype)


class BlockConv(nn.Module):
    """A pair of short convolutions over the slots of a block, around one sublayer.

    The weight of a tap is a learned base plus a coefficient per group of channels which the
    reading slot's normed input projects; slots before the block count as zero.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.taps, self.groups = config.conv_taps, config.n_embd // config.conv_group
        self.base = nn.Parameter(torch.zeros(2, self.taps, config.n_embd))
        self.proj = Linear(config.n_embd, 2 * self.taps * self.groups)
        nn.init.ones_(self.base[:, 0])  # with a zero projection: the identity
        nn.init.zeros_(self.proj.weight)

    def coefficients(self, u: Tensor) -> Tensor:
        """[..., B, H] -> [..., B, 2, T, G]: both sides' coefficients, from the normed input."""
        planes: Tensor = self.proj(u).unflatten(-1, (2, self.taps, self.groups))
        return planes

    def forward(self, x: Tensor, coefficients: Tensor, side: int) -> Tensor:
        grouped = x.unflatten(-1, (self.groups, -1))
        base = self.base[side].unflatten(-1, (self.groups, -1)).to(x.dtype)
        out = torch.zeros_like(grouped)
        for tap in range(min(self.taps, x.shape[-2])):
            weight = base[tap] + coefficients[..., side, tap, :, None]
            out = out + weight * _delayed(grouped, tap)
        return out.flatten(-2)


class NoConv(BlockConv):
    """What a convolution is before training, the identity, for good: nothing is computed, nothing learned."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.requires_grad_(False)

    def coefficients(self, u: Tensor) -> Tensor:
        return u

    def forward(self, x: Tensor, coefficients: Tensor, side: int) -> Tensor:
        return x


def _delayed(x: Tensor, n: int) -> Tensor:
    """Shift [..., B, G, g] by `n` slots, zeros coming in: slot k reads slot k - n."""
    return F.pad(x[..., : x.shape[-3] - n, :, :], (0, 0, 0, 0, n, 0)) if n else x


class Attention(nn.Module):
    """Attention of a block's slots over the committed context and the block itself."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = (
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
        )
        self.q = Linear(config.n_embd, config.n_heads * config.head_dim)
        self.k = Linear(config.n_embd, config.n_kv_heads * config.head_dim)
        self.v = Linear(config.n_embd, config.n_kv_heads * config.head_dim)
        self.o = Linear(config.n_heads * config.head_dim, config.n_embd)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[..., H] -> rotated keys and values, each [..., n_kv_heads, D]."""
        keys = self.k(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        values = self.v(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        return rotary(self.k_norm(keys)), values

    def forward(self, x: Tensor, context: Tensor, geometry: Geometry) -> Tensor:
        """[W, A, B, H] block tokens and [W, S, H] encoded context -> [W, A, B, H]."""
        a, b = x.shape[1:3]
        heads = (self.n_kv_heads, self.n_heads // self.n_kv_heads)
        q = geometry.block_rotary(self.q_norm(self.q(x).unflatten(-1, (self.n_heads, -1))))
        q = q.unflatten(-2, heads) * self.head_dim**-0.5  # [W, A, B, n_kv, group, D]
        block_k, block_v = self.keys_values(x, geometry.block_rotary)
        context_k, context_v = self.keys_values(context, geometry.context_rotary)

        # Two products under one softmax: all anchors share the context, each has its own block.
        # Queries and keys are normed, so no maximum is needed to keep exp() in range.
        far_q = q.permute(0, 3, 4, 1, 2, 5).flatten(2, 4)  # [W, n_kv, group * A * B, D]
        far = _exp(far_q @ context_k.permute(0, 2, 3, 1)).unflatten(2, (heads[1], a, b))
        far = far * geometry.visible  # [W, n_kv, group, A, B, S]
        near_q = q.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)  # [W, A, n_kv, group * B, D]
        near = _exp(near_q @ block_k.permute(0, 1, 3, 4, 2))  # [W, A, n_kv, group * B, B]

        far_out = far.to(x.dtype).flatten(2, 4) @ context_v.transpose(1, 2)
        near_out = near.to(x.dtype) @ block_v.transpose(2, 3)
        far_out, far_sum = (
            t.unflatten(2, (heads[1], a, b)).permute(0, 3, 4, 1, 2, 5)  # [W, A, B, n_kv, group, D or 1]
            for t in (far_out, far.flatten(2, 4).sum(-1, keepdim=True))
        )
        near_out, near_sum = (
            t.unflatten(3, (heads[1], b)).permute(0, 1, 4, 2, 3, 5) for t in (near_out, near.sum(-1, keepdim=True))
        )
        out = (far_out.float() + near_out) / (far_sum + near_sum)
        projected: Tensor = self.o(out.to(x.dtype).flatten(3))
        return projected


def _exp(scores: Tensor) -> Tensor:
    return scores.float().clamp(-60.0, 60.0).exp()


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        conv = BlockConv if config.conv else NoConv
        self.attn_norm = RMSNorm(config.n_embd, config.rms_eps)
        self.attn_conv = conv(config)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.n_embd, config.rms_eps)
        self.ffn_conv = conv(config)
        self.gate = Linear(config.n_embd, config.n_ff)
        self.up = Linear(config.n_embd, config.n_ff)
        self.down = Linear(config.n_ff, config.n_embd)

    def forward(self, h: Tensor, context: Tensor, geometry: Geometry) -> Tensor:
        u = self.attn_norm(h)
        coefficients = self.attn_conv.coefficients(u)
        out = self.attn(self.attn_conv(u, coefficients, 0), context, geometry)
        h = h + self.attn_conv(out, coefficients, 1)

        u = self.ffn_norm(h)
        coefficients = self.ffn_conv.coefficients(u)
        u = self.ffn_conv(u, coefficients, 0)
        out = self.down(F.silu(self.gate(u)) * self.up(u))
        mixed: Tensor = self.ffn_conv(out, coefficients, 1)
        return h + mixed


class Geometry:
    """Where things are: rotations of context and blocks, and which context a slot may see.

    Context token s of a window is at position s; slot k of a block is at `anchor + k`.
    """

    def __init__(self, config: DrafterConfig, n_context: int, anchors: Tensor) -> None:
        context = torch.arange(n_context, device=anchors.device)
        slots = anchors[..., None] + torch.arange(config.block_size, device=anchors.device)  # [W, A, B]
        self.context_rotary = Rotary(context, config.head_dim, config.rope_theta)
        self.block_rotary = Rotary(slots, config.head_dim, config.rope_theta)
        visible = context < anchors[..., None, None]  # [W, A, 1, S]: before the anchor
        if config.sliding_window is not None:
            visible = visible & (slots[..., None] - context < config.sliding_window)
        self.visible = visible[:, None, None]  # broadcast over the heads


class Selector(nn.Module):
    """Scores for pairs of neighbouring tokens: successor c after predecessor p.

    The codebooks have a row per proposable token; one further predecessor row stands for all
    tokens that cannot be proposed but can be an anchor.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.predecessor = nn.Parameter(torch.randn(config.n_rows + 1, config.selector_rank) * 0.02)
        self.successor = nn.Parameter(torch.zeros(config.n_rows, config.selector_rank))
        self.hidden = Linear(config.n_embd, config.selector_rank)

    def forward(self, f: Tensor, predecessors: Tensor, candidates: Tensor) -> Tensor:
        """f [..., H], rows [..., P] and [..., K] -> float32 pair terms [..., P, K]."""
        gate: Tensor = self.hidden(f).float()[..., None, :]
        left = F.embedding(predecessors, self.predecessor) * gate
        return left @ F.embedding(candidates, self.successor).transpose(-1, -2)


class Drafter(nn.Module):
    """A DFlash 2 drafter.

    Args:
        config: shapes.
        embeddings: the target's token embeddings, [n_vocab, H]; shared with it, never trained.
        kept: int64 [n_rows], the token of each row of the head, ascending.
    """

    embeddings: Tensor
    kept: Tensor
    row_of: Tensor
    feature_scale: Tensor

    def __init__(self, config: DrafterConfig, embeddings: Tensor, kept: Tensor) -> None:
        super().__init__()
        self.config = config
        row_of = torch.full((config.n_vocab,), config.other_row)
        row_of[kept] = torch.arange(config.n_rows)
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("kept", kept)
        self.register_buffer("row_of", row_of)
        # Channels of the residual stream differ a hundredfold: `fc` trains on scaled ones.
        # Export folds the scale into its weight.
        self.register_buffer("feature_scale", torch.ones(config.n_features))
        self.fc = Linear(config.n_features, config.n_embd)
        self.context_norm = RMSNorm(config.n_embd, config.rms_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.output_norm = RMSNorm(config.n_embd, config.rms_eps)
        self.head = Linear(config.n_embd, config.n_rows).requires_grad_(config.own_head)
        self.selector = Selector(config)

    def embed_block(self, anchor_tokens: Tensor) -> Tensor:
        """Tokens [W, A] -> embeddings of the blocks [anchor, mask, mask, ...], [W, A, B, H]."""
        tokens = F.pad(anchor_tokens[..., None], (0, self.config.n_slots), value=self.config.mask_token)
        return F.embedding(tokens, self.embeddings)

    def forward(self, features: Tensor, anchors: Tensor, block: Tensor) -> Tensor:
        """Final normed hidden states of the slots 1 .. B-1.

        Args:
            features: [W, S, n_features], row s = the target's layer inputs at position s.
            anchors: int64 [W, A], the anchors' positions; a block sees the context before its own.
            block: [W, A, B, H], see `embed_block`.

        Returns: [W, A, B-1, H].
        """
        geometry = Geometry(self.config, features.shape[1], anchors)
        fuse = (self.fc.weight * self.feature_scale).to(features.dtype)
        context = self.context_norm(F.linear(features, fuse))
        h = block.to(features.dtype)
        for layer in self.layers:
            h = layer(h, context, geometry)
        final: Tensor = self.output_norm(h[:, :, 1:].contiguous())
        return final

    def lattice(self, hidden: Tensor, anchor_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The pool as llama.cpp hands it out.

        Args:
            hidden: [W, A, B-1, H] from `forward`.
            anchor_tokens: int64 [W, A].

        Returns: candidate tokens [W, A, B-1, K], and scores [W, A, B-1, K, K], row = predecessor;
            in the first slot all rows are equal, as its one predecessor is the anchor.
        """
        unary, rows = self.head(hidden).float().topk(self.config.top_k)
        anchor_rows = self.row_of[anchor_tokens][..., None, None].expand_as(rows[..., :1, :])
        predecessors = torch.cat((anchor_rows, rows[..., :-1, :]), -2)
        scores = unary[..., None, :] + self.selector(hidden, predecessors, rows)
        return self.kept[rows], scores
