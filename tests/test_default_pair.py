"""The default pair: a real model, a real drafter, the same words. `make test` has pulled the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import localspec
from localspec import models, prompts
from localspec.check import check
from localspec.llama import read_header
from localspec.pair import Pair
from localspec.stats import total


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with localspec.load(n_ctx=2048) as loaded:
        yield loaded


@pytest.mark.parametrize("draft_max", [2, 7])
def test_the_words_are_those_of_plain_decoding(pair: Pair, draft_max: int) -> None:
    report = check(pair, prompts.own(), max_tokens=60, draft_max=draft_max)
    for d in report.details:
        print(d)
    assert report.prompts == 5
    assert report.different == 0


def test_the_drafter_is_real(pair: Pair) -> None:
    stats = total(pair.generate(prompt, max_tokens=60, draft_max=7).stats for prompt in prompts.own())
    assert stats.acceptance_length > 1.3  # a random drafter has 1.00
    assert stats.acceptance_per_slot[0] > 0.25


def test_a_second_turn_reads_only_what_is_new(pair: Pair) -> None:
    chat = pair.chat(system="Answer in one sentence.")
    first = chat.send("What is the capital of France?", max_tokens=30, draft_max=7)
    second = chat.send("And of Italy?", max_tokens=30, draft_max=7)
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
    assert pair.generate("Write a haiku about rain.", draft_max=7, **options).tokens == plain.tokens


def test_the_drafter_file_says_whose_it_is_and_is_small() -> None:
    entry = models.get(models.DEFAULT)
    header = read_header(entry.drafter_path())
    assert header.n_bytes < 30e6
    assert header.arch == "dflash"
    assert str(header.get("localspec.target_name")).endswith(".gguf")
    assert (entry.drafter_path().parent / "README.md").is_file()
