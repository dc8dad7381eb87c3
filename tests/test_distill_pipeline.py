"""All stages of `localspec distill` on a tiny model of another architecture: text, features, training, GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from click.testing import CliRunner

from localspec.app import main
from localspec.check import check
from localspec.distill import pipeline
from localspec.llama import read_header
from localspec.pair import Pair


def test_a_drafter_is_made_and_drafts(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target.gguf", "qwen3", eog_bias=1.0, chat_template=tiny.CHATML)
    options = ("--tokens", "3000", "--hours", "0.002", "--layers", "1", "--vocab-size", "64", "--slots", "8", "-t", "1")
    done = CliRunner().invoke(main, ["distill", str(target), "-o", str(tmp_path / "out"), *options])
    assert done.exit_code == 0, done.output
    drafter = Path(done.stdout.strip())
    assert drafter == tmp_path / "out" / "drafter.gguf"
    header = read_header(drafter)
    assert header.get("localspec.target_name") == "target.gguf"
    assert len(header.read_i64("d2t")) <= 64
    log = [json.loads(line) for line in (tmp_path / "out" / "run" / "log.jsonl").read_text().splitlines()]
    assert any("eval_loss" in row for row in log)
    with Pair(target, drafter, n_ctx=256, n_threads=1) as pair:
        pair.path = "greedy"
        assert check(pair, ["abc", "xyz"], max_tokens=30).different == 0


def test_without_torch_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.importlib.util, "find_spec", lambda _: None)
    done = CliRunner().invoke(main, ["distill", str(tmp_path / "x.gguf"), "-o", str(tmp_path)])
    assert done.exit_code == 1
    assert "pip install 'localspec[distill]'" in done.stderr


def test_other_work_in_the_folder_is_not_touched(tmp_path: Path) -> None:
    one = tiny.write_target(tmp_path / "one.gguf", "llama", chat_template=tiny.CHATML, eog_bias=1.0)
    two = tiny.write_target(tmp_path / "two.gguf", "llama", seed=5, chat_template=tiny.CHATML, eog_bias=1.0)
    pipeline.synthesise(one, tmp_path / "out" / "data", n_tokens=200, n_slots=2, n_threads=1)
    done = CliRunner().invoke(main, ["distill", str(two), "-o", str(tmp_path / "out"), "--tokens", "200"])
    assert done.exit_code == 1
    assert "one.gguf" in done.stderr
    assert "two.gguf" in done.stderr
