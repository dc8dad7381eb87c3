"""Measuring the machine, and drafting as it says, on real tiny pairs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from localspec.engine import paths
from localspec.engine.paths import Chain
from localspec.errors import OptionError
from localspec.loading.open import open_pair
from localspec.pair import Pair
from localspec.planning import measure
from localspec.planning.cost_model import CostModel

PROMPT = "abcdefgh"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(folder: Path, arch: str) -> Pair:
    target = tiny.write_target(folder / "target.gguf", arch)
    return open_pair(target, tiny.write_drafter(folder / "drafter.gguf", target), n_ctx=512, n_threads=1)


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_the_automatic_plan_says_the_words_of_plain_decoding(arch: str, tmp_path: Path, cache: Path) -> None:
    with opened(tmp_path, arch) as pair:
        plain = pair.generate(PROMPT, max_tokens=100, spec=False)
        assert pair.generate(PROMPT, max_tokens=100).tokens == plain.tokens
        assert pair.profile is not None
        one, two = (pair.generate(PROMPT, max_tokens=100, temperature=0.8, seed=3, path="sampled") for _ in range(2))
        assert one.tokens == two.tokens


def test_a_machine_is_measured_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, "llama") as pair:
        pair.generate(PROMPT, max_tokens=2)
    assert len(list((cache / "profiles").glob("*"))) == 1
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured again"))
    with open_pair(tmp_path / "target.gguf", tmp_path / "drafter.gguf", n_ctx=512, n_threads=1) as pair:
        pair.generate(PROMPT, max_tokens=2)


def test_only_what_the_planner_decides_needs_measuring(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured"))
    with opened(tmp_path, "llama") as pair:
        for path in ("greedy", "tree", paths.greedy):
            pair.generate(PROMPT, max_tokens=2, path=path)
        pair.generate(PROMPT, max_tokens=2, spec=False)


def test_tune_measures_again_and_forgets(tmp_path: Path, cache: Path) -> None:
    with opened(tmp_path, "llama") as pair:
        pair.generate(PROMPT, max_tokens=30)
        before = pair.profile
        assert before is not None
        after = pair.tune()
        assert after is pair.profile is not before
        assert after.rate == np.inf
        assert len(pair.generate(PROMPT, max_tokens=5).tokens) == 5


def test_a_drafter_that_rests_for_long_falls_behind_and_catches_up(tmp_path: Path, cache: Path) -> None:
    def said(**options: Any) -> list[int]:
        ids.extend(pair.generate(ids, max_tokens=80, **options).tokens)
        return ids[-80:]

    with opened(tmp_path, "llama") as pair:
        profile, drafter, target = pair.tune(), pair.engine.drafter, pair.engine.target
        assert drafter is not None
        ids = pair.encode(PROMPT)
        plain = pair.generate(ids, max_tokens=240, spec=False).tokens
        profile._n_rest, profile._rest = 1000, 1024
        assert said() == plain[:80]
        assert drafter.n_past < 20 < target.n_past
        assert pair.engine.lag(ids) == target.n_past - drafter.n_past
        profile._n_rest = 0
        assert (profile.rests_long, profile.is_doubted) == (False, True)
        assert said() == plain[80:160]
        assert target.n_past - drafter.n_past <= 80, "caught up, for it was not far behind"
        profile._n_rest = 1000
        assert said() == plain[160:]


def test_a_drafter_in_doubt_waits_for_a_new_conversation(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.planning.plans.CATCH_UP", 10)
    with opened(tmp_path, "llama") as pair:
        profile, drafter = pair.tune(), pair.engine.drafter
        assert drafter is not None
        ids = pair.encode(PROMPT)
        ids += pair.generate(ids, max_tokens=60, spec=False).tokens
        profile._rest = 1024
        pair.generate(ids, max_tokens=5)
        assert drafter.n_past < 20
        profile._rest = 32
        pair.generate(ids, max_tokens=5)
        assert drafter.n_past >= 60, "one that is not in doubt reads everything again"


def test_there_is_nothing_to_tune_without_a_drafter(tmp_path: Path, cache: Path) -> None:
    with (
        open_pair(tiny.write_target(tmp_path / "target.gguf"), n_ctx=512, n_threads=1) as pair,
        pytest.raises(OptionError, match="nothing to tune without a drafter"),
    ):
        pair.tune()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:20],
        lambda text: json.dumps(json.loads(text) | {"ngrams": [[[1.0]], [[2.0]]]}),
        lambda text: json.dumps(json.loads(text) | {"costs": {"verify": [0, 1], "draft": 1, "deeper": {}}}),
        lambda text: json.dumps(json.loads(text) | {"costs": json.loads(text)["costs"] | {"draft": 0.005}}),
        lambda text: re.sub(r'("draft": \[0.0, )[^,\]]+', r"\g<1>0.0", text),
    ],
    ids=["cut", "other ngrams", "an older version's", "one draft for all", "a draft in no time"],
)
def test_a_damaged_file_only_means_to_measure_again(tmp_path: Path, cache: Path, damage: Callable[[str], str]) -> None:
    with opened(tmp_path, "llama") as pair:
        pair.generate(PROMPT, max_tokens=2)
    (kept,) = (cache / "profiles").glob("*")
    kept.write_text(damage(kept.read_text()))
    with open_pair(tmp_path / "target.gguf", tmp_path / "drafter.gguf", n_ctx=512, n_threads=1) as pair:
        assert len(pair.generate(PROMPT, max_tokens=5).tokens) == 5
        assert pair.profile is not None
        assert pair.profile.costs.draft[1] > 0


def test_what_a_token_in_memory_costs_is_found_from_two_depths() -> None:
    def stage(depth: float) -> Any:
        seconds = {n: 1.0 + 0.1 * n + depth * (2e-6 + 5e-6 * n) for n in measure.WIDTHS}
        return SimpleNamespace(mean_depth=depth, verify={n: [0.9 * one, one, one] for n, one in seconds.items()})

    a, b = measure._attention(stage(150), stage(700))
    assert (a, b) == pytest.approx((2e-6, 5e-6))
    costs = CostModel([0, 1.1, 1.2], [0, 0.5], attention=(a, b))
    assert costs.at(1000)[2] == pytest.approx(1.2 + 1000 * (a + 2 * b))
    assert CostModel(**costs.to_json()).at(1000).tolist() == costs.at(1000).tolist()


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_what_is_read_from_a_pass_over_one_token_is_what_is_read_from_any(arch: str, tmp_path: Path) -> None:
    """`Target.features` has a shorter way for one token."""
    with opened(tmp_path, arch) as pair:
        target = pair.engine.target
        target.expose_features(True)
        target.verify(5, Chain([], []))
        alone = target.features([0]).copy()
        views = [target.context.layer_input(layer, 1) for layer in target.layers]
        assert np.array_equal(alone, np.concatenate(views, axis=1))
        assert target.features([]).shape == (0, alone.shape[1])


def test_stairs_never_fall_and_measuring_leaves_no_trace(tmp_path: Path, cache: Path) -> None:
    with opened(tmp_path, "llama") as pair:
        drafter = pair.engine.drafter
        assert drafter is not None
        costs = measure.measure(pair.engine.target, drafter)
        assert len(costs.verify) == pair.engine.target.draft_max + 2 == 34
        assert costs.verify.tolist() == sorted(costs.verify)
        assert costs.verify[0] == 0 == costs.draft[0]
        assert costs.draft.tolist() == sorted(costs.draft)
        assert len(costs.draft) == drafter.block_size
        assert (pair.engine.target.n_past, drafter.n_past) == (0, 0)
