"""From a row of the target's logits to its next token: penalties, filters, temperature, choice.

The filters and their order are llama.cpp's default chain (`src/llama-sampler.cpp`): penalties, top-k, top-p, min-p,
temperature. Temperature 0 takes the best logit after the penalties.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.errors import OptionError

Row = NDArray[np.float32]


@dataclass(frozen=True)
class SamplingParams:
    """How the target chooses. Defaults are llama.cpp's, but for the temperature: 0 is greedy.

    `top_k` 0 and `top_p` 1 and `min_p` 0 switch a filter off. `repeat_penalty` (1: off) divides or multiplies the
    logits of the last `penalty_last_n` tokens, `presence_penalty` and `frequency_penalty` (0: off) are subtracted,
    once and per occurrence. `seed` None draws one. Raises OptionError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check("temperature", self.temperature, 0)
        self._check("top_k", self.top_k, 0, whole=True)
        self._check("top_p", self.top_p, 0, 1, above=True)
        self._check("min_p", self.min_p, 0, 1)
        self._check("repeat_penalty", self.repeat_penalty, 0, above=True)
        self._check("presence_penalty", self.presence_penalty)
        self._check("frequency_penalty", self.frequency_penalty)
        self._check("penalty_last_n", self.penalty_last_n, 0, whole=True)
        if self.seed is not None:
            self._check("seed", self.seed, 0, whole=True)

    def _check(
        self,
        name: str,
        value: Any,
        low: float = -math.inf,
        high: float = math.inf,
        *,
        above: bool = False,
        whole: bool = False,
    ) -> None:
        """Refuse what is no (whole) number in low … high, or equal to `low` where it must lie above it."""
        number = isinstance(value, Integral if whole else Real) and math.isfinite(value)
        if not number or not low <= value <= high or (above and value == low):
            noun = "a whole number" if whole else "a number" if math.isfinite(low) else "a finite number"
            least = f" {'above' if above else 'of at least'} {low:g}" if math.isfinite(low) else ""
            most = f" and at most {high:g}" if math.isfinite(high) else ""
            raise OptionError(f"{name} must be {noun}{least}{most}, not {value!r}.")

    @property
    def penalised(self) -> bool:
        neutral = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        return neutral != (1.0, 0.0, 0.0) and self.penalty_last_n > 0


class Sampler:
    """Chooses tokens under `params`.

    A draw adds noise to the logarithms of the probabilities and takes the best (Gumbel-max). The noise is a function of
    seed, place in the text and token, so the same seed gives the same text with and without a drafter, and a drafter
    that adds the very noise to its own scores is right more often (Daliri et al. 2025, "Coupling without
    communication and drafter-invariant speculative decoding"). Rejection sampling has streams of its own instead: what
    is drafted, whether it is accepted, and what replaces it must not share their randomness.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.window = params.penalty_last_n if params.penalised else 0  # how much history `choose` looks at
        root = np.random.SeedSequence(params.seed)
        self._key = int(root.generate_state(1, np.uint64)[0])
        self.draft, self.accept, self.residual = map(np.random.default_rng, root.spawn(3))

    def choose(self, row: Row, history: Sequence[int], index: int) -> int:
        """The target's token number `index` of the text, for `row` [n_vocab] behind the tokens in `history`.

        Of `history` only the last `window` tokens count.
        """
        if self.params.temperature == 0:
            return int(self._penalised(row, history).argmax())
        ids, p = self.distribution(row, history)
        with np.errstate(divide="ignore"):  # a vanishing temperature leaves probabilities of 0
            return int(ids[(np.log(p) + self.noise(index, ids)).argmax()])

    def distribution(self, row: Row, history: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that can follow and their probabilities, after penalties and filters; needs a temperature."""
        return distribution(self._penalised(row, history), self.params)

    def weigh(self, scores: Row) -> NDArray[np.float64]:
        """The probabilities of a few candidates by their scores [K], under the same filters and temperature."""
        ids, p = distribution(scores, self.params)
        out = np.zeros(len(scores))
        out[ids] = p
        return out

    def tilt(self, ids: NDArray[np.int32], scores: NDArray[np.float32], index: int) -> NDArray[np.float32]:
        """A drafter's `scores` [n_slots, K, K] of the candidates `ids` [n_slots, K] with the noise that the target will
        draw with from token number `index` on, in logits; what the target would filter out is out.
        """
        if self.params.temperature == 0:
            return scores
        places = np.arange(index, index + len(ids))[:, None]
        tilted = scores + self.params.temperature * self.noise(places, ids)[:, None, :]
        if self.params.min_p > 0:
            tilted[scores < scores.max(axis=2, keepdims=True) + np.log(self.params.min_p)] = -np.inf
        return tilted.astype(np.float32)

    def noise(self, index: int | NDArray[np.int64], ids: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Standard Gumbel noise for the tokens `ids` at place `index` of the text: hashed (splitmix64), not drawn."""
        with np.errstate(over="ignore"):
            x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            x = x + (np.asarray(index).astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
            x ^= np.uint64(self._key)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
            x ^= x >> np.uint64(31)
        uniform = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # never 0, never 1
        return -np.log(-np.log(uniform))

    def _penalised(self, row: Row, history: Sequence[int]) -> Row:
        return penalise(row, history, self.params) if self.params.penalised else row


def penalise(row: Row, history: Sequence[int], params: SamplingParams) -> Row:
    """A copy of `row` [n_vocab] with the repeat, presence and frequency penalties of the recent tokens."""
    counts = Counter(history[-params.penalty_last_n :])
    ids = np.fromiter(counts.keys(), np.int64, len(counts))
    n = np.fromiter(counts.values(), np.float32, len(counts))
    row = row.copy()
    seen = row[ids]
    seen = np.where(seen <= 0, seen * params.repeat_penalty, seen / params.repeat_penalty)
    row[ids] = seen - n * params.frequency_penalty - params.presence_penalty
    return row


def distribution(row: Row, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that survive the filters, best first, and their probabilities at the temperature (sum 1)."""
    k = min(params.top_k or len(row), len(row))
    ids = np.argpartition(row, len(row) - k)[len(row) - k :] if k < len(row) else np.arange(len(row))
    ids = ids[np.argsort(-row[ids], kind="stable")]
    logits = row[ids].astype(np.float64)
    p = _softmax(logits)
    if params.top_p < 1:
        keep = int(np.searchsorted(p.cumsum(), params.top_p)) + 1
        ids, logits, p = ids[:keep], logits[:keep], p[:keep]
    if params.min_p > 0:
        keep = max(1, int((p >= params.min_p * p[0]).sum()))
        ids, logits = ids[:keep], logits[:keep]
    with np.errstate(over="ignore"):  # the best is at 0, the others may sink to -inf
        return ids, _softmax((logits - logits[0]) / params.temperature)


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()  # type: ignore[no-any-return]
