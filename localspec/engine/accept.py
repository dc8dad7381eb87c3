"""Which drafted tokens survive verification. Both rules leave the target's own distribution untouched.

`rows` [n_draft + 1, n_vocab] are the target's logits behind the anchor (row 0) and behind each drafted token (row
i + 1). Both return the tokens the round emits, the accepted ones and one more of the target's own, and for each the row
it was decided on: these are the rows of the batch that stay in the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localspec.engine.paths import Chain, Draft

Rows = NDArray[np.float32]
Choose = Callable[[NDArray[np.float32], list[int]], int]  # logits, emitted so far -> the target's token
Distribution = tuple[NDArray[np.int64], NDArray[np.float64]]  # tokens, their probabilities


class Streams(Protocol):
    """Random numbers for rejection: whether a token is accepted, and what replaces it."""

    accept: np.random.Generator
    residual: np.random.Generator


def sample_and_match(rows: Rows, draft: Draft, choose: Choose) -> tuple[list[int], list[int]]:
    """The target chooses at each position as it would without a drafter; follow the branch that holds its choice.

    The draft only decides how many of the target's choices this one batch can answer, so this is lossless for any
    `choose` and any tree.
    """
    children = _children(draft.parents)
    emitted: list[int] = []
    visited, node = [0], -1
    while True:
        token = choose(rows[visited[-1]], emitted)
        emitted.append(token)
        node = next((child for child in children.get(node, ()) if draft.tokens[child] == token), -1)
        if node < 0:
            return emitted, visited
        visited.append(node + 1)


def rejection(
    rows: Rows,
    draft: Chain,
    distribution: Callable[[NDArray[np.float32], list[int]], Distribution],
    streams: Streams,
) -> tuple[list[int], list[int]]:
    """Speculative sampling of a chain drawn from q (Leviathan et al. 2023, algorithm 1).

    Token d stays with probability min(1, p(d) / q(d)); the first that does not is replaced by a draw from
    max(p - q, 0), normalised; behind an accepted chain a token is drawn from p. `distribution` is p after every
    filter. Needs `draft.q`, and that no token's being in the draft depends on that token itself.
    """
    emitted: list[int] = []
    for row, token, (candidates, q) in zip(rows, draft.tokens, draft.q or (), strict=False):
        ids, p = distribution(row, emitted)
        p_token, q_token = p[ids == token].sum(), q[candidates == token].sum()
        if streams.accept.random() * q_token >= p_token:
            emitted.append(_draw(ids, _excess(ids, p, candidates, q), streams.residual))
            break
        emitted.append(token)
    else:
        ids, p = distribution(rows[len(draft.tokens)], emitted)
        emitted.append(_draw(ids, p, streams.residual))
    return emitted, list(range(len(emitted)))


def _excess(
    ids: NDArray[np.int64], p: NDArray[np.float64], candidates: NDArray[np.int32], q: NDArray[np.float64]
) -> NDArray[np.float64]:
    """max(p - q, 0) over `ids`; p itself where rounding leaves nothing."""
    offered = np.zeros_like(p)
    same = ids[:, None] == candidates[None, :]
    offered[:] = (same * q).sum(axis=1)
    rest = np.maximum(p - offered, 0.0)
    return rest if rest.sum() > 0 else p


def _draw(ids: NDArray[np.int64], weights: NDArray[np.float64], random: np.random.Generator) -> int:
    upto = weights.cumsum()
    return int(ids[np.searchsorted(upto, random.random() * upto[-1], side="right").clip(max=len(ids) - 1)])


def _children(parents: Sequence[int]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        out.setdefault(parent, []).append(node)
    return out
