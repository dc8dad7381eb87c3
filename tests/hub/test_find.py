"""Which drafters fit a target: files are judged by what they say of themselves, whatever they are called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner

from localspec.cli.main import main
from localspec.errors import ModelError
from localspec.hub import registry, sources
from localspec.hub.find import Candidate, find


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "here" / "some-model.gguf")


def make_target(path: Path, arch: str = "llama", **keys: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return tiny.write_target(path, arch, overrides={f"general.{key}": value for key, value in keys.items()})


def by_name(candidates: list[Candidate]) -> dict[str, Candidate]:
    return {candidate.name: candidate for candidate in candidates}


def test_a_drafter_beside_its_target_fits_whatever_it_is_called(target: Path) -> None:
    drafter = tiny.write_drafter(target.with_name("zzz.gguf"), target)
    found = by_name(find(target))
    assert found["zzz.gguf"] == Candidate("zzz.gguf", str(drafter), note=str(drafter))
    assert found["drafter.gguf"].refusal is not None  # that of the default pair
    assert "width 576" in found["drafter.gguf"].refusal


def test_each_one_refused_is_told_exactly_why(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "deep"
    folder.mkdir(parents=True)
    wide = tiny.write_target(tmp_path / "wide.gguf", n_embd=320)
    words = tiny.write_target(tmp_path / "words.gguf", n_vocab=340)
    tiny.write_drafter(folder / "a_good_name_for_some-model.gguf", wide)
    tiny.write_drafter(folder / "vocabulary.gguf", words)
    tiny.write_drafter(folder / "layers.gguf", target, target_layers=[1, 9])
    tiny.write_drafter(folder / "fork.gguf", target, arch="dflash-draft")
    tiny.truncate(tiny.write_drafter(folder / "cut.gguf", target), 100_000)
    tokens = [f"<{i}>" for i in range(320)]
    tiny.write_drafter(folder / "tokens.gguf", target, overrides={"tokenizer.ggml.tokens": tokens})
    (folder / "note.gguf").write_text("not a model")
    found = {
        name: candidate.refusal or "" for name, candidate in by_name(find(target, [tmp_path / "elsewhere"])).items()
    }
    assert (
        "width 320, the target tiny llama (some-model.gguf) has width 288" in found["a_good_name_for_some-model.gguf"]
    )
    assert "vocabulary of 340 tokens" in found["vocabulary.gguf"]
    assert "reads layer 9 of its target" in found["layers.gguf"]
    assert "fork's drafter format" in found["fork.gguf"]
    assert "is cut off" in found["cut.gguf"]
    assert "not the same ones (SHA-256" in found["tokens.gguf"]
    assert "is not a GGUF file" in found["note.gguf"]
    assert all("\n" not in refusal for refusal in found.values())


def test_models_and_later_shards_are_no_drafters(target: Path) -> None:
    make_target(target.with_name("another-model.gguf"))
    tiny.write_drafter(target.with_name("d-00002-of-00002.gguf"), target)
    assert [candidate.name for candidate in find(target) if candidate.path] == ["drafter.gguf"]


def test_a_file_is_looked_at_once_however_many_names_it_has(target: Path, tmp_path: Path) -> None:
    blob = tmp_path / "hub" / "models--lab--drafter" / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    tiny.write_drafter(blob, target)
    for commit in ("aaa", "bbb"):
        snapshot = blob.parent.parent / "snapshots" / commit / "Q8_0"
        snapshot.mkdir(parents=True)
        (snapshot / "pulled.gguf").symlink_to(blob)
    (target.parent / "link.gguf").symlink_to(blob)
    assert [candidate.name for candidate in find(target, [tmp_path]) if candidate.fits] == ["pulled.gguf"]


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"name": "Qwen3 4B"}, "made for this model"),
        ({"name": "Qwen3-4B"}, "made for this model"),
        ({"name": "My own", "base_model.0.repo_url": "https://huggingface.co/Qwen/Qwen3-4B"}, "its base model"),
        ({"name": "My own", "base_model.0.name": "Qwen3 4B"}, "its base model"),
    ],
)
def test_the_list_of_pairs_is_asked_by_the_name_in_the_file(tmp_path: Path, keys: dict[str, str], note: str) -> None:
    found = by_name(find(make_target(tmp_path / "here" / "qwen3-8b.gguf", "qwen3", **keys)))
    assert note in found["qwen3-4b"].note
    assert "run: localspec pull qwen3-4b" in found["qwen3-4b"].note
    refusal = found["qwen3-8b"].refusal
    assert refusal == f"its drafter was made for Qwen/Qwen3-8B, and this file calls itself {keys['name']}"
    assert "qwen3.8-27b" not in found  # of another architecture


def test_a_pair_that_was_pulled_is_judged_by_its_file(tmp_path: Path) -> None:
    target = make_target(tmp_path / "here" / "t.gguf", "qwen3", name="Qwen3 4B")
    source = registry.get("qwen3-4b").drafter.source
    assert isinstance(source, sources.HubFile)
    folder = tmp_path / "hub" / f"models--{source.repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    tiny.write_drafter(folder / "snapshots" / "abc" / source.file, target)
    found = by_name(find(target))
    assert found[source.name].fits
    assert "qwen3-4b" not in found


def test_a_model_that_cannot_be_a_pair_is_told_why(tmp_path: Path) -> None:
    found = by_name(find(make_target(tmp_path / "here" / "t.gguf", name="GPT OSS 20B")))
    assert found["gpt-oss-20b"].refusal is not None
    assert "only as a checkpoint" in found["gpt-oss-20b"].refusal


def test_a_drafter_says_whom_it_was_made_for(target: Path) -> None:
    keys = {"localspec.target_repo": "maker/Some-Model"}
    tiny.write_drafter(target.with_name("d.gguf"), target, overrides=keys)
    assert by_name(find(target))["d.gguf"].note.endswith("d.gguf, made for maker/Some-Model")


def test_a_drafter_is_no_target(target: Path) -> None:
    drafter = tiny.write_drafter(target.with_name("d.gguf"), target)
    with pytest.raises(ModelError, match="is a drafter"):
        find(drafter)


def test_a_target_whose_layer_inputs_llama_cpp_does_not_hand_out(tmp_path: Path) -> None:
    target = make_target(tmp_path / "here" / "t.gguf", "qwen2")
    tiny.write_drafter(target.with_name("d.gguf"), target)
    assert [candidate.refusal for candidate in find(target) if candidate.name == "d.gguf"] == [None]


def test_the_command(target: Path, tmp_path: Path) -> None:
    def call(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["find", str(target), *arguments])

    nothing = call()
    assert nothing.exit_code == 1
    assert nothing.stdout.startswith("refused  drafter.gguf: the drafter")
    shutil.copy(tiny.write_drafter(target.with_name("d.gguf"), target), tmp_path / "d2.gguf")
    some = call("--in", str(tmp_path))
    assert some.exit_code == 0
    assert [line.partition(" ")[0] for line in some.stdout.splitlines()] == ["fits", "fits", "refused"]
    printed = json.loads(call("--json").stdout)
    assert {candidate["fits"] for candidate in printed} == {True, False}
    assert set(printed[0]) == {"name", "path", "refusal", "note", "fits"}
    assert call("--in", str(tmp_path / "no")).stderr == f"Error: there is no folder {tmp_path / 'no'} to look in.\n"
    missing = CliRunner().invoke(main, ["find", str(tmp_path / "no.gguf")])
    assert missing.exit_code == 1
    assert missing.stderr.startswith("Error: cannot read")
