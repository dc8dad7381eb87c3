"""A drafter judged through llama.cpp, the encoding chosen by it, and the card that tells of it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from localspec.distill import card, release
from localspec.distill.chats import Recipe
from localspec.distill.evaluate import Evaluation, evaluate
from localspec.distill.objective import losses
from localspec.distill.options import Options
from localspec.distill.start import Shape, TargetFile, fresh_drafter
from localspec.distill.store import Data, read
from localspec.distill.synthesise import synthesise
from localspec.distill.train import Trained, train
from localspec.distill.windows import Sampler, anchors_of, repeating, split
from localspec.engine import paths
from localspec.engine.drafter import Drafter
from localspec.engine.target import Target
from localspec.errors import OptionError
from localspec.llama import Model, read_header

SHAPE = Shape(n_layers=1, n_rows=64, block_size=5, selector_rank=32)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_target(tmp_path_factory.mktemp("target") / "target.gguf", eog_bias=0.5)


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("data")
    synthesise(target, folder, n_tokens=4000, n_slots=8, n_threads=1, recipe=Recipe(n_ctx=256, question_max=24))
    return read(folder)


@pytest.fixture(scope="module")
def run(target: Path, data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    options = Options(steps=3, n_windows=2, n_anchors=8, eval_batches=1, compile=False)
    train(target, Path(str(data.tokens.filename)).parent, folder, shape=SHAPE, options=options)
    return folder


def test_figures_are_those_of_drafting_and_walking(target: Path, data: Data, tmp_path: Path) -> None:
    drafter = tiny.write_drafter(tmp_path / "drafter.gguf", target, block_size=5)
    chats, shares = data.chats[:4], []
    found = evaluate(target, drafter, data, chats, n_anchors=10**9, n_threads=1, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    kept, fresh = [], []
    with Model(target) as speaker, Model(drafter) as guesser:
        reader = Target(speaker, n_ctx=300, layers=guesser.target_layers(), n_threads=1)
        guess = Drafter(guesser, reader, block_size=5, causal=False, n_threads=1)
        for chat in chats:
            said = data.tokens[chat.start : chat.start + chat.n].tolist()
            ends = {i: b for a, b in chat.answers for i in range(a, b)}
            for anchor in anchors_of(chat).tolist():
                reader.forget()
                guess.forget()
                reader.expose_features(True)
                reader.prefill(said[:anchor])
                guess.inject(reader.features(slice(anchor)))
                walk = paths.greedy(guess.draft(said[anchor], 4)).tokens
                truth = said[anchor + 1 : min(anchor + 5, ends[anchor])]
                kept.append(next((k for k, (a, b) in enumerate(zip(walk, truth, strict=False)) if a != b), len(truth)))
            fresh += (~repeating(np.array(said, np.int64)))[anchors_of(chat)].tolist()
        guess.close()
        reader.close()
    whole = found.figures["all"]
    assert whole["n_blocks"] == len(kept)
    assert whole["acceptance_length"] == pytest.approx(1 + np.mean(kept), abs=0.02)
    assert found.acceptance_length == pytest.approx(1 + np.mean(np.array(kept)[fresh]), abs=0.04)
    assert whole["acceptance_length"] > 2, "a good drafter"
    assert len(found.calibration) == 4


def test_torch_and_llama_cpp_agree(target: Path, data: Data, run: Path, tmp_path: Path) -> None:
    trained, file = Trained.read(run), TargetFile(target)
    drafter = trained.drafter(file)
    release.export(drafter, target, tmp_path / "drafter.gguf", encoding="f32")
    chat = max(data.chats, key=lambda chat: len(anchors_of(chat)))
    n = len(anchors_of(chat))
    theirs = evaluate(target, tmp_path / "drafter.gguf", data, [chat], n_anchors=n, n_threads=1).figures["all"]
    sampler = Sampler(data, [chat], layers=drafter.config.target_layers, block_size=5, n_windows=1, n_anchors=n)
    batch = sampler.batch(0).to(torch.device("cpu"), torch.float32)
    with torch.no_grad():
        hidden = drafter(batch.features, batch.anchors, drafter.embed_block(batch.anchor_tokens))
        picks = losses(drafter, hidden, batch, Options(steps=1), judged=True).picks
    assert picks is not None
    assert theirs["recall_per_slot"] == pytest.approx((picks.pool & picks.valid).sum(0) / picks.valid.sum(0), abs=0.05)


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ({"q8_0": 2.0, "q4_0": 1.99}, "q4_0"),
        ({"q8_0": 2.0, "q4_0": 1.9, "q4_1": 1.97, "q5_0": 1.985}, "q5_0"),
        ({"q8_0": 2.0, "q4_0": 1.9, "q4_1": 1.9, "q5_0": 1.97}, "q8_0"),
    ],
)
def test_the_smallest_encoding_as_good_as_q8_0_is_chosen(
    lengths: dict[str, float], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_up(self: object, encoding: str) -> Evaluation:
        figures = {"n_blocks": 1, "acceptance_length": lengths[encoding]}
        return Evaluation({"all": figures, "fresh": figures}, [])

    monkeypatch.setattr(release._Work, "evaluation", made_up)
    work = release._Work(*[None] * 7)  # type: ignore[arg-type]
    assert work.choose("auto")[0] == chosen
    assert work.choose("q8_0")[0] == "q8_0"
    with pytest.raises(OptionError, match="q3_k"):
        release.check_outtype("q3_k")


def test_a_release_may_have_a_hugging_face_checkpoint_and_no_plot(
    target: Path, data: Data, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    module = ModuleType("localspec.distill.hf")
    module.write_hf = lambda drafter, folder, *, target_name: written.append((folder, target_name))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "localspec.distill.hf", module)
    monkeypatch.setattr(card.importlib.util, "find_spec", lambda name: None)
    source = Path(str(data.tokens.filename)).parent
    path = release.release(target, source, run, tmp_path, outtype="q4_1", n_anchors=50, n_threads=1, hf=tmp_path / "hf")
    assert path.exists()
    assert written == [(tmp_path / "hf", "target.gguf")]
    text = (tmp_path / "README.md").read_text()
    assert "| kept by the greedy walk |" in text
    assert "Q4_1" in text
    assert "png" not in text
    assert not (tmp_path / card.PLOT).exists()
    assert not (run / "candidate.gguf").exists()


def test_the_whole_vocabulary_can_be_drafted(target: Path, data: Data, tmp_path: Path) -> None:
    """With a head of its own, or with the target's, which is not trained and not in the file."""
    found = []
    for own in (True, False):
        torch.manual_seed(0)
        drafter = fresh_drafter(TargetFile(target), data, dataclasses.replace(SHAPE, n_rows=320, own_head=own))
        assert drafter.kept.tolist() == list(range(320))
        path = tmp_path / f"{own}.gguf"
        release.export(drafter, target, path, encoding="f32")
        assert ("output.weight" in read_header(path).tensors) == drafter.head.weight.requires_grad == own
        assert "d2t" not in read_header(path).tensors
        found.append(evaluate(target, path, data, data.chats[:2], n_anchors=20, n_threads=1).figures["all"])
    assert found[0]["n_blocks"] >= 20
    assert found[0]["recall_per_slot"] == pytest.approx(found[1]["recall_per_slot"], abs=0.05)


def test_every_encoding_drafts(target: Path, data: Data, tmp_path: Path) -> None:
    """Also a selector of rank 8, whose rows no block of 32 divides."""
    torch.manual_seed(0)
    drafter = fresh_drafter(TargetFile(target), data, dataclasses.replace(SHAPE, selector_rank=8))
    _, held_out = split(data)
    sizes = {}
    for encoding in release.ENCODINGS:
        release.export(drafter, target, tmp_path / "drafter.gguf", encoding=encoding)
        sizes[encoding] = (tmp_path / "drafter.gguf").stat().st_size
        found = evaluate(target, tmp_path / "drafter.gguf", data, held_out, n_anchors=20, n_threads=1)
        assert found.figures["all"]["acceptance_length"] >= 1
    assert sorted(sizes, key=lambda name: sizes[name]) == ["q4_0", "q4_1", "q5_0", "q8_0", "f16", "f32"]
