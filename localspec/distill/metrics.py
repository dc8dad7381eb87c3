"""Figures of a drafter on held-out chats, as the papers count them.

The truth is what the target said. Selector picks are made after the true predecessor; as a greedy
walk is on the truth until its first error, acceptance lengths are those of the walk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localspec.distill.windows import NO_LABEL


@dataclass
class Picks:
    """What a drafter did on N blocks; all bool [N, B-1] but the last.

    valid: the slot has a label; selector, top1: the pick is the label; pool: the label is among
    the candidates; repeating: bool [N], the text before the block repeats itself.
    """

    valid: Tensor
    selector: Tensor
    top1: Tensor
    pool: Tensor
    repeating: Tensor


@dataclass
class Figures:
    """Means over blocks with at least one valid slot (0 if there are none); lists have an entry per slot 1 .. B-1."""

    n_blocks: int
    acceptance_length: float
    top1_acceptance_length: float
    oracle_acceptance_length: float
    recall_per_slot: list[float] = field(default_factory=list)
    accepted_per_slot: list[float] = field(default_factory=list)


def figures(picks: Picks) -> Figures:
    """Fold picks into figures.

    `accepted_per_slot[k]` is the share, of the blocks where slot k has a label, in which slots
    1 .. k were all right; masked slots neither stop an acceptance length nor count in it.
    """
    valid = picks.valid
    counts = valid.sum(0).clamp(min=1)
    accepted = _prefix(picks.selector, valid)
    return Figures(
        n_blocks=len(valid),
        acceptance_length=_length(accepted),
        top1_acceptance_length=_length(_prefix(picks.top1, valid)),
        oracle_acceptance_length=_length(_prefix(picks.pool, valid)),
        recall_per_slot=((picks.pool & valid).sum(0) / counts).tolist(),
        accepted_per_slot=(accepted.sum(0) / counts).tolist(),
    )


def by_text(parts: Iterable[Picks]) -> dict[str, Figures]:
    """Figures of all blocks, and of those in fresh and in repeating text."""
    whole = Picks(*(torch.cat(column) for column in zip(*map(_columns, parts), strict=True)))
    whole = _subset(whole, whole.valid.any(-1))
    return {
        "all": figures(whole),
        "fresh": figures(_subset(whole, ~whole.repeating)),
        "repeating": figures(_subset(whole, whole.repeating)),
    }


def judge(rows: Tensor, scores: Tensor, labels: Tensor, label_rows: Tensor, repeating: Tensor) -> Picks:
    """Compare pools with labels.

    Args:
        rows: [N, B-1, K] candidates, by falling logit.
        scores: [N, B-1, K] of the candidates after the true predecessor.
        labels: [N, B-1] tokens, NO_LABEL where there is none.
        label_rows: [N, B-1] their rows of the head (no candidate for tokens outside it).
        repeating: bool [N].
    """
    picked = rows.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    return Picks(
        valid=labels != NO_LABEL,
        selector=picked == label_rows,
        top1=rows[..., 0] == label_rows,
        pool=(rows == label_rows[..., None]).any(-1),
        repeating=repeating,
    )


def _prefix(right: Tensor, valid: Tensor) -> Tensor:
    """Valid slots of which no slot up to themselves was wrong."""
    return (right | ~valid).cumprod(-1).bool() & valid


def _length(accepted: Tensor) -> float:
    return 1.0 + accepted.sum(-1).float().mean().item() if len(accepted) else 0.0


def _columns(picks: Picks) -> tuple[Tensor, ...]:
    return picks.valid, picks.selector, picks.top1, picks.pool, picks.repeating


def _subset(picks: Picks, chosen: Tensor) -> Picks:
    return Picks(*(column[chosen] for column in _columns(picks)))
