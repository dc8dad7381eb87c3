"""The tiny models themselves: real llama.cpp loads them, decodes them and rolls them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from localspec.llama import Context, Model

PROMPT = "the user is in the sea"
BLOCK = 8


def continue_greedily(context: Context, tokens: list[int], n: int, start: int = 0) -> list[int]:
    """Decode `tokens` at `start`, then `n` tokens of the model's own."""
    said: list[int] = []
    step, pos = tokens, start
    for _ in range(n):
        context.decode(step, pos)
        said.append(int(context.logits(len(step))[-1].argmax()))
        pos, step = pos + len(step), said[-1:]
    return said


@contextmanager
def opened(model: Model, **options: Any) -> Iterator[Context]:
    with Context(model, n_ctx=256, n_batch=64, n_threads=1, **options) as context:
        yield context


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen35", "qwen2", "muse-glimmer", "mamba"])
def test_target_answers_depend_on_context(tmp_path: Path, arch: str) -> None:
    path = tiny.write_target(tmp_path / "target.gguf", arch)
    with Model(path) as model, opened(model) as context:
        ids = model.vocab.tokenize(PROMPT)
        said = continue_greedily(context, ids, 60)
        context.clear()
        assert continue_greedily(context, ids, 60) == said
        assert len(set(said)) > 8
        successors: dict[int, set[int]] = {}
        for now, following in pairwise(said):
            successors.setdefault(now, set()).add(following)
        assert max(map(len, successors.values())) > 1
        assert not any(model.vocab.is_control(token) for token in said)


def test_target_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first, again = (tiny.write_target(tmp_path / name, seed=3) for name in ("a", "b"))
    other = tiny.write_target(tmp_path / "c", seed=4)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    text = "the user is 5 år — 🦙\n"
    with Model(tiny.write_target(tmp_path / "target.gguf")) as model:
        ids = model.vocab.tokenize(text)
        assert b"".join(map(model.vocab.piece, ids)).decode() == text
        assert len(ids) < len(text.encode())
        assert model.vocab.tokenize("<|im_end|>", parse_special=True) == [model.vocab.eos]
        assert model.vocab.is_eog(tiny.token_id("<|im_end|>"))
        assert model.chat_template == tiny.CHATML


def test_answers_end_by_themselves_with_an_eog_bias(tmp_path: Path) -> None:
    path = tiny.write_target(tmp_path / "target.gguf", eog_bias=8.0)
    with Model(path) as model, opened(model) as context:
        said = continue_greedily(context, model.vocab.tokenize(PROMPT), 60)
        assert any(model.vocab.is_eog(token) for token in said)


@pytest.mark.parametrize("n_back", [1, 5, 8])
def test_hybrid_target_rolls_back(tmp_path: Path, n_back: int) -> None:
    path = tiny.write_target(tmp_path / "target.gguf", "qwen35")
    with Model(path) as model, opened(model, n_rollback=BLOCK) as context:
        assert model.is_recurrent
        assert context.n_rollback == BLOCK
        ids = model.vocab.tokenize(PROMPT)
        said = continue_greedily(context, ids, 12)
        context.clear()
        context.decode(ids, 0)
        n_kept = 1 + BLOCK - n_back
        context.decode(said[:n_kept] + [65] * n_back, len(ids))
        assert context.remove(len(ids) + n_kept)
        rest = continue_greedily(context, said[n_kept : n_kept + 1], 3, len(ids) + n_kept)
        assert rest == said[n_kept + 1 : n_kept + 4]


DRAFTERS: list[dict[str, Any]] = [
    {},
    {"version": 1},
    {"good": False},
    {"version": 1, "good": False, "n_layer": 2},
    {"n_layer": 2, "block_size": 5, "target_layers": [0, 2, 3]},
    {"n_kept_vocab": 40},
    {"version": 1, "n_kept_vocab": 40, "own_embeddings": True},
    {"own_embeddings": True},
    {"mrope": True},
    {"sliding_window": 32},
    {"causal": True},
    {"top_k": 8, "rank": 16, "conv_kernel": 3, "conv_group": 32},
]


def draft(target: Model, drafter: Model, tokens: list[int], block_size: int, causal: bool) -> list[int]:
    """Prefill and inject all but the last token, draft from it, walk greedily."""
    layers, n = drafter.target_layers(), len(tokens) - 1
    width = len(layers) * target.n_embd
    with (
        opened(target) as verifier,
        opened(drafter, other=verifier, embd_width=width, causal=causal) as proposer,
    ):
        for layer in layers:
            verifier.want_layer_input(layer, True)
        verifier.decode(tokens[:-1], 0)
        features = [verifier.layer_input(layer, n) for layer in layers]
        proposer.decode_rows(np.concatenate(features, axis=1), 0)
        k = drafter.selector_top_k()
        if k:
            proposer.want_lattice()
        proposer.decode([tokens[-1]] + [drafter.vocab.mask] * (block_size - 1), n)
        assert proposer.remove(n)
        if not k:
            return [int(row.argmax()) for row in proposer.logits(block_size)[1:]]
        return walk(proposer.lattice_rows(block_size), k)


def walk(rows: np.ndarray[Any, np.dtype[np.float32]], k: int) -> list[int]:
    assert np.isfinite(rows).all()
    assert not rows[0].any()
    path, predecessor = [], 0
    for row in rows[1:]:
        scores = row[k : k + k * k].reshape(k, k)
        predecessor = int(scores[predecessor].argmax())
        path.append(int(row[predecessor]))
    return path


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen35", "muse-glimmer"])
@pytest.mark.parametrize("options", DRAFTERS, ids=repr)
def test_drafter_drafts(tmp_path: Path, arch: str, options: dict[str, Any]) -> None:
    """A good drafter names the bare bigram's walk to the letter, whatever its format."""
    target_path = tiny.write_target(tmp_path / "target.gguf", arch)
    drafter_path = tiny.write_drafter(tmp_path / "drafter.gguf", target_path, **options)
    assert drafter_path.stat().st_size < 4e6
    block_size, causal = options.get("block_size", BLOCK), options.get("causal", False)
    with Model(target_path) as target, Model(drafter_path) as drafter:
        path = draft(target, drafter, target.vocab.tokenize(PROMPT), block_size, causal)
    last = tiny.LETTERS.index(PROMPT[-1])
    letters = tiny.letter_ids()
    expected = [letters[tiny.next_code(last, k)] for k in range(1, block_size)]
    assert (path == expected) == options.get("good", True)
