"""A target's layer inputs, handed out by llama.cpp or taken from its graph by name: the same rows, the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray

from localspec.errors import BackendError, PairError
from localspec.llama import Context, Model, context, layer_inputs, native
from localspec.loading.open import open_pair
from localspec.pair import Pair

OWN = ("llama", "qwen3", "qwen35")
NAMED = ("qwen2", "gemma3", "phi3", "granite", "olmo2", "mistral3")
HOW = ("in C", "in Python")
LAYERS = [1, 3]
PROMPT = "the user is in the sea and the sand is in his hand"
Rows = NDArray[np.float32]


def take_by_name(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Have contexts take layer inputs by name, whatever llama.cpp hands out."""
    monkeypatch.setattr(context, "hands_out", lambda model: False)
    if how == "in C":
        assert native.state().library is not None
    else:
        monkeypatch.setattr(layer_inputs.native, "state", lambda: native.State(None, "off"))


@pytest.fixture(params=HOW)
def by_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    take_by_name(monkeypatch, request.param)


def rows(ctx: Context, n: int) -> Rows:
    """All layers' inputs of the last decode, [n, layers · n_embd]."""
    return np.concatenate([ctx.layer_input(layer, n) for layer in LAYERS], axis=1)


def one(ctx: Context) -> Rows:
    """The same for a decode of one token, by the shorter way."""
    out = np.zeros(len(LAYERS) * ctx.model.n_embd, np.float32)
    ctx.copy_layer_inputs(LAYERS, out)
    return out[None]


def prefill(ctx: Context) -> Iterator[Rows]:
    """Chunks of different lengths without logits, then tokens one by one, then several with some logits."""
    pos = 0
    for n in (64, 7, 64, 1):
        ctx.decode(np.arange(n, dtype=np.int32), pos, output=False)
        yield rows(ctx, n)
        pos += n
    ctx.decode([5], pos)
    yield one(ctx)
    ctx.decode([6, 7, 8], pos + 1, output=np.array([0, 1, 0], np.int8))
    yield rows(ctx, 3)


def tree(ctx: Context) -> Iterator[Rows]:
    """Two ways behind a common past in one batch."""
    ctx.decode([1, 2, 3], 0, output=False)
    ctx.copy(0, 1)
    ctx.decode([4, 5, 6, 7], np.array([3, 4, 4, 5], np.int32), seq=[[0, 1], [0], [1], [0]])
    yield rows(ctx, 4)


def at_once(ctx: Context) -> Iterator[Rows]:
    """One token of each of four sequences, behind pasts of their own."""
    for seq in range(4):
        ctx.decode([seq, 2 * seq], 0, seq=seq, output=False)
    ctx.decode([9, 8, 7, 6], np.full(4, 2, np.int32), seq=np.arange(4, dtype=np.int32))
    yield rows(ctx, 4)


WAYS: dict[str, tuple[Callable[[Context], Iterator[Rows]], dict[str, Any]]] = {
    "prefill": (prefill, {}),
    "tree": (tree, {"n_seq": 3}),
    "at once": (at_once, {"n_seq": 4, "unified": False}),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("arch", "way"), [(a, w) for a in OWN for w in WAYS if (a, w) != ("qwen35", "tree")])
def test_rows_by_name_are_those_llama_cpp_hands_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, way: str, how: str
) -> None:
    walk, options = WAYS[way]
    path = tiny.write_target(tmp_path / "target.gguf", arch)

    def walked() -> list[Rows]:
        settings = {"n_ctx": 1024, "n_batch": 64, "layers": LAYERS, "n_threads": 2} | options
        with Model(path) as model, Context(model, **settings) as ctx:
            for layer in LAYERS:
                ctx.want_layer_input(layer, True)
            return list(walk(ctx))

    expected = walked()
    take_by_name(monkeypatch, how)
    found = walked()
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_is_not_wanted_is_not_taken(tmp_path: Path, by_name: None) -> None:
    path = tiny.write_target(tmp_path / "target.gguf")
    with Model(path) as model, Context(model, n_ctx=256, n_batch=64, layers=LAYERS) as ctx:
        ctx.decode([1, 2], 0)
        with pytest.raises(BackendError, match="no output"):
            ctx.layer_input(1, 2)
        ctx.want_layer_input(1, True)
        ctx.decode([3, 4], 2)
        assert ctx.layer_input(1, 2).any()
        with pytest.raises(BackendError, match="no output"):
            ctx.layer_input(3, 2)
        ctx.want_layer_input(1, False)
        ctx.decode([5, 6], 4)
        with pytest.raises(BackendError, match="no output"):
            ctx.layer_input(1, 2)


def test_a_layer_that_no_output_leads_to_is_refused(tmp_path: Path, by_name: None) -> None:
    path = tiny.write_target(tmp_path / "target.gguf")
    with Model(path) as model, pytest.raises(PairError, match="layer 0 of llama models"):
        Context(model, n_ctx=256, n_batch=64, layers=[0, 1])


def test_trying_leaves_the_memory_empty(tmp_path: Path, by_name: None) -> None:
    path = tiny.write_target(tmp_path / "target.gguf")
    with Model(path) as model, Context(model, n_ctx=256, n_batch=64, layers=LAYERS) as ctx:
        assert ctx.first_position() == -1


@pytest.mark.parametrize("arch", [*OWN, *NAMED])
def test_llama_cpp_is_asked_once_an_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    with Model(tiny.write_target(tmp_path / "target.gguf", arch)) as model:
        assert layer_inputs.hands_out(model) == (arch in OWN)
    monkeypatch.setattr(layer_inputs.selftest.subprocess, "run", lambda *_, **__: pytest.fail("asked again"))
    with Model(tiny.write_target(tmp_path / "other.gguf", arch, seed=1)) as model:
        assert layer_inputs.hands_out(model) == (arch in OWN)


# --- whole pairs


@pytest.fixture(scope="module", params=NAMED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.write_target(folder / "target.gguf", request.param)
    with open_pair(target, tiny.write_drafter(folder / "drafter.gguf", target), n_ctx=512, n_threads=1) as pair:
        yield pair


@pytest.mark.parametrize("path", ["greedy", "tree"])
def test_words_are_those_of_plain_decoding(pair: Pair, path: str) -> None:
    assert pair.engine.target.can_branch
    plain = pair.generate(PROMPT, max_tokens=60, spec=False)
    drafted = pair.generate(PROMPT, max_tokens=60, path=path, draft_max=7)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.draft_n_accepted > 5


def test_the_drafter_reads_the_same_however_the_text_was_read(pair: Pair) -> None:
    """After chunks, drafts and rollbacks its memory is that of a pair that has read the text at once."""
    said = pair.generate(PROMPT, max_tokens=40, path="greedy").tokens
    ids = [*pair.encode(PROMPT), *said]
    assert pair.engine.drafter is not None
    again = pair.generate(ids, max_tokens=8, path="greedy")
    pair.engine.forget()
    assert pair.generate(ids, max_tokens=8, path="greedy").tokens == again.tokens


def test_a_sliding_window_gets_chains(tmp_path: Path) -> None:
    target = tiny.write_target(
        tmp_path / "target.gguf", "gemma3", n_layer=6, overrides={"gemma3.attention.sliding_window": 16}
    )
    with open_pair(target, tiny.write_drafter(tmp_path / "drafter.gguf", target), n_ctx=512, n_threads=1) as pair:
        assert not pair.engine.target.can_branch
        plain = pair.generate(PROMPT, max_tokens=60, spec=False)
        assert pair.generate(PROMPT, max_tokens=60, path="greedy").tokens == plain.tokens
