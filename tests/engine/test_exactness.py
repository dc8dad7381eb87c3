"""Passes that compute a token as if it were alone: measured on real llama.cpp, kept to, and promised in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from localspec.engine.paths import NOTHING, Chain, Tree
from localspec.engine.target import Target
from localspec.errors import OptionError
from localspec.llama import quantize
from localspec.loading.open import open_pair
from localspec.pair import Pair
from localspec.planning import exactness
from localspec.planning.cost_model import CostModel
from localspec.planning.exactness import Exactness, Promise, loss, measure

ENCODINGS = ("f32", "bf16", "q8_0", "q4_k_m", "q5_k_m")
PROMPT = "the user is in the sea and the sand is in his hand, " * 4


@pytest.fixture
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A target whose rows are whole blocks of 256, so that K-quants are what they say, in all encodings."""
    folder = tmp_path_factory.mktemp("encodings")
    plain = tiny.write_target(folder / "f32.gguf", n_embd=512, n_layer=12)
    drafter = tiny.write_drafter(folder / "drafter.gguf", plain)
    for name in ENCODINGS[1:]:
        quantize(plain, folder / f"{name}.gguf", name)
    return {name: (folder / f"{name}.gguf", drafter) for name in ENCODINGS}


@pytest.fixture(scope="module", params=ENCODINGS)
def some(request: pytest.FixtureRequest, files: dict[str, tuple[Path, Path]]) -> Iterator[Pair]:
    """A pair that promises what it measures, whatever this machine computes."""
    with open_pair(*files[request.param], n_ctx=1024, n_threads=1) as pair:
        yield pair


@pytest.fixture(scope="module", params=ENCODINGS)
def exact(request: pytest.FixtureRequest, files: dict[str, tuple[Path, Path]]) -> Iterator[Pair]:
    with open_pair(*files[request.param], n_ctx=1024, n_threads=1, exact=True) as pair:
        yield pair


# --- measured


def rows(target: Target, depth: int, tokens: list[int], draft: Any = NOTHING) -> np.ndarray:
    target.forget()
    target.prefill(tokens[:depth])
    out = target.verify(tokens[depth], draft).copy()
    target.commit([0])
    return out


