"""When the machine is measured, what is kept of it, and drafting as it says, on real tiny pairs."""

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
from localspec.loading import trial_child
from localspec.loading.open import open_pair
from localspec.pair import Pair
from localspec.planning import measure
from localspec.planning import quiet as quiet_module
from localspec.planning.cost_model import CostModel
from localspec.planning.exactness import BLOCK
from localspec.planning.keeper import WAIT_S
from localspec.planning.measure import Measuring
from localspec.planning.parking import Parking, State
from localspec.planning.profile import Source
from localspec.planning.quiet import Others

PROMPT = "abcdefgh"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(folder: Path, arch: str) -> Pair:
    target = tiny.write_target(folder / "target.gguf", arch)
    return open_pair(target, tiny.write_drafter(folder / "drafter.gguf", target), n_ctx=512, n_threads=1)


def again(folder: Path) -> Pair:
    return open_pair(folder / "target.gguf", folder / "drafter.gguf", n_ctx=512, n_threads=1)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on this machine."""
    monkeypatch.setattr(Others, "share", 0.0)
    monkeypatch.setattr(measure, "SPREAD", np.inf)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measuring, "run", lambda _: pytest.fail("measured"))


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
@pytest.mark.parametrize("measured", [False, True])
def test_the_automatic_plan_says_the_words_of_plain_decoding(
    arch: str, measured: bool, tmp_path: Path, cache: Path
) -> None:
    with opened(tmp_path, arch) as pair:
        plain = pair.generate(PROMPT, max_tokens=100, spec=False)
        if measured:
            pair.tune()
        for _ in range(3):
            assert pair.generate(PROMPT, max_tokens=100).tokens == plain.tokens
        assert pair.profile is not None
        one, two = (pair.generate(PROMPT, max_tokens=100, temperature=0.8, seed=3, path="sampled") for _ in range(2))
        assert one.tokens == two.tokens


def test_no_answer_waits_until_measuring_is_worth_it(tmp_path: Path, cache: Path, unmeasured: None) -> None:
    with opened(tmp_path, "llama") as pair:
        for path in ("auto", "ngram", "greedy", "tree", paths.greedy):
            pair.generate(PROMPT, max_tokens=20, path=path)
        pair.generate(PROMPT, max_tokens=2, spec=False)
        assert pair.profile is not None
        assert pair.profile.source is Source.PRIOR
        assert 0 < pair.profile.unmeasured_s < WAIT_S
        seen = pair.profile.unmeasured_s
    with again(tmp_path) as pair:
        assert pair.profile is not None
        assert pair.profile.unmeasured_s == seen, "in later sessions, too"


def test_trying_files_in_a_child_measures_nothing(tmp_path: Path, cache: Path, unmeasured: None) -> None:
    with opened(tmp_path, "llama"):
        pass
    trial_child.run(0, tmp_path / "target.gguf", tmp_path / "drafter.gguf")
    assert not list((cache / "profiles").glob("*"))


def test_a_machine_is_measured_once(tmp_path: Path, cache: Path, quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, "llama") as pair:
        pair.settle()
        assert pair.profile is not None
        assert pair.profile.source is Source.QUIET
    assert len(list((cache / "profiles").glob("*"))) == 1
    monkeypatch.setattr(Measuring, "run", lambda _: pytest.fail("measured again"))
    with again(tmp_path) as pair:
        assert pair.profile is not None
        pair.profile.unmeasured_s = 1e9
        pair.settle()
        pair.generate(PROMPT, max_tokens=2)


def test_after_some_seconds_of_answers_the_next_one_is_measured_for(tmp_path: Path, cache: Path, quiet: None) -> None:
    with opened(tmp_path, "llama") as pair:
        first = pair.generate(PROMPT, max_tokens=40).tokens
        assert pair.profile is not None
        pair.profile.unmeasured_s = WAIT_S + 1
        assert pair.generate(PROMPT, max_tokens=40).tokens == first
        assert (pair.profile.source, pair.profile.n_attempts) == (Source.QUIET, 1)


def test_measuring_between_two_turns_costs_no_second_reading(tmp_path: Path, cache: Path, quiet: None) -> None:
    with opened(tmp_path, "llama") as pair:
        ids = pair.encode(PROMPT)
        ids += pair.generate(ids, max_tokens=40).tokens
        plain = pair.generate(ids, max_tokens=40, spec=False).tokens
        pair.settle()
        result = pair.generate(ids, max_tokens=40)
        assert result.tokens == plain
        whole_blocks = (len(ids) - 1) // BLOCK * BLOCK  # float32 products round by width: no part of one is used again
        assert result.stats.cached_n >= whole_blocks > 0


def test_what_was_measured_on_a_busy_machine_is_used_and_measured_again(
    tmp_path: Path, cache: Path, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Others, "share", 0.5)
    with opened(tmp_path, "llama") as pair:
        pair.settle()
        assert pair.profile is not None
        before = pair.profile.costs.to_json()
        assert pair.profile.source is Source.BUSY
    with again(tmp_path) as pair, monkeypatch.context() as patched:
        patched.setattr(Measuring, "run", lambda _: pytest.fail("measured while it is busy"))
        pair.settle()
        assert pair.profile is not None
        assert pair.profile.costs.to_json() == before
    monkeypatch.setattr(Others, "share", 0.0)
    with again(tmp_path) as pair:
        pair.settle()
        assert pair.profile is not None
        assert (pair.profile.source, pair.profile.n_attempts) == (Source.QUIET, 2)


def test_what_others_use_is_a_share_of_all_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet_module, "_others_s", iter([100.0, 103.0]).__next__)
    monkeypatch.setattr(quiet_module, "perf_counter", iter([0.0, 10.0]).__next__)
    monkeypatch.setattr(quiet_module.os, "cpu_count", lambda: 2)
    assert Others().share == pytest.approx(0.15)


def test_where_the_system_does_not_tell_nobody_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Any:
        raise PermissionError

    monkeypatch.setattr(quiet_module.psutil, "cpu_times", refused)
    assert not Others().are_busy


def test_repeats_that_lie_far_apart_tell_that_something_else_runs(
    tmp_path: Path, cache: Path, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, "llama") as pair:
        monkeypatch.setattr(measure, "SPREAD", 0.15)
        monkeypatch.setattr(measure._Stage, "spread", 0.3)
        pair.settle()
        assert pair.profile is not None
        assert pair.profile.source is Source.BUSY


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, cache: Path, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, repeat, calls = measure._Stage, measure._Stage._repeat, []

    def interrupted(self: Any) -> None:
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        repeat(self)

    monkeypatch.setattr(stage, "_repeat", interrupted)
    with opened(tmp_path, "llama") as pair:
        plain = pair.generate(PROMPT, max_tokens=30, spec=False).tokens
        with pytest.raises(KeyboardInterrupt):
            pair.settle()
        assert pair.profile is not None
        assert pair.profile.source is Source.BUSY
        assert not pair.profile.costs.is_scaling
        assert pair.generate(PROMPT, max_tokens=30).tokens == plain
    (kept,) = (cache / "profiles").glob("*")
    assert json.loads(kept.read_text())["source"] == "busy"


def test_widths_that_cannot_be_reached_in_time_are_extrapolated(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "BUDGET_S", 0.0)
    with opened(tmp_path, "llama") as pair:
        drafter, target = pair.engine.drafter, pair.engine.target
        assert drafter is not None
        stage = measure._Stage(target, drafter, 64)
        stage.run()
        assert list(stage.verify) == [1, 2, 3, 4]
    seconds = measure._prolonged(np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.5, 2.5]), 6)
    assert seconds.tolist() == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]


def test_tune_measures_again_and_forgets(tmp_path: Path, cache: Path) -> None:
    with opened(tmp_path, "llama") as pair:
        pair.generate(PROMPT, max_tokens=30)
        before = pair.profile
        assert before is not None
        before.parking = Parking(State.RESTING, -3.0)
        after = pair.tune()
        assert after is pair.profile is not before
        assert (after.source is Source.PRIOR, after.parking.to_json()) == (False, Parking().to_json())
        assert len(pair.generate(PROMPT, max_tokens=5).tokens) == 5


def test_a_drafter_that_rests_falls_behind_and_catches_up(tmp_path: Path, cache: Path) -> None:
    def said(**options: Any) -> list[int]:
        ids.extend(pair.generate(ids, max_tokens=80, **options).tokens)
        return ids[-80:]

    with opened(tmp_path, "llama") as pair:
        profile, drafter, target = pair.profile, pair.engine.drafter, pair.engine.target
        assert profile is not None
        assert drafter is not None
        ids = pair.encode(PROMPT)
        plain = pair.generate(ids, max_tokens=240, spec=False).tokens
        profile.parking = Parking(State.RESTING, 0.0)
        assert said() == plain[:80]
        assert drafter.n_past < 20 < target.n_past
        assert pair.engine.lag(ids) == target.n_past - drafter.n_past
        profile.parking.balance = 1000.0
        assert said() == plain[80:160]
        assert target.n_past - drafter.n_past <= 80, "caught up"
        assert profile.parking.balance < 1000 - 8, "and paid for that"
        profile.parking = Parking(State.RESTING, 0.0)
        assert said() == plain[160:]


def test_a_drafter_that_stops_paying_is_left_behind_at_once(tmp_path: Path, cache: Path) -> None:
    with opened(tmp_path, "llama") as pair:
        profile, drafter = pair.tune(), pair.engine.drafter
        assert drafter is not None
        profile.parking = Parking(State.DRAFTING, 0.0)
        said = pair.generate(PROMPT, max_tokens=100).tokens
        assert profile.parking.is_resting, "a random drafter loses"
        assert drafter.n_past + 50 < pair.engine.target.n_past
        assert said == pair.generate(PROMPT, max_tokens=100, spec=False).tokens


def test_catching_up_that_is_too_dear_waits_for_a_new_conversation(tmp_path: Path, cache: Path) -> None:
    with opened(tmp_path, "llama") as pair:
        profile, drafter = pair.profile, pair.engine.drafter
        assert profile is not None
        assert drafter is not None
        ids = pair.encode(PROMPT)
        ids += pair.generate(ids, max_tokens=60, spec=False).tokens
        profile.parking = Parking(State.RESTING, 20.0)  # each of 60 tokens costs 0.61 plain rounds
        pair.generate(ids, max_tokens=5)
        assert drafter.n_past < 20
        profile.parking = Parking(State.RESTING, 60.0)
        pair.generate(ids, max_tokens=5)
        assert drafter.n_past >= 60


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
def test_a_damaged_file_only_means_to_begin_anew(tmp_path: Path, cache: Path, damage: Callable[[str], str]) -> None:
    with opened(tmp_path, "llama") as pair:
        pair.generate(PROMPT, max_tokens=2)
    (kept,) = (cache / "profiles").glob("*")
    kept.write_text(damage(kept.read_text()))
    with again(tmp_path) as pair:
        assert len(pair.generate(PROMPT, max_tokens=5).tokens) == 5
        assert pair.profile is not None
        assert pair.profile.source is Source.PRIOR
        assert min(pair.profile.costs.draft[1:]) > 0


def test_what_a_token_in_the_cache_costs_is_found_from_two_depths() -> None:
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


def test_costs_never_fall_and_measuring_leaves_no_trace(tmp_path: Path, cache: Path) -> None:
    with opened(tmp_path, "llama") as pair:
        drafter = pair.engine.drafter
        assert drafter is not None
        measuring = Measuring(pair.engine.target, drafter)
        assert measuring.result() is None
        measuring.run()
        found = measuring.result()
        assert found is not None
        costs = found.costs
        assert len(costs.verify) == pair.engine.target.draft_max + 2 == 34
        assert costs.verify.tolist() == sorted(costs.verify)
        assert costs.verify[0] == 0 == costs.draft[0]
        assert costs.draft.tolist() == sorted(costs.draft)
        assert len(costs.draft) == drafter.block_size
        assert (pair.engine.target.n_past, drafter.n_past) == (0, 0)
