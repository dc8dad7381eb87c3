"""All stages of `localspec distill` on tiny models: what comes out, kill -9 in each stage, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from click.testing import CliRunner, Result

from localspec import distill as api
from localspec.cli.main import main
from localspec.distill import checks, pipeline
from localspec.distill.start import TargetFile
from localspec.distill.store import read, read_text
from localspec.distill.train import Trained
from localspec.evaluation.check import check
from localspec.llama import read_header
from localspec.loading.open import open_pair
from localspec.machine import Pool

SMALL = ("--tokens", "3000", "--hours", "0.001", "--layers", "1", "--vocab-size", "64", "--slots", "8", "-t", "1")

FULL = {"n_vocab": 260 + len(tiny.MERGES), "overrides": {"tokenizer.ggml.padding_token_id": 259 + len(tiny.MERGES)}}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["distill", *map(str, arguments)])


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_drafter_is_made_and_drafts(tmp_path: Path) -> None:
    """Another architecture than the default pair's, from its GGUF to its words."""
    target, out = (
        tiny.write_target(tmp_path / "target.gguf", "qwen3", eog_bias=1.0, chat_template=tiny.CHATML),
        tmp_path / "out",
    )
    done = run(target, "-o", out, *SMALL)
    assert done.exit_code == 0, done.output
    drafter = Path(done.stdout.strip())
    assert drafter == out / "drafter.gguf"
    header = read_header(drafter)
    told = json.loads((out / "evaluation.json").read_text())
    facts = {
        key.removeprefix("localspec."): value for key, value in header.values.items() if key.startswith("localspec.")
    }
    assert facts["target_name"] == "target.gguf"
    assert facts["tokenizer_sha256"] == read_header(target).strings["tokenizer.ggml.tokens"][1]
    assert facts["chat_mode"] == "chat"
    assert facts["data_tokens"] == len(read(out / "data").tokens)
    assert facts["calibration"] == pytest.approx(told["calibration"])
    assert len(facts["calibration"]) == 7
    assert facts["acceptance_length.all"] == pytest.approx(told["figures"]["all"]["acceptance_length"])
    assert told["encoding"] in told["tried"]
    assert {"q8_0", "q4_0"} <= told["tried"].keys()
    assert len(header.read_i64("d2t")) <= 64
    log = rows(out / "run" / "log.jsonl")
    assert any("eval_loss" in row for row in log)
    card = (out / "README.md").read_text()
    assert "target.gguf" in card
    assert "![accepted" in card
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    assert not [*out.rglob("*.part"), *out.rglob("candidate.gguf")]
    with open_pair(target, drafter, n_ctx=256, n_threads=1) as pair:
        pair.path = "greedy"
        assert check(pair, ["abc", "xyz"], max_tokens=30).different == 0

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.g*")}
    assert run(target, "-o", out, *SMALL).exit_code == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}, "nothing is done twice"
    assert len(rows(out / "run" / "log.jsonl")) == len(log)


