"""The target's distribution: against llama.cpp's own sampler chain, and drawn from as it should be."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as C

from localspec.engine.sampling import Sampler, SamplingParams, distribution, penalise
from localspec.errors import LocalspecError, OptionError

N_VOCAB = 60


def params(**options: Any) -> SamplingParams:
    """Sampling at temperature 1 with every filter off, but for `options`."""
    return SamplingParams(**({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options))


def random_row(seed: int, n_vocab: int = N_VOCAB, spread: float = 3.0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal(n_vocab)).astype(np.float32)


def llama_distribution(row: np.ndarray, history: list[int], p: SamplingParams) -> dict[int, float]:
    """What llama.cpp's default chain leaves of `row`, as token -> probability."""
    chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
    for sampler in (
        C.llama_sampler_init_penalties(
            len(row), p.penalty_last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty
        ),
        C.llama_sampler_init_top_k(p.top_k),
        C.llama_sampler_init_top_p(p.top_p, 1),
        C.llama_sampler_init_min_p(p.min_p, 1),
        C.llama_sampler_init_temp(p.temperature),
    ):
        C.llama_sampler_chain_add(chain, sampler)
    for token in history:
        C.llama_sampler_accept(chain, token)
    data = (C.llama_token_data * len(row))(*((i, float(logit), 0.0) for i, logit in enumerate(row)))
    array = C.llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False)
    C.llama_sampler_apply(chain, ctypes.byref(array))
    logits = {array.data[i].id: array.data[i].logit for i in range(array.size)}
    C.llama_sampler_free(chain)
    best = max(logits.values())
    weights = {token: math.exp(logit - best) for token, logit in logits.items() if logit > -math.inf}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def our_distribution(row: np.ndarray, history: list[int], p: SamplingParams) -> dict[int, float]:
    ids, probabilities = distribution(penalise(row, history, p) if p.penalised else row, p)
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


GRID: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.2, "temperature": 3.0},  # min-p before the temperature
    {"top_k": 8, "top_p": 0.8},  # top-p of what top-k left
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 1.5},
    {"repeat_penalty": 1.3},
    {"repeat_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -2.0, "frequency_penalty": 0.5, "repeat_penalty": 1.1},
    {"repeat_penalty": 1.5, "penalty_last_n": 3},
    {"repeat_penalty": 1.5, "penalty_last_n": 0},
    {"repeat_penalty": 1.4, "frequency_penalty": 0.4, "top_k": 10, "top_p": 0.9, "min_p": 0.02, "temperature": 0.6},
]
HISTORY = [3, 7, 7, 12, 3, 3, 41, 59, 0, 12]


@pytest.mark.parametrize("options", GRID, ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_distribution_is_that_of_llama_cpps_default_chain(options: dict[str, Any], seed: int) -> None:
    row, p = random_row(seed), params(**options)
    ours, theirs = our_distribution(row, HISTORY, p), llama_distribution(row, HISTORY, p)
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_distribution_is_sorted_and_sums_to_one() -> None:
    ids, p = distribution(random_row(1), params(top_k=30, top_p=0.97))
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert (np.diff(p) <= 0).all()
    assert len(set(ids.tolist())) == len(ids)


def critical_chi_square(n_free: int, z: float = 3.7) -> float:
    """The chi-square value that chance exceeds once in 10,000 times (Wilson and Hilferty)."""
    return float(n_free * (1 - 2 / (9 * n_free) + z * math.sqrt(2 / (9 * n_free))) ** 3)


@pytest.mark.parametrize("options", GRID, ids=repr)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    row, p, n = random_row(11, 24, spread=1.5), params(seed=5, **options), 4000
    history = [token % 24 for token in HISTORY]
    sampler = Sampler(p)
    seen = Counter(sampler.choose(row, history, i) for i in range(n))
    expected = {token: n * share for token, share in llama_distribution(row, history, p).items()}
    assert seen.keys() <= expected.keys()
    common = [token for token in expected if expected[token] >= 5]
    rare = [token for token in expected if expected[token] < 5]
    cells = [(seen[token], expected[token]) for token in common]
    if sum(expected[token] for token in rare) >= 1:
        cells.append((sum(seen[token] for token in rare), sum(expected[token] for token in rare)))
    if len(cells) > 1:
        assert sum((s - e) ** 2 / e for s, e in cells) < critical_chi_square(len(cells) - 1)


def test_the_chi_square_would_notice_a_wrong_temperature() -> None:
    row, n = random_row(11, 24, spread=1.5), 4000
    sampler = Sampler(params(seed=5, temperature=1.1))
    seen = Counter(sampler.choose(row, [], i) for i in range(n))
    expected = llama_distribution(row, [], params())
    assert sum((seen[t] - n * p) ** 2 / (n * p) for t, p in expected.items()) > critical_chi_square(23)


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"seed": 3}])
def test_temperature_zero_is_the_argmax_whatever_the_filters(options: dict[str, Any]) -> None:
    row = random_row(2)
    assert Sampler(SamplingParams(temperature=0, **options)).choose(row, [], 0) == int(row.argmax())


def test_temperature_zero_comes_after_the_penalties() -> None:
    row = np.array([1.0, 0.9, 0.1], np.float32)
    assert Sampler(SamplingParams(presence_penalty=0.5)).choose(row, [0], 0) == 1
    assert Sampler(SamplingParams(presence_penalty=0.5)).choose(row, [2], 0) == 0


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    row = random_row(2)
    sampler = Sampler(params(temperature=temperature, seed=0))
    assert {sampler.choose(row, [], i) for i in range(20)} == {int(row.argmax())}


def test_a_seed_fixes_the_draws_and_none_does_not() -> None:
    row = random_row(4, spread=0.5)

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(params(seed=seed))
        return [sampler.choose(row, [], i) for i in range(40)]

    assert draws(1) == draws(1) != draws(2)
    assert draws(None) != draws(None)


def test_penalties_leave_the_row_alone() -> None:
    row = random_row(5)
    before = row.copy()
    Sampler(params(repeat_penalty=2.0, seed=0)).choose(row, HISTORY, 0)
    assert (row == before).all()


def test_the_window_says_how_much_history_counts() -> None:
    assert Sampler(params()).window == 0
    assert Sampler(params(repeat_penalty=1.1, penalty_last_n=20)).window == 20
    assert Sampler(params(repeat_penalty=1.1, penalty_last_n=0)).window == 0


def test_the_defaults_are_llama_cpps_at_temperature_zero() -> None:
    assert SamplingParams() == SamplingParams(0.0, 40, 0.95, 0.05, 1.0, 0.0, 0.0, 64, None)


BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 2.5),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repeat_penalty", 0),
    ("repeat_penalty", math.inf),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -math.inf),
    ("penalty_last_n", -1),
    ("penalty_last_n", 0.5),
    ("seed", -1),
    ("seed", 1.5),
    ("seed", "x"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_an_impossible_value_is_refused_in_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert message.endswith(".")
    assert "\n" not in message
    assert isinstance(caught.value, LocalspecError)


def test_numpy_numbers_are_numbers() -> None:
    p = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int32(1))
    assert Sampler(p).choose(random_row(0), [], 0) in range(N_VOCAB)
