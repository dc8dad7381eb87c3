"""The drafter's forward pass: the checks of the specification, and parity with llama.cpp."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

from localspec.distill.export import export
from localspec.distill.model import BlockConv, Drafter, DrafterConfig, RMSNorm, Rotary
from localspec.distill.start import TargetFile, unpermute
from localspec.engine import drafter as engine
from localspec.engine.target import Target
from localspec.errors import OptionError
from localspec.llama import Model, context

N_VOCAB = 320
SHAPE = DrafterConfig(
    n_embd=288,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    n_ff=96,
    rope_theta=10000.0,
    rms_eps=1e-5,
    target_layers=(1, 3),
    n_vocab=N_VOCAB,
    n_rows=120,
    mask_token=tiny.token_id("<|mask|>"),
    selector_rank=32,
)


def random_drafter(shape: DrafterConfig = SHAPE, embeddings: Tensor | None = None, seed: int = 0) -> Drafter:
    """A drafter in which every weight matters."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    if embeddings is None:
        embeddings = torch.randn(shape.n_vocab, shape.n_embd, generator=generator)
    kept = torch.randperm(shape.n_vocab, generator=generator)[: shape.n_rows].sort().values
    drafter = Drafter(shape, embeddings, kept)
    with torch.no_grad():
        for parameter in drafter.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.2
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        drafter.feature_scale.add_(0.5 * torch.rand(drafter.feature_scale.shape, generator=generator))
    return drafter


