"""The default pair: a real model, a real drafter, the same words. `make test` has pulled the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_accept import chi_square

import localspec
from localspec.engine import paths
from localspec.engine.accept import rejection
from localspec.engine.paths import NOTHING
from localspec.engine.sampling import Sampler, SamplingParams
from localspec.engine.stats import total
from localspec.evaluation import prompts
from localspec.evaluation.check import check
from localspec.hub import registry
from localspec.llama import quantize, read_header
from localspec.loading.open import open_pair
from localspec.pair import Pair

OWN = [text for some in prompts.own().values() for text in some if len(text) < 1000]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with localspec.load(n_ctx=2048) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("path", "draft_max"), [("greedy", 2), ("greedy", 7), ("expected", 7), ("tree", 16), ("tree", 32), ("auto", None)]
)
def test_the_words_are_those_of_plain_decoding(pair: Pair, path: str, draft_max: int | None) -> None:
    report = check(pair, OWN, max_tokens=60, path=path, draft_max=draft_max)
    for d in report.details:
        print(d)
    assert report.prompts == 8
    assert report.different == 0


def test_after_trees_the_memory_is_that_of_plain_decoding_to_the_last_bit(pair: Pair) -> None:
    """Rejected branches lie between kept tokens; had later tokens filled their cells, the last bits would differ."""
    for prompt in OWN:
        ids = pair.encode(prompt)
        rows = []
        for options in ({"path": "tree", "draft_max": 16}, {"spec": False}):
            pair.engine.forget()
            said = pair.generate(ids, max_tokens=80, **options).tokens
            pair.engine.start([*ids, *said], spec=False)
            rows.append(pair.engine.target.verify(pair.engine.tokens[-1], NOTHING)[0].copy())
            pair.engine.target.commit([0])
            pair.engine.forget()
        assert np.array_equal(*rows)


def test_rejection_on_the_real_pair_leaves_the_targets_distribution(pair: Pair) -> None:
    """The first two tokens, 20,000 times: drawn from the real pool, judged by the real logits behind each first one."""
    assert pair.engine.drafter is not None
    sampler = Sampler(SamplingParams(temperature=0.8, seed=7))
    ids = pair.encode("Write a sentence about the sea.")
    ids += pair.generate(ids, max_tokens=9, spec=False).tokens  # there pool and target agree in part
    pair.engine.start(ids, spec=True)
    pool = pair.engine.drafter.draft(ids[-1], 7)
    first_row = pair.engine.target.verify(ids[-1], NOTHING)[0].copy()
    pair.engine.target.commit([0])
    firsts, p = sampler.distribution(first_row, ids)
    second_rows = rows_behind(pair, firsts.tolist())
    joint = {
        (first, int(second)): float(p_first * p_second)
        for first, p_first in zip(firsts.tolist(), p, strict=True)
        for second, p_second in zip(*sampler.distribution(second_rows[first], ids), strict=True)
    }
    seen: Counter[tuple[int, ...]] = Counter()
    n_accepted = 0
    for _ in range(20_000):
        path = paths.sampled(pool, 1, sampler.weigh, sampler.draft)
        behind = second_rows.get(path.tokens[0], first_row)  # not looked at where p of the first is 0
        said, _ = rejection(np.stack([first_row, behind]), path, sampler.distribution, sampler)
        n_accepted += len(said) - 1
        if len(said) == 1:
            said.append(draw(*sampler.distribution(second_rows[said[0]], said), sampler.residual))
        seen[said[0], said[1]] += 1
    assert 1000 < n_accepted < 19_000, "no case of one of the two kinds"
    assert chi_square(seen, joint) < 3.7


def draw(ids: np.ndarray, p: np.ndarray, random: np.random.Generator) -> int:
    return int(random.choice(ids, p=p))


def rows_behind(pair: Pair, tokens: list[int]) -> dict[int, np.ndarray]:
    """The target's logits behind the prompt and each of `tokens`, many sequences in one batch."""
    target, rows = pair.engine.target, {}
    n = target.n_past
    target.rewind(n - 1)
    for start in range(0, len(tokens), 16):
        some = tokens[start : start + 16]
        logits = target.verify(pair.engine.tokens[-1], paths.Tree(some, [-1] * len(some), [0.1] * len(some)))
        rows |= {token: row.copy() for token, row in zip(some, logits[1:], strict=True)}
        target.commit([0])
        target.rewind(n - 1)
    pair.engine.forget()
    return rows


def test_the_drafter_is_real(pair: Pair) -> None:
    stats = total(pair.generate(prompt, max_tokens=60, path="greedy").stats for prompt in OWN)
    assert stats.acceptance_length > 1.3  # a random drafter has 1.00
    assert stats.acceptance_per_slot[0] > 0.25


def test_a_second_turn_reads_only_what_is_new(pair: Pair) -> None:
    chat = pair.chat(system="Answer in one sentence.")
    first = chat.send("What is the capital of France?", max_tokens=30, path="greedy")
    second = chat.send("And of Italy?", max_tokens=30, path="greedy")
    assert first.stats.cached_n < 10
    assert second.stats.cached_n >= first.stats.prompt_n + first.stats.predicted_n - 2
    assert second.stats.prompt_n < 30
    assert pair.engine.drafter is not None
    assert pair.engine.drafter.n_past == pair.engine.target.n_past


def test_at_a_temperature_the_seed_decides(pair: Pair) -> None:
    said = [pair.generate("Tell me a joke.", max_tokens=40, temperature=1.0, seed=seed).text for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_gives_the_words_of_plain_decoding(pair: Pair, seed: int) -> None:
    options = {"max_tokens": 60, "temperature": 0.8, "seed": seed}
    plain = pair.generate("Write a haiku about rain.", spec=False, **options)
    assert pair.generate("Write a haiku about rain.", path="greedy", **options).tokens == plain.tokens


def test_the_drafter_file_says_whose_it_is_and_is_small() -> None:
    entry = registry.get(registry.DEFAULT)
    header = read_header(entry.drafter_path())
    assert header.n_bytes < 30e6
    assert header.arch == "dflash"
    assert str(header.get("localspec.target_name")).endswith(".gguf")
    assert (entry.drafter_path().parent / "README.md").is_file()


@pytest.mark.parametrize("exact", [False, True])
def test_an_encoding_whose_kernels_are_not_exact_everywhere(tmp_path: Path, exact: bool) -> None:
    entry = registry.get(registry.DEFAULT)
    quantize(entry.target_path(), tmp_path / "q4_k_m.gguf", "q4_k_m")
    with open_pair(tmp_path / "q4_k_m.gguf", entry.drafter_path(), n_ctx=1024, exact=exact) as loaded:
        report = check(loaded, OWN[:3], max_tokens=30)
    assert report.different == 0
    assert not exact or report.identical == report.promised == 3
