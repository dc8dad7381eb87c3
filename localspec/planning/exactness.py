"""Which passes compute a token as if it were alone, to the last bit: what "the same words" rests on.

Speculative decoding says the words of plain decoding where a token's logits do not depend on the batch it is decoded
in. Kernels promise no such thing: many take another way from two, four or eight tokens on and round differently. So it
is measured, for this file on this build with these settings, and kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import process_time

import numpy as np
from numpy.typing import NDArray

from localspec.engine.generate import Engine
from localspec.engine.paths import NOTHING, Draft, Tree
from localspec.engine.reading import Reading
from localspec.engine.target import MAX_LEAVES, N_BATCH, Target
from localspec.planning.cost_model import CostModel
from localspec.storage import recall, remember

KIND = "exactness"
DEPTH, DEPTH_ON_GPU = 32, 600  # tokens in the KV cache while measuring; a GPU's attention changes with it
BLOCK, N_SAID = 32, 4  # tokens read in a pass of their own; of two such blocks, how many are decoded one by one
WIDTHS = (
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    12,
    16,
    17,
    24,
    32,
    33,
)  # kernels change at powers of two, and at what remains of them
N_SEEN, SURE = 16, 4  # tokens seen in passes of each width at least; the widest that is looked at however long it takes
BUDGET_S = 3.0  # of each thread's CPU time, for the widths: a busy machine must not promise less for ever
LOSS = 0.03  # of the rate, up to which answers keep to exact passes by themselves
REPEATED = 0.9  # chance of a token that followed the last time, where the text repeats itself
UNKNOWN_LENGTH = 2.0  # acceptance length of a drafter that does not say what it reached


@dataclass(frozen=True)
class Exactness:
    """`width`: the widest pass, chain or tree, whose tokens get the bits they have alone (1: no wider one).

    `reading`: so do the passes prompts are read in. Where they do not, those that begin and end at multiples of `block`
    tokens leave the same keys and values as each other.
    """

    width: int = 1
    reading: bool = False
    block: int = N_BATCH

    def covers(self, draft: Draft) -> bool:
        """Whether the pass that verifies `draft` is exact."""
        return len(draft.tokens) < self.width


@dataclass(frozen=True)
class Promise:
    """What holds between the words with a drafter and those without, where passes verify up to `widest` tokens."""

    exactness: Exactness
    widest: int
    forced: bool = False  # by `exact`

    @property
    def is_exact(self) -> bool:
        """Whether bits are promised to be equal."""
        return self.widest <= self.exactness.width

    def __str__(self) -> str:
        width = self.exactness.width
        narrow = (
            f"passes over up to {width} tokens give each the bits it has alone" if width > 1 else "no pass is exact"
        )
        if self.is_exact:
            held = " (exact)" if self.forced else ""
            return f"the same words, to the last bit: {narrow}, and none is wider{held}"
        return f"the same words but for near-ties: {narrow}, wider ones round differently; --exact does without them"


class ExactnessKeeper:
    """What is measured of the target that `engine` runs; kept between sessions under `key` (file, build, settings).

    `strict`: never leave exact passes, at whatever cost.
    """

    def __init__(self, engine: Engine, key: str, *, strict: bool = False) -> None:
        self._engine, self._key, self.strict = engine, key, strict
        self._known: Exactness | None = None

    def get(self) -> Exactness:
        """What is known; at first use it is measured, which takes a second or so and empties the KV cache."""
        if self._known is None:
            self._known = self._recalled() or self._measured()
            self._engine.reading = self._reading(self._known)
        return self._known

    def _recalled(self) -> Exactness | None:
        try:
            found = Exactness(**json.loads(recall(KIND, self._key) or "null"))
        except (ValueError, TypeError):
            return None
        valid = isinstance(found.width, int) and isinstance(found.block, int) and min(found.width, found.block) >= 1
        return found if valid else None

    def _measured(self) -> Exactness:
        self._engine.forget()
        found = measure(self._engine.target)
        remember(KIND, self._key, json.dumps(asdict(found)))
        return found

    def _reading(self, found: Exactness) -> Reading:
        """Reading that makes prompts read in part agree with prompts read afresh, as far as that is promised."""
        if found.reading:
            return Reading()
        if self.strict and found.width >= BLOCK:
            return Reading(most=BLOCK)  # slower, and all that is in the KV cache can be used again
        recurrent = self._engine.target.model.is_recurrent
        return Reading(1 if recurrent and not self.strict else found.block, strict=self.strict)


def measure(target: Target) -> Exactness:
    """Compare passes with tokens decoded alone, bit for bit. Empties the KV cache.

    Nothing is known, and nothing promised, where the context is too small to measure in.
    """
    depth = DEPTH_ON_GPU if target.model.on_gpu else DEPTH
    if target.n_ctx <= max(2 * BLOCK + 1, depth + 3 * target.n_verified):
        return Exactness()
    try:
        probe = _Probe(target)
        return probe.reading(probe.width(depth))
    finally:
        target.context.want_hidden(False)
        target.forget()


class _Probe:
    """Decodes the same tokens in different ways. A token's bits are its logits and what the head reads.

    8-bit activations hide most differences from the logits; what the head reads is rounded to nothing.
    """

    def __init__(self, target: Target) -> None:
        self._target, n_vocab = target, target.model.vocab.n_tokens
        n = DEPTH_ON_GPU + 3 * target.n_verified
        self._text: list[int] = np.random.default_rng(0).integers(0, n_vocab, n).tolist()
        self._n_past, self._all_exact = 0, True

    def width(self, depth: int) -> int:
        """The widest pass such that it and all narrower ones are exact; on a slow machine as far as that was seen."""
        target = self._target
        most, began, width = target.n_verified, process_time(), 1
        alone: list[NDArray[np.uint32]] = []
        for n in sorted({min(n, most) for n in (*WIDTHS, most)} - {1}):
            if n > len(alone):
                self._fill([depth])
                alone = self._alone(max(n, min(N_SEEN, most)) if n <= N_SEEN else most)
            if n > SURE and process_time() - began > BUDGET_S * target.context.n_threads:
                break
            self._all_exact = self._is_exact(n, alone)
            if not self._all_exact:
                break
            width = n
        return width

    def reading(self, width: int) -> Exactness:
        """How passes over prompts agree with each other, `width` being measured already."""
        ways = [2 * BLOCK], [BLOCK, BLOCK], [2 * BLOCK - N_SAID] + [1] * N_SAID
        whole, blocks, said = (self._behind(way) for way in ways)
        agree = np.array_equal(whole, blocks)
        in_blocks = agree and not self._target.model.on_gpu  # there kernels are chosen by widths far beyond these
        everything = self._all_exact and np.array_equal(whole, said)
        return Exactness(width, in_blocks and everything, BLOCK if in_blocks else N_BATCH)

    def _is_exact(self, n: int, alone: Sequence[NDArray[np.uint32]]) -> bool:
        """Whether passes over `n` tokens are: chains with leaves beside them that say the first token once more."""
        self._back()
        n_leaves = min(n // 3, MAX_LEAVES - 1) if self._target.can_branch else 0
        n_chain = n - n_leaves
        parents = [*range(-1, n_chain - 2), *[-1] * n_leaves]
        for start in range(0, max(1, len(alone) - n + 1), n_chain):
            anchor, *chain = self._text[self._target.n_past :][:n_chain]
            rows = self._verified(anchor, Tree([*chain, *chain[:1] * n_leaves], parents, []), range(n_chain))
            expected = [*alone[start : start + n_chain], *[alone[start + 1]] * n_leaves]
            if not all(map(np.array_equal, rows, expected)):
                return False
            if start + n_chain >= N_SEEN:
                break
        return True

    def _back(self) -> None:
        if self._target.rewind(self._n_past) < self._n_past:  # a recurrent state
            self._fill([self._n_past])

    def _alone(self, n: int) -> list[NDArray[np.uint32]]:
        return [self._verified(token, NOTHING)[0] for token in self._text[self._n_past :][:n]]

    def _behind(self, passes: Sequence[int]) -> NDArray[np.uint32]:
        """Bits of the token behind a text that is read in `passes`."""
        self._fill(passes)
        return self._verified(self._text[self._n_past], NOTHING)[0]

    def _fill(self, passes: Sequence[int]) -> None:
        target, self._n_past = self._target, sum(passes)
        target.context.want_hidden(False)
        target.forget()
        for n in passes:
            target.prefill(self._text[target.n_past :][:n])
        target.context.want_hidden(True)

    def _verified(self, anchor: int, draft: Draft, kept: Sequence[int] = (0,)) -> list[NDArray[np.uint32]]:
        """Bits of a pass, of which the rows `kept` stay."""
        n = len(draft.tokens) + 1
        logits = self._target.verify(anchor, draft)
        rows = np.concatenate((self._target.context.hidden(n), logits), axis=1).view(np.uint32)
        self._target.commit(kept)
        return list(rows)


def loss(costs: CostModel, width: int, acceptance_length: float | None) -> float:
    """The most that passes no wider than `width` can cost, as a share of the rate.

    Looked at are a drafter of that acceptance length, and a text that repeats itself.
    """
    n = np.arange(costs.most + 1)
    draft = costs.draft[np.minimum(n, len(costs.draft) - 1)]  # index 0: 0
    right = 1 - 1 / (acceptance_length or UNKNOWN_LENGTH)
    shares = []
    for chance, seconds in ((right, draft + costs.verify[1:]), (REPEATED, costs.verify[1:])):
        rates = np.cumsum(chance**n) / seconds
        shares.append(1 - rates[:width].max() / rates.max())
    return float(max(shares))
