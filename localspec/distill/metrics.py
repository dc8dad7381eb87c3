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
    """What a drafter offered on N blocks.

    valid: bool [N, B-1], the slot has a label; scores: float32 [N, B-1, K], of the candidates after the true
    predecessor; truth: int64 [N, B-1], which candidate the label is, -1: none; top1: bool [N, B-1], the best
    candidate without pair scores is the label; repeating: bool [N], the text before the block repeats itself.
    """

    valid: Tensor
    scores: Tensor
    truth: Tensor
    top1: Tensor
    repeating: Tensor

    @property
    def pool(self) -> Tensor:
        """The label is among the candidates."""
        return self.truth >= 0

    @property
    def selector(self) -> Tensor:
        """The best candidate is the label."""
        return self.scores.argmax(-1) == self.truth


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


def by_text(picks: Picks) -> dict[str, Figures]:
    """Figures of all blocks, and of those in fresh and in repeating text."""
    return {
        "all": figures(picks),
        "fresh": figures(_subset(picks, ~picks.repeating)),
        "repeating": figures(_subset(picks, picks.repeating)),
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
    is_truth = rows == label_rows[..., None]
    return Picks(
        valid=labels != NO_LABEL,
        scores=scores,
        truth=torch.where(is_truth.any(-1), is_truth.int().argmax(-1), -1),
        top1=is_truth[..., 0],
        repeating=repeating,
    )


def join(parts: Iterable[Picks]) -> Picks:
    """Picks of several batches as one, without blocks that have no label at all."""
    whole = Picks(*(torch.cat(column) for column in zip(*map(_columns, parts), strict=True)))
    return _subset(whole, whole.valid.any(-1))


def calibration(picks: Picks) -> list[float]:
    """For each slot the temperature at which the pool's scores say best how likely each candidate is.

    It minimises the mean of -log softmax(scores / T)[truth] over the blocks that have the truth in the slot's pool.
    """
    seen = picks.pool & picks.valid
    return [
        best_temperature(picks.scores[seen[:, slot], slot], picks.truth[seen[:, slot], slot])
        for slot in range(seen.shape[1])
    ]


def best_temperature(scores: Tensor, truth: Tensor, least: float = 1 / 8, most: float = 8.0) -> float:
    """The T in [least, most] with the smallest mean cross-entropy of softmax(scores [N, K] / T) to truth [N].

    The loss is convex in 1/T; its slope there is E[scores] - scores[truth]. 1.0 where nothing can be told (N < 32).
    """
    if len(truth) < 32:
        return 1.0
    scores = scores.double()
    right = scores.gather(1, truth[:, None]).mean()
    low, high = 1 / most, 1 / least
    for _ in range(40):
        middle = (low * high) ** 0.5
        slope = ((scores * middle).softmax(-1) * scores).sum(-1).mean() - right
        low, high = (low, middle) if slope > 0 else (middle, high)
    return float((low * high) ** -0.5)


def _prefix(right: Tensor, valid: Tensor) -> Tensor:
    """Valid slots of which no slot up to themselves was wrong."""
    return (right | ~valid).cumprod(-1).bool() & valid


def _length(accepted: Tensor) -> float:
    return 1.0 + accepted.sum(-1).float().mean().item() if len(accepted) else 0.0


def _columns(picks: Picks) -> tuple[Tensor, ...]:
    return picks.valid, picks.scores, picks.truth, picks.top1, picks.repeating


def _subset(picks: Picks, chosen: Tensor) -> Picks:
    return Picks(*(column[chosen] for column in _columns(picks)))