def inputs(n_context: int = 40, anchors: tuple[int, ...] = (7, 20, 33)) -> tuple[Tensor, Tensor, Tensor]:
    """Features [1, S, F], anchor positions [1, A] and anchor tokens [1, A]."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, n_context, SHAPE.n_features, generator=generator)
    return features, torch.tensor([anchors]), torch.randint(0, 300, (1, len(anchors)), generator=generator)


def hidden(drafter: Drafter, features: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return drafter(features, anchors, drafter.embed_block(tokens))


def test_a_fresh_convolution_is_the_identity() -> None:
    x = torch.randn(2, 3, 8, SHAPE.n_embd)
    conv = BlockConv(SHAPE)
    coefficients = conv.coefficients(torch.randn_like(x))
    assert torch.equal(conv(x, coefficients, 0), x)
    assert torch.equal(conv(x, coefficients, 1), x)


def test_slot_0_reads_no_slot_before_it() -> None:
    conv, x = BlockConv(SHAPE), torch.randn(1, 1, 8, SHAPE.n_embd)
    coefficients = conv.coefficients(x)
    with torch.no_grad():
        conv.base[:, 1] = 1000.0
    assert torch.equal(conv(x, coefficients, 0)[:, :, 0], x[:, :, 0])


def test_a_convolution_reaches_one_slot_ahead() -> None:
    conv = random_drafter().layers[0].attn_conv
    x = torch.randn(1, 1, 8, SHAPE.n_embd)
    coefficients = conv.coefficients(torch.randn_like(x))
    moved = x.clone()
    moved[:, :, 3] += 1.0
    changed = (conv(x, coefficients, 1) != conv(moved, coefficients, 1)).any(-1)[0, 0]
    assert changed.nonzero().flatten().tolist() == [3, 4]


def test_blocks_do_not_see_each_other() -> None:
    drafter, (features, anchors, tokens) = random_drafter(), inputs()
    before = hidden(drafter, features, anchors, tokens)
    tokens[0, 1] += 1
    after = hidden(drafter, features, anchors, tokens)
    assert torch.equal(before[0, [0, 2]], after[0, [0, 2]])
    assert not torch.equal(before[0, 1], after[0, 1])


def test_packed_equals_one_block_at_a_time() -> None:
    drafter, (features, anchors, tokens) = random_drafter(), inputs()
    packed = hidden(drafter, features, anchors, tokens)
    for i, anchor in enumerate(anchors[0]):
        alone = hidden(drafter, features[:, :anchor], anchors[:, [i]], tokens[:, [i]])
        torch.testing.assert_close(packed[:, [i]], alone, rtol=1e-4, atol=1e-5)


def test_features_at_or_after_the_anchor_are_invisible() -> None:
    drafter, (features, anchors, tokens) = random_drafter(), inputs()
    before = hidden(drafter, features, anchors, tokens)
    features[:, 20:] += 1.0
    moved = (hidden(drafter, features, anchors, tokens) != before).flatten(2).any(-1)[0]
    assert moved.tolist() == [False, False, True]


@pytest.mark.parametrize("slot", [1, 4, 7])
def test_the_sliding_window_ends_where_llama_cpp_ends_it(slot: int) -> None:
    window = 16
    shape = dataclasses.replace(SHAPE, sliding_window=window, n_layers=1)
    drafter, (features, anchors, tokens) = random_drafter(shape), inputs(anchors=(33,))
    drafter.layers[0].attn_conv = drafter.layers[0].ffn_conv = BlockConv(shape)  # slots by themselves
    before = hidden(drafter, features, anchors, tokens)
    for position, visible in ((33 + slot - window, False), (33 + slot - window + 1, True)):
        moved = features.clone()
        moved[:, position] += 1.0
        after = hidden(drafter, moved, anchors, tokens)
        assert bool((after != before)[0, 0, slot - 1].any()) is visible


def test_an_empty_context_is_no_problem() -> None:
    drafter, (features, _, tokens) = random_drafter(), inputs()
    out = hidden(drafter, features, torch.tensor([[0, 1, 2]]), tokens)
    assert out.isfinite().all()


def test_permuted_candidates_permute_the_tables() -> None:
    selector = random_drafter().selector
    f, before = torch.randn(5, SHAPE.n_embd), torch.randint(0, 120, (5, 4))
    candidates, order = torch.randint(0, 120, (5, 6)), torch.randperm(6)
    table = selector(f, before, candidates)
    torch.testing.assert_close(selector(f, before, candidates[:, order]), table[..., order])


def test_tokens_outside_the_head_share_a_predecessor_row() -> None:
    drafter = random_drafter()
    absent = [t for t in range(N_VOCAB) if t not in set(drafter.kept.tolist())]
    assert drafter.row_of[absent].unique().tolist() == [SHAPE.other_row]
    assert torch.equal(drafter.kept[drafter.row_of[drafter.kept]], drafter.kept)


def test_unpermute_turns_interleaved_into_half_split_rotation() -> None:
    x, weight = torch.randn(6, 16), torch.randn(2 * 8, 16)
    rotary = Rotary(torch.arange(6), 8, 100.0)
    split = rotary((x @ unpermute(weight, 8).T).unflatten(-1, (2, 8)))
    pairs = torch.view_as_complex((x @ weight.T).unflatten(-1, (2, 4, 2)))
    turned = torch.view_as_real(pairs * torch.complex(rotary.cos, rotary.sin))
    torch.testing.assert_close(split, turned.transpose(-1, -2).flatten(-2))


def test_a_norm_scales_to_unit_rms() -> None:
    norm: nn.Module = RMSNorm(8, 0.0)
    torch.testing.assert_close(norm(torch.randn(3, 8) * 5).pow(2).mean(-1), torch.ones(3))


# --- against llama.cpp


@pytest.fixture
def exact_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have llama.cpp keep keys and values in float32; its float16 moves scores by up to 5e-3 here."""
    default = context.C.llama_context_default_params

    def params() -> Any:
        params = default()
        params.type_k = params.type_v = 0  # GGML_TYPE_F32
        return params

    monkeypatch.setattr(context.C, "llama_context_default_params", params)


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize("window", [None, 24])
def test_the_pool_equals_that_of_llama_cpp(tmp_path: Path, window: int | None) -> None:
    target_path = tiny.write_target(tmp_path / "target.gguf")
    shape = dataclasses.replace(SHAPE, sliding_window=window)
    drafter = random_drafter(shape, TargetFile(target_path).tensor("token_embd.weight"))
    export(drafter, target_path, tmp_path / "drafter.gguf", encoding="f32")
    features, anchors, tokens = inputs(anchors=(33,))
    features = features[:, :33]
    with torch.no_grad():
        ids, scores = drafter.lattice(hidden(drafter, features, anchors, tokens), tokens)
    with Model(target_path) as target_model, Model(tmp_path / "drafter.gguf") as drafter_model:
        target = Target(target_model, layers=list(SHAPE.target_layers), n_ctx=64)
        theirs_drafter = engine.Drafter(drafter_model, target, block_size=SHAPE.block_size, causal=False)
        theirs_drafter.inject(features[0].numpy())
        theirs = theirs_drafter.draft(int(tokens), SHAPE.n_slots)
        theirs_drafter.close()
        target.close()
    worst = _compare(ids[0, 0].numpy(), scores[0, 0].numpy(), theirs.ids, theirs.scores)
    assert worst < 1e-4


def _compare(ids: np.ndarray, scores: np.ndarray, their_ids: np.ndarray, their_scores: np.ndarray) -> float:
    """Largest difference of scores once both tables are in the order of the ids."""
    worst = 0.0
    for slot in range(len(ids)):
        ours, theirs = np.argsort(ids[slot]), np.argsort(their_ids[slot])
        assert ids[slot][ours].tolist() == their_ids[slot][theirs].tolist()
        rows = (np.argsort(ids[slot - 1]), np.argsort(their_ids[slot - 1])) if slot else (ours, theirs)
        difference = scores[slot][rows[0]][:, ours] - their_scores[slot][rows[1]][:, theirs]
        worst = max(worst, float(np.abs(difference).max()))
    return worst


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target.gguf")
    with pytest.raises(OptionError, match="q4_7"):
        export(random_drafter(), target, tmp_path / "drafter.gguf", encoding="q4_7")
    assert not (tmp_path / "drafter.gguf").exists()
