"""Drafters from checkpoints: llama.cpp's pool against the torch forward, llama.cpp's own converter, and bad input."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_distill_model import SHAPE, exact_memory, inputs, random_drafter  # noqa: F401
from test_distill_model import _compare as worst_difference
from torch import Tensor, nn

from localspec import drafter as engine
from localspec.convert.drafter import convert
from localspec.distill.hf import write_hf
from localspec.distill.model import Drafter
from localspec.distill.start import TargetFile
from localspec.lattice import Lattice
from localspec.llama import Model
from localspec.target import Target

Tensors = dict[str, Tensor]
ANCHOR = 33


def edit(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    dflash: Mapping[str, Any] | None = None,
    tensors: Callable[[Tensors], Tensors] = dict,
) -> Path:
    """Change a checkpoint; a value of None takes a key away."""
    path = folder / "config.json"
    found = json.loads(path.read_text())
    for values, changes in ((found, config), (found["dflash_config"], dflash)):
        values |= changes or {}
        for key in [key for key, value in (changes or {}).items() if value is None]:
            del values[key]
    path.write_text(json.dumps(found))
    weights = tensors(load_file(folder / "model.safetensors"))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def without(*prefixes: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if not name.startswith(prefixes)}


def target_file(folder: Path, arch: str = "llama") -> Path:
    return tiny.write_target(folder / "target.gguf", arch)


def whole_head(target: Path, **changes: Any) -> Drafter:
    """A random drafter with the target's own embeddings and head."""
    file = TargetFile(target)
    shape = dataclasses.replace(SHAPE, n_rows=SHAPE.n_vocab, **changes)
    drafter = random_drafter(shape, file.tensor("token_embd.weight"))
    head = file.tensor("output.weight")
    assert head is not None
    with torch.no_grad():
        drafter.head.weight.copy_(head)
    return drafter


def torch_pool(drafter: Drafter, scale: float = 1.0) -> tuple[Lattice, Tensor, Tensor]:
    """The pool of one block, the features [S, n_features] it was made from and the anchor token."""
    features, anchors, tokens = inputs(anchors=(ANCHOR,))
    features = features[:, :ANCHOR]
    with torch.no_grad():
        hidden = drafter(features, anchors, scale * drafter.embed_block(tokens))
        ids, scores = drafter.lattice(hidden, tokens)
    return Lattice(ids[0, 0].int().numpy(), scores[0, 0].numpy()), features[0], tokens


def llama_pool(target_path: Path, path: Path, features: Tensor, token: Tensor, block_size: int = 8) -> Lattice:
    with Model(target_path) as target_model, Model(path) as drafter_model:
        target = Target(target_model, layers=list(SHAPE.target_layers), n_ctx=64)
        theirs = engine.Drafter(drafter_model, target, block_size=block_size, causal=False)
        theirs.inject(features.numpy())
        pool = theirs.draft(int(token), block_size - 1)
        theirs.close()
        target.close()
    return pool


class Transformed(nn.Module):
    """A head whose logits are scaled and capped."""

    def __init__(self, head: nn.Module, multiplier: float, cap: float) -> None:
        super().__init__()
        self.head, self.multiplier, self.cap = head, multiplier, cap

    def forward(self, hidden: Tensor) -> Tensor:
        return self.cap * torch.tanh(self.head(hidden) * self.multiplier / self.cap)


def check_pool(folder: Path, target: Path, drafter: Drafter, scale: float = 1.0) -> None:
    out = folder.with_suffix(".gguf")
    convert(folder, out, target=target, outtype="f32")
    ours, features, token = torch_pool(drafter, scale)
    theirs = llama_pool(target, out, features, token, drafter.config.block_size)
    assert worst_difference(ours.ids, ours.scores, theirs.ids, theirs.scores) < 1e-4


@pytest.mark.usefixtures("exact_memory")
class TestDFlash2:
    """llama.cpp's pool is that of the torch module whose checkpoint was converted."""

    @pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen35"])
    def test_borrowing_embeddings_and_head(self, tmp_path: Path, arch: str) -> None:
        drafter = whole_head(target := target_file(tmp_path, arch))
        write_hf(drafter, tmp_path / "hf", target_name="tiny", n_target_layers=4)
        check_pool(edit(tmp_path / "hf", tensors=without("lm_head")), target, drafter)

    @pytest.mark.parametrize(
        "changes",
        [
            {"sliding_window": 24},
            {"conv_taps": 3, "conv_group": 32},
            {"block_size": 5, "selector_rank": 16, "top_k": 8},
        ],
    )
    def test_a_reduced_head(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        embeddings = TargetFile(target := target_file(tmp_path)).tensor("token_embd.weight")
        drafter = random_drafter(dataclasses.replace(SHAPE, **changes), embeddings)
        write_hf(drafter, tmp_path / "hf", target_name="tiny")
        check_pool(tmp_path / "hf", target, drafter)

    def test_its_own_embeddings_and_head(self, tmp_path: Path) -> None:
        drafter = random_drafter(dataclasses.replace(SHAPE, n_rows=SHAPE.n_vocab))
        write_hf(drafter, tmp_path / "hf", target_name="tiny")
        edit(tmp_path / "hf", tensors=lambda tensors: tensors | {"embed_tokens.weight": drafter.embeddings})
        check_pool(tmp_path / "hf", target_file(tmp_path), drafter)

    def test_logits_scaled_and_capped_embeddings_scaled(self, tmp_path: Path) -> None:
        drafter = whole_head(target := target_file(tmp_path))
        write_hf(drafter, tmp_path / "hf", target_name="tiny")
        scales = {"output_multiplier": 0.3, "final_logit_softcapping": 4.0, "input_embedding_scale": 1.7}
        edit(tmp_path / "hf", tensors=without("lm_head"), dflash=scales)
        drafter.head = Transformed(drafter.head, 0.3, 4.0)  # type: ignore[assignment]
        check_pool(tmp_path / "hf", target, drafter, scale=1.7)
