"""What training minimises: the head's loss on what the target said or would say, and the selector's on its pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localspec.distill.metrics import Picks, judge
from localspec.distill.model import Drafter
from localspec.distill.options import OBJECTIVES, Options
from localspec.distill.windows import NO_LABEL, Batch

GOLDEN = 0.6180339887498949  # its multiples modulo 1 are as even as can be, however many there are


class Head(torch.autograd.Function):
    """KL divergence to a few aims and the K best of each row of logits, holding no more than one copy of them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, shares: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [N, H] and weight [V, H] -> losses [N], values and rows of the K best [N, K].

        The aim of a row of logits: `shares` [N, C] of the probability at `rows` int64 [N, C]; shares sum to one, or to
        zero where there is no loss. One share of one is cross-entropy.
        """
        weight = weight.to(hidden.dtype)
        logits = hidden @ weight.T
        values, best = logits.topk(k)
        chances = logits.softmax(-1)
        said = chances.gather(1, rows).float().clamp(min=1e-30)
        ctx.state = hidden, weight, rows, shares, best, chances
        ctx.mark_non_differentiable(best)
        return (torch.xlogy(shares, shares) - shares * said.log()).sum(-1), values.float(), best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, shares, best, gradient = ctx.state
        del ctx.state  # the chances become the gradient of the logits in place
        # The factor of a row is left to the narrow side of both products. Where it is zero a tiny one stands in, as the
        # pool's gradients are divided by it.
        factor = (grads[0] * shares.sum(-1)).clamp(min=1e-20)[:, None]
        _add_at(gradient, rows, -shares)
        _add_at(gradient, best, grads[1] / factor)
        factor = factor.to(gradient.dtype)
        of_weight = (gradient.T @ (hidden * factor)).float() if ctx.needs_input_grad[1] else None
        return (gradient @ weight) * factor, of_weight, None, None, None


def _add_at(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add values [N, C] at `columns` [N, C] of each row. Scattering would copy the matrix."""
    at = torch.arange(len(matrix), device=matrix.device)[:, None].expand_as(columns)
    matrix.index_put_((at, columns), values.to(matrix.dtype), accumulate=True)


def aims(batch: Batch, row_of: Tensor, n_rows: int, soft: float) -> tuple[Tensor, Tensor]:
    """What the head should say: rows int64 and shares float32, each [W, A, B-1, 1 + C], the label first.

    `soft` of a slot's probability goes to the target's candidates, as softmax of their logits over those that have a
    row; the rest to the token it said. What of the two has no row leaves all to the other (under `soft` = 0 the
    candidates never step in); shares are zero where nothing is left and outside of answers.
    """
    labelled = (batch.labels != NO_LABEL)[..., None]
    label = row_of[batch.labels.clamp(min=0)][..., None]
    pool = row_of[batch.pool.clamp(min=0)]
    offered = (batch.pool >= 0) & (pool != n_rows) & labelled
    spoken = (label != n_rows) & labelled
    said = batch.pool_logits.masked_fill(~offered, -torch.inf).softmax(-1).nan_to_num(0.0)
    for_pool = offered.any(-1, keepdim=True) * torch.where(spoken, soft, float(soft > 0))
    for_label = spoken * (1 - for_pool)
    said = said * for_pool + for_label * (pool == label)
    for_label = for_label * ~((pool == label) & offered).any(-1, keepdim=True)
    shares = torch.cat((for_label, said * offered), -1)
    return torch.where(shares > 0, torch.cat((label, pool), -1), 0), shares


def drawn(n_anchors: int, n_slots: int, gamma: float) -> Tensor:
    """Which slots of a window's blocks count, bool [A, B-1]: slot k in a share exp(-(k-1) / gamma) of them.

    On average the same as weighing every slot, but what hardly counts then costs the head hardly anything.
    """
    shares = torch.exp(-torch.arange(n_slots) / gamma)
    return (torch.arange(n_anchors) * GOLDEN % 1)[:, None] < shares


def position_weights(losses: Tensor, used: Tensor, options: Options) -> Tensor:
    """How much each slot of a block counts, [..., B-1], where none are left out.

    "drawn" and "exponential": exp(-(k-1) / gamma). "d-pace": slot k counts as the prefixes that pass through it, the
    sum over j >= k of s_1 ... s_j, where s = (1 - alpha) exp(-loss) + alpha, and 1 in slots that are not used; no
    gradient.

    Args:
        losses: of the used slots, [N].
        used: bool [..., B-1], N of them.
    """
    if options.position_weights != "d-pace":
        slots = torch.arange(used.shape[-1], device=used.device)
        return torch.exp(-slots / options.gamma).expand_as(used)
    passed = torch.ones(used.shape, device=used.device)
    passed[used] = (1 - options.alpha) * torch.exp(-losses.detach()) + options.alpha
    return passed.cumprod(-1).flip(-1).cumsum(-1).flip(-1)


@dataclass
class Losses:
    """One batch: the objective, its two parts, and the pools for the figures."""

    total: Tensor
    base: Tensor
    selector: Tensor
    picks: Picks | None = None


def losses(drafter: Drafter, hidden: Tensor, batch: Batch, options: Options, *, judged: bool) -> Losses:
    """The weighted loss over the head, plus (as NeMo has it) cross-entropy over the K candidates after the true
    predecessor where the truth is among them.

    Args:
        hidden: [W, A, B-1, H] from the backbone.
        judged: also keep what is needed for figures.
    """
    config = drafter.config
    label_rows = torch.where(batch.labels != NO_LABEL, drafter.row_of[batch.labels.clamp(min=0)], config.other_row)
    tokens = torch.cat((batch.anchor_tokens[..., None], batch.labels[..., :-1]), -1)
    predecessors = drafter.row_of[tokens.clamp(min=0)]
    rows, shares = aims(batch, drafter.row_of, config.n_rows, OBJECTIVES[options.objective])

    used = batch.labels != NO_LABEL if judged else shares.sum(-1) > 0
    thinned = options.position_weights == "drawn" and not judged
    if thinned:
        used = used & drawn(used.shape[1], used.shape[2], options.gamma).to(used.device)
    hidden, rows, shares = hidden[used], rows[used], shares[used]
    loss, unary, best = Head.apply(  # type: ignore[no-untyped-call]
        hidden, drafter.head.weight, rows, shares, config.top_k
    )
    position = torch.ones_like(loss) if thinned else position_weights(loss, used, options)[used]
    weight = position * (shares.sum(-1) > 0)
    base = (weight * loss).sum() / (weight.sum() + 1e-6)

    scores = unary + drafter.selector(hidden, predecessors[used][:, None], best)[:, 0]
    is_truth = best == label_rows[used][:, None]
    choice = F.cross_entropy(scores, is_truth.int().argmax(-1), reduction="none")
    weight = position * is_truth.any(-1)
    selector = (weight * choice).sum() / (weight.sum() + 1e-6)
    picks = _picks(batch, label_rows, used, best, scores) if judged else None
    return Losses(base + options.selector_weight * selector, base.detach(), selector.detach(), picks)


def _picks(batch: Batch, label_rows: Tensor, used: Tensor, best: Tensor, scores: Tensor) -> Picks:
    shape = (*used.shape, best.shape[-1])
    all_best, all_scores = best.new_full(shape, -1), scores.new_zeros(shape)
    all_best[used], all_scores[used] = best, scores.detach()
    flat = [t.flatten(0, 1).cpu() for t in (all_best, all_scores, batch.labels, label_rows)]
    return judge(flat[0], flat[1], flat[2], flat[3], batch.repeating.flatten().cpu())
