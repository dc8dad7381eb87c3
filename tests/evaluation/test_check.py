"""What `localspec check` calls the same, a near-tie, and different: on real llama.cpp, with faults put in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from localspec.engine import generate
from localspec.evaluation.check import Checked, Report, check, compare
from localspec.loading.open import open_pair
from localspec.pair import Pair
from localspec.planning import exactness
from localspec.planning.exactness import Exactness

PROMPT = "the user is in the sea"
N = 100


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    target = tiny.write_target(tmp_path / "target.gguf")
    return target, tiny.write_drafter(tmp_path / "drafter.gguf", target)


@pytest.fixture
def rough(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A pair whose kernels round coarsely, and each width in its own way."""
    with opened(files, monkeypatch, Exactness(1)) as pair:
        verify = pair.engine.target.verify

        def rounded(anchor: int, draft: Any) -> np.ndarray:
            rows = verify(anchor, draft)
            n = len(rows)
            return rows + (1.2 * np.sin(40 * n * rows) if n > 1 else 0)

        monkeypatch.setattr(pair.engine.target, "verify", rounded)
        yield pair


def opened(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, promised: Exactness) -> Pair:
    monkeypatch.setattr(exactness, "measure", lambda _: promised)
    return open_pair(*files, n_ctx=512, n_threads=1)


def test_a_near_tie_is_shown_and_what_follows_is_judged_too(rough: Pair) -> None:
    checked = compare(rough, 3, PROMPT, max_tokens=N)
    assert len(checked.differences) > 1
    assert not checked.is_different
    assert not checked.promised
    plain = rough.generate(PROMPT, max_tokens=N, spec=False).tokens
    assert [d.position for d in checked.differences] == sorted({d.position for d in checked.differences})
    first = checked.differences[0]
    assert (first.prompt, first.plain_token, first.width) == (3, plain[first.position], 8)
    for d in checked.differences:
        assert d.near_tie
        assert d.logits is not None
        assert d.logits_batched is not None
        assert d.logits[0] >= d.logits[1]
        assert d.logits_batched[1] >= d.logits_batched[0]


def test_near_ties_are_no_excuse_for_believing_every_draft(rough: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "sample_and_match", credulous(generate.sample_and_match))
    checked = [compare(rough, 0, text, max_tokens=N) for text in (PROMPT, "hello", "a b c")]
    assert all(one.is_different for one in checked)


def test_near_ties_are_no_excuse_for_a_kv_cache_that_went_wrong(rough: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was verified is decoded again without the engine's state."""
    honest = rough.engine.round

    def forgetful(*args: Any) -> Any:
        done = honest(*args)
        if done[0].n_drafted and rough.engine.target.n_past > 20:
            rough.engine.target.rewind(rough.engine.target.n_past - 3)
            rough.engine.target.prefill([7, 7, 7])
        return done

    monkeypatch.setattr(rough.engine, "round", forgetful)
    assert compare(rough, 0, PROMPT, max_tokens=N).is_different


def test_where_bits_are_promised_no_difference_is_small_enough(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(files, monkeypatch, Exactness(33, True, 32)) as pair:
        verify, n_calls = pair.engine.target.verify, []

        def slightly_off(anchor: int, draft: Any) -> np.ndarray:
            rows = verify(anchor, draft).copy()
            if len(rows) > 1 and not n_calls:  # the two best of the first row change places, by one last bit
                n_calls.append(1)
                second, first = np.argsort(rows[0])[-2:]
                rows[0, second] = np.nextafter(rows[0, first], np.float32(np.inf))
            return rows

        monkeypatch.setattr(pair.engine.target, "verify", slightly_off)
        checked = compare(pair, 0, PROMPT, max_tokens=8)
        assert checked.is_different
        assert checked.differences[0].promised


def test_within_exact_passes_bits_are_promised(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(files, monkeypatch, Exactness(3, False, 32)) as pair:
        assert compare(pair, 0, PROMPT, max_tokens=4, draft_max=2).promised
        assert not compare(pair, 0, PROMPT, max_tokens=4, draft_max=3).promised


def credulous(honest: Any) -> Any:
    """A bug: whatever was drafted is believed."""

    def believe(rows: Any, draft: Any, choose: Any) -> Any:
        n = len(draft.tokens)
        return ([*draft.tokens, 0], list(range(n + 1))) if n else honest(rows, draft, choose)

    return believe


@pytest.mark.parametrize("path", ["greedy", "expected", "tree"])
def test_an_honest_pair_is_never_different(files: tuple[Path, Path], path: str) -> None:
    """By what this machine really computes."""
    with open_pair(*files, n_ctx=512, n_threads=1) as pair:
        report = check(pair, [PROMPT, "hello"], max_tokens=N, path=path)
    assert report.prompts == report.identical + report.near_ties == 2


def test_a_prompt_counts_by_the_worst_that_was_found(rough: Pair) -> None:
    near = compare(rough, 0, PROMPT, max_tokens=N)
    report = Report(rough.promise, [near, Checked([], promised=True)])
    figures = report.as_dict()
    assert {name: figures[name] for name in ("prompts", "promised", "identical", "near_ties", "different")} == {
        "prompts": 2,
        "promised": 1,
        "identical": 1,
        "near_ties": 1,
        "different": 0,
    }
    assert figures["promise"]["width"] == 1
    assert len(figures["details"]) == len(near.differences)