def test_what_is_measured_holds_behind_another_text(some: Pair) -> None:
    target = some.engine.target
    found = measure(target)
    assert 1 <= found.width <= target.draft_max + 1
    tokens = np.random.default_rng(5).integers(0, 256, 150).tolist()
    target.forget()
    target.prefill(tokens[:100])
    alone = []
    for token in tokens[100 : 100 + found.width]:
        alone.append(target.verify(token, NOTHING)[0].copy())
        target.commit([0])
    for n in range(2, found.width + 1):
        assert np.array_equal(rows(target, 100, tokens, Chain(tokens[101 : 100 + n], [])), alone[:n])
        bush = Tree(tokens[101:102] * (n - 1), [-1] * (n - 1), [])
        if n <= 16:
            assert np.array_equal(rows(target, 100, tokens, bush), [alone[0], *alone[1:2] * (n - 1)])
    if found.reading:
        target.forget()
        target.prefill(tokens[:90])
        for token in tokens[90:100]:
            target.prefill([token])
        assert np.array_equal(target.verify(tokens[100], NOTHING)[0], alone[0])
        target.commit([0])


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_a_pass_that_rounds_differently_is_noticed(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of one of many numbers, from passes over four tokens on."""
    speaker = tiny.write_target(tmp_path / "target.gguf", arch)
    with open_pair(speaker, tiny.write_drafter(tmp_path / "d.gguf", speaker), n_ctx=512, n_threads=1) as pair:
        context, real = pair.engine.target.context, {}

        def hidden(n: int) -> np.ndarray:
            out = np.zeros((n, 288), np.float32)
            out[-1, 7] = np.spacing(np.float32(1)) * (n >= 4)
            return out

        monkeypatch.setattr(context, "hidden", hidden)
        monkeypatch.setattr(context, "logits", lambda n: real.setdefault(n, np.zeros((n, 320), np.float32)))
        assert measure(pair.engine.target).width == 3


def test_too_small_a_context_promises_nothing(tmp_path: Path) -> None:
    speaker = tiny.write_target(tmp_path / "target.gguf")
    with open_pair(speaker, n_ctx=40, n_threads=1) as pair:
        assert measure(pair.engine.target) == Exactness(1, False, 512)


@pytest.mark.usefixtures("nothing_kept")
def test_it_is_measured_once(files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    n_measured, honest = [], exactness.measure
    monkeypatch.setattr(exactness, "measure", lambda target: (n_measured.append(1), honest(target))[1])
    promises = []
    for _ in range(2):
        with open_pair(*files["q8_0"], n_ctx=512, n_threads=1) as pair:
            pair.generate("abc", max_tokens=2, spec=False)
            promises.append(pair.exactness)
    with open_pair(*files["q5_k_m"], n_ctx=512, n_threads=1) as pair:
        pair.generate("abc", max_tokens=2, spec=False)
    assert len(n_measured) == 2
    assert promises[0] == promises[1]


@pytest.mark.usefixtures("nothing_kept")
def test_a_damaged_record_is_measured_anew(files: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    for text in ("{", "[]", '{"width": 0}', '{"width": "a"}', '{"depth": 3}'):
        for record in (tmp_path / "cache" / exactness.KIND).glob("*"):
            record.write_text(text)
        with open_pair(*files["q8_0"], n_ctx=512, n_threads=1) as pair:
            pair.generate("abc", max_tokens=1, spec=False)
            assert pair.exactness.block in (32, 512)


# --- kept to


@pytest.mark.parametrize("path", ["greedy", "tree", "auto", "ngram", "sampled"])
def test_exact_means_the_same_words_whatever_is_drafted(exact: Pair, path: str) -> None:
    plain = exact.generate(PROMPT, max_tokens=60, spec=False)
    drafted = exact.generate(PROMPT, max_tokens=60, path=path)
    width = exact.exactness.width
    assert drafted.tokens == plain.tokens
    assert max(len(draft.tokens) for draft in exact.engine.drafts) < width
    assert drafted.stats.draft_n > 0 or width == 1 or path in ("auto", "ngram")
    assert exact.promise.is_exact


def test_exact_passes_bound_what_may_be_asked_for(exact: Pair) -> None:
    width, drafting = exact.exactness.width, exact.drafting
    assert drafting is not None
    assert drafting.draft_max == min(width - 1, exact.engine.target.draft_max)
    if width <= exact.engine.target.draft_max:
        with pytest.raises(OptionError, match=f"at most {width - 1}"):
            exact.generate("abc", path="tree", draft_max=width)


def state(pair: Pair, ids: list[int]) -> np.ndarray:
    """Logits behind `ids` where the KV cache already holds what it holds."""
    pair.engine.start(ids, spec=False)
    row = pair.engine.target.verify(ids[-1], NOTHING)[0].copy()
    pair.engine.target.commit([0])
    pair.engine.tokens.append(0)
    return row


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_that_begins_like_the_one_before_is_as_if_read_afresh(some: Pair, seed: int) -> None:
    """To the last bit: the same answers follow, whatever is drawn."""
    draw = np.random.default_rng(seed)
    text = draw.integers(0, 256, 700).tolist()
    some.generate(text[:5], max_tokens=1, spec=False)  # now it is known which passes are exact
    some.engine.forget()
    for end, common in zip(draw.integers(2, 700, 6), draw.integers(0, 700, 6), strict=True):
        ids = [*text[:common], *draw.integers(0, 256, 700).tolist()][:end]
        cached = state(some, ids)
        some.forget()
        assert np.array_equal(cached, state(some, ids)), f"{common} of {end} tokens were the same"
        text = ids + text[len(ids) :]


@pytest.mark.parametrize("path", ["greedy", "tree"])
def test_with_exact_later_turns_are_as_if_read_afresh(exact: Pair, path: str) -> None:
    ids = exact.encode(PROMPT)
    for said in ("and then", "no, the other one", "why"):
        answer = exact.generate(ids, max_tokens=40, path=path).tokens
        ids = [*ids, *answer, *exact.encode(said)]
        cached = exact.generate(ids, max_tokens=40, path=path, temperature=0.9, seed=3)
        exact.forget()
        fresh = exact.generate(ids, max_tokens=40, spec=False, temperature=0.9, seed=3)
        assert cached.tokens == fresh.tokens
        ids += fresh.tokens


def test_a_hybrid_is_exact_too(tmp_path: Path) -> None:
    speaker = tiny.write_target(tmp_path / "target.gguf", "qwen35")
    helper = tiny.write_drafter(tmp_path / "drafter.gguf", speaker)
    with open_pair(speaker, helper, n_ctx=512, n_threads=1, exact=True) as pair:
        ids = pair.encode(PROMPT)
        for said in ("and then", "why"):
            plain = pair.generate(ids, max_tokens=30, spec=False).tokens
            assert pair.generate(ids, max_tokens=30, path="greedy").tokens == plain
            ids = [*ids, *plain, *pair.encode(said)]
            cached = pair.generate(ids, max_tokens=30, path="greedy").tokens
            pair.forget()
            assert pair.generate(ids, max_tokens=30, spec=False).tokens == cached


# --- promised


def test_wide_passes_are_left_out_where_they_bring_little() -> None:
    n = np.arange(34)
    flat, steep = 0.02 + 1e-4 * n, 0.01 * n
    draft = [0.0, *[0.01] * 7]
    assert loss(CostModel(flat, draft), 3, 2.5) > 0.3
    assert loss(CostModel(steep, draft), 3, 2.5) == pytest.approx(0, abs=1e-9)
    assert loss(CostModel(flat, draft), 33, 2.5) == 0


@pytest.mark.parametrize(("slope", "widest"), [(1e-4, 33), (1e-2, 3)])
def test_the_default_leaves_exact_passes_only_where_that_pays(
    slope: float, widest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = CostModel(1e-3 + slope * np.arange(34), [0.0, *[1e-3] * 7])
    monkeypatch.setattr(exactness, "measure", lambda target: Exactness(3, False, 32))
    monkeypatch.setattr(CostModel, "prior", lambda *_, **__: costs)
    speaker = tiny.write_target(tmp_path / "target.gguf")
    with open_pair(speaker, tiny.write_drafter(tmp_path / "d.gguf", speaker), n_ctx=1024, n_threads=1) as pair:
        assert pair.promise.widest == widest
        pair.generate("a b a b a b a b a b", max_tokens=200, path="auto")
        assert (max(len(draft.tokens) for draft in pair.engine.drafts) >= 3) == (widest > 3)
        assert pair.generate("abc", max_tokens=20, path="greedy", draft_max=5).stats.draft_n > 0  # said is said


def test_the_promise_in_one_line() -> None:
    inexact, narrow = Exactness(1), Exactness(3)
    assert "\n" not in str(Promise(narrow, 8))
    assert str(Promise(narrow, 8)).startswith("the same words but for near-ties")
    assert "up to 3 tokens" in str(Promise(narrow, 8))
    assert str(Promise(narrow, 3)).startswith("the same words, to the last bit")
    assert str(Promise(inexact, 1, forced=True)).startswith("the same words, to the last bit")