def killed(command: list[str], reached: Callable[[], bool]) -> None:
    """Start `command` and kill -9 it as soon as `reached`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while time.monotonic() < end and not reached():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    assert reached()
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_in_any_stage_it_goes_on(tmp_path: Path) -> None:
    target, out = tiny.write_target(tmp_path / "target.gguf", "qwen3", eog_bias=1.0), tmp_path / "out"
    command = [sys.executable, "-m", "localspec.cli.main", "distill", str(target), "-o", str(out), *SMALL, "--two-pass"]
    command[command.index("3000")] = "8000"

    def holds(name: str) -> Callable[[], bool]:
        return lambda: (out / name).exists() and (out / name).stat().st_size > 0

    killed(command, holds("text/chats.jsonl"))
    written = read_text(out / "text")
    assert 0 < len(written.tokens) < 8000
    killed(command, holds("data/chats.jsonl"))
    text = read_text(out / "text")
    assert np.array_equal(text.tokens[: len(written.tokens)], written.tokens)
    killed(command, holds("run/checkpoint.pt"))
    data = read(out / "data")
    assert data.chats == text.chats, "the second pass has read all of them, once"
    ids = [chat.figures["id"] for chat in data.chats]
    assert len(set(ids)) == len(ids)
    reached = torch.load(out / "run" / "checkpoint.pt", weights_only=True)["progress"]["step"]
    log = out / "run" / "log.jsonl"
    n_rows = len(rows(log)) if log.exists() else 0
    killed(command, holds("run/tried.json"))
    steps = [row["step"] for row in rows(log)[n_rows:] if "step" in row]
    assert steps[0] > reached > 0, "training went on from its checkpoint"
    assert steps == sorted(steps)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / "drafter.gguf")
    encodings = [row["encoding"] for row in rows(log) if "encoding" in row]
    assert encodings.count("q8_0") == 1, "what was evaluated is not evaluated again"
    assert not [*out.rglob("*.part"), *out.rglob("candidate.gguf")]
    assert read_header(out / "drafter.gguf").get("localspec.target_name") == "target.gguf"


def test_chats_of_another_file_are_read_again(tmp_path: Path) -> None:
    """Prompts are enough for a model without template; its chats serve another file of the same model."""
    one, two = (tiny.write_target(tmp_path / f"{i}.gguf", seed=i, chat_template=None, eog_bias=0.5) for i in (1, 2))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("tell me of the other\nand then in the end\n")
    api.synthesise_chats(
        one, tmp_path / "chats", n_tokens=2000, n_slots=4, n_threads=1, prompts=prompts.read_text().split("\n")[:2]
    )
    out = tmp_path / "out"
    done = run(two, "-o", out, *SMALL, "--chats", tmp_path / "chats", "--outtype", "f16", "--objective", "mix")
    assert done.exit_code == 0, done.output
    assert not (out / "text").exists()
    data = api.read_data(out / "data")
    assert data.meta.target == "2.gguf"
    assert np.array_equal(data.tokens, api.read_data(tmp_path / "chats").tokens)
    header = read_header(out / "drafter.gguf")
    assert header.get("localspec.chat_mode") == "plain"
    assert json.loads((out / "evaluation.json").read_text())["encoding"] == "f16"

    again = tmp_path / "again"
    wider = ("--hours", "0.00001", "--vocab-size", "80", "--chats", out / "data", "--from", out)
    assert run(two, "-o", again, *SMALL, *wider).exit_code == 0
    before, after = (Trained.read(folder / "run").weights["layers.0.down.weight"] for folder in (out, again))
    assert torch.allclose(before, after, atol=1e-3), "it begins where the other one ended"
    assert not torch.allclose(TargetFile(two).tensor("blk.3.ffn_down.weight"), after, atol=1e-3)


def test_what_it_cannot_begin_with_is_refused_at_once(tmp_path: Path) -> None:
    one, other = (tiny.write_target(tmp_path / f"{n}.gguf", chat_template=tiny.CHATML, n_vocab=n) for n in (320, 330))
    assert run(one, "-o", tmp_path / "one", *SMALL).exit_code == 0
    (tmp_path / "bad" / "run").mkdir(parents=True)
    (tmp_path / "bad" / "run" / "best.pt").write_bytes(b"no checkpoint")
    for target, options, words in (
        (one, ("--layers", "2"), "n_layers = 1, this one is to have 2"),
        (one, ("--block-size", "4"), "block_size = 8, this one is to have 4"),
        (other, (), "n_vocab = 320, this one is to have 330"),
        (one, ("--from", tmp_path / "none"), "holds no trained drafter yet"),
        (one, ("--from", tmp_path / "bad"), "is not a trained drafter"),
    ):
        done = run(target, "-o", tmp_path / "two", *SMALL, "--from", tmp_path / "one", *options)
        assert done.exit_code == 1, done.output
        assert words in done.stderr
        assert not (tmp_path / "two" / "data").exists()


def test_the_api_is_there_and_light() -> None:
    assert all(callable(getattr(api, name)) for name in api.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        api.nothing  # noqa: B018
    code = "import sys, localspec.distill, localspec.cli.main; print(*{'torch', 'llama_cpp'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b""


def test_without_torch_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.importlib.util, "find_spec", lambda _: None)
    done = run(tmp_path / "x.gguf", "-o", tmp_path)
    assert done.exit_code == 1
    assert "pip install 'localspec[distill]'" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "options", "words"),
    [
        ({"chat_template": None}, (), "no chat template, so it cannot ask itself; give it prompts"),
        ({}, ("--vocab-size", "321"), "can draft 16 to 320 tokens, not 321"),
        ({"n_embd": 256}, (), r"has width 256; llama.cpp runs DFlash 2 drafters with pools of 16 from width 272 on"),
        (FULL, (), "no free special token"),
        ({}, ("--tokens", "1000000000000"), "are free; ask for fewer tokens"),
        ({}, ("--outtype", "q4_7"), "--outtype 'q4_7' is not auto or one of f32"),
        ({}, ("--chats", "nowhere"), "nowhere holds no finished chats"),
        ({}, ("--hf", "."), ". exists; choose another folder with --hf"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    tmp_path: Path, wrong: dict[str, Any], options: tuple[str, ...], words: str
) -> None:
    target = tiny.write_target(tmp_path / "target.gguf", **wrong)
    done = run(target, "-o", tmp_path / "out", *SMALL, *options)
    assert done.exit_code == 1, done.output
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out" / "run").exists()


def test_too_little_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.write_target(tmp_path / "target.gguf")
    monkeypatch.setattr(checks, "ram", lambda: Pool("RAM", 10**9, 300_000_000))
    done = run(target, "-o", tmp_path / "out", *SMALL, "--layers", "200")
    assert "training takes about" in done.stderr
    assert "300.0 MB are free; use fewer --layers" in done.stderr
    monkeypatch.setattr(checks, "training_bytes", lambda *_: 0)
    done = run(target, "-o", tmp_path / "out", *SMALL, "--slots", "10000")
    assert "writing 10000 chats at a time takes about" in done.stderr
    assert "use --slots " in done.stderr


def test_other_work_in_the_folder_is_not_touched(tmp_path: Path) -> None:
    one = tiny.write_target(tmp_path / "one.gguf", "llama", eog_bias=1.0)
    two = tiny.write_target(tmp_path / "two.gguf", "llama", seed=5, eog_bias=1.0)
    pipeline.synthesise(one, tmp_path / "out" / "data", n_tokens=200, n_slots=2, n_threads=1)
    for options in ((), ("--two-pass",)):
        done = run(two, "-o", tmp_path / "out", *SMALL, *options)
        assert done.exit_code == 1
        assert "one.gguf" in done.stderr
        assert "two.gguf" in done.stderr
    assert not (tmp_path / "out" / "text").exists()
