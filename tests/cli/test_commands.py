"""The command line on a real tiny pair: what goes to stdout, what to stderr, and how errors end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from click.testing import CliRunner, Result

from localspec.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("files")
    target = tiny.write_target(folder / "t.gguf", "llama", chat_template=tiny.CHATML)
    drafter = tiny.write_drafter(folder / "d.gguf", target)
    return ("-m", str(target), "-md", str(drafter), "-c", "512", "-t", "1")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    return


def call(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def test_help_names_every_command() -> None:
    text = call("--help").output
    assert all(f"  {name} " in text for name in ("chat", "run", "check", "bench", "models", "pull", "distill"))


def test_run_puts_the_answer_alone_on_stdout(files: tuple[str, ...]) -> None:
    done = call("run", *files, "-p", "abc", "-n", "20", "--draft-max", "7")
    plain = call("run", *files, "-p", "abc", "-n", "20", "--no-spec")
    assert done.exit_code == plain.exit_code == 0
    assert done.stdout == plain.stdout
    assert done.stdout.endswith("\n")
    assert done.stderr == ""


def test_run_json_has_the_promised_fields(files: tuple[str, ...]) -> None:
    answer = json.loads(call("run", *files, "-p", "abc", "-n", "20", "--path", "greedy", "--json").stdout)
    assert set(answer) == {"text", "reasoning", "tokens", "finish_reason", "stats"}
    assert len(answer["tokens"]) == answer["stats"]["predicted_n"] == 20
    assert answer["finish_reason"] == "length"
    assert answer["stats"]["draft_n"] > 0


def test_run_reads_stdin_and_files(files: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("abc")
    given = [
        call("run", *files, "-n", "9", "-p", "abc"),
        call("run", *files, "-n", "9", "-f", str(tmp_path / "p.txt")),
        call("run", *files, "-n", "9", stdin="abc"),
        call("run", *files, "-n", "9", stdin="\ufeffabc\n"),
        call("chat", *files, "-n", "9", stdin="\ufeffabc\n"),
    ]
    assert len({done.stdout for done in given}) == 1


def test_a_seed_is_honoured(files: tuple[str, ...]) -> None:
    def said(seed: str, *more: str) -> str:
        return call("run", *files, "-p", "abc", "-n", "30", "--temp", "1.5", "-s", seed, *more).stdout

    assert said("1") == said("1", "--no-spec")
    assert said("1") != said("2")


def test_check_finds_no_difference_and_says_so(files: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("abc\n\nhello there\n")
    done = call("check", *files, "-f", str(tmp_path / "prompts.txt"), "-n", "40", "--draft-max", "7", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert report["prompts"] == 2
    assert report["different"] == 0
    assert report["identical"] + report["near_ties"] == 2


def test_check_reports_a_difference_and_fails(files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from localspec.engine import generate

    honest = generate.sample_and_match

    def believe(
        rows: Any, draft: Any, choose: Any
    ) -> tuple[list[int], list[int]]:  # a bug: all that was drafted is kept
        n = len(draft.tokens)
        return ([*draft.tokens, 0], list(range(n + 1))) if n else honest(rows, draft, choose)

    monkeypatch.setattr(generate, "sample_and_match", believe)
    done = call("check", *files, "-n", "20", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert report["different"] > 0
    assert all(len(d["logits"]) == 2 for d in report["details"])


def test_bench_json_has_the_promised_fields(files: tuple[str, ...], tmp_path: Path) -> None:
    options = ["-n", "16", "--repeats", "2", "--synthetic", "0.9", "--plot", str(tmp_path / "plot.png"), "--json"]
    (tmp_path / "p.txt").write_text("abc abc abc\nhello\n")
    figures = json.loads(call("bench", *files, "-f", str(tmp_path / "p.txt"), *options).stdout)
    assert set(figures["modes"]) == {"plain", "greedy", "tree", "ngram", "auto", "synthetic"}
    assert {"oracle_acceptance_length", "acceptance_length", "machine", "prompts"} <= set(figures)
    assert figures["oracle_acceptance_length"] >= figures["acceptance_length"] >= 1
    for mode in figures["modes"].values():
        assert mode["predicted_per_second"] > 0
        assert mode["predicted_n"] == 32
        assert mode["classes"].keys() == {"file"}
        assert len(mode["ratios"]) == 2
    assert figures["modes"]["plain"]["ratio"] == 1.0
    greedy = figures["modes"]["greedy"]
    assert len(greedy["accepted_per_slot"]) == 7
    assert {"acceptance_length_fresh", "acceptance_length_repeating", "host_share", "draft_n_accepted"} <= set(greedy)
    assert figures["modes"]["synthetic"]["accepted_share"] > 0.6
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bench_takes_a_bound_for_the_modes_that_draft(files: tuple[str, ...]) -> None:
    from localspec.evaluation.bench import bench
    from localspec.loading.open import open_pair

    with open_pair(Path(files[1]), Path(files[3]), n_ctx=512, n_threads=1) as pair:
        figures = bench(pair, {"one": ["abc"]}, modes=["greedy"], repeats=1, max_tokens=10, draft_max=2)
    assert len(figures["modes"]["greedy"]["accepted_per_slot"]) == 2


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_synthetic_acceptance_is_as_asked(files: tuple[str, ...], rate: float) -> None:
    from localspec.evaluation.bench import bench
    from localspec.loading.open import open_pair

    with open_pair(Path(files[1]), Path(files[3]), n_ctx=512, n_threads=1) as pair:
        modes = bench(pair, {"one": ["abc"]}, modes=[], repeats=1, max_tokens=400, synthetic=rate)["modes"]
    assert modes["synthetic"]["accepted_per_slot"][0] == pytest.approx(rate, abs=0.12)
    assert modes["synthetic"]["acceptance_length"] == pytest.approx(sum(rate**k for k in range(8)), rel=0.15)


def test_tune_shows_the_cost_model(files: tuple[str, ...]) -> None:
    done = call("tune", *files)
    assert done.exit_code == 0
    assert "a draft of 1 " in done.stdout
    assert done.stdout.splitlines()[1].split()[::2] == ["1", "1.00"]


def test_piped_chat_answers_line_by_line_and_ends(files: tuple[str, ...]) -> None:
    done = call("chat", *files, "-n", "8", stdin="abc\n/stats\nabc\nabc\n/nonsense\n/exit\nnever asked\n")
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) >= 2
    assert "unknown command" in done.stderr
    assert "re-used from the KV cache" in done.stderr
    assert "\x1b" not in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "-m", "nowhere.gguf", "-p", "x"), ["cannot read nowhere.gguf"]),
        (("run", "no-such-pair", "-p", "x"), ["no-such-pair", "smollm2-135m"]),
        (("run", "-p", "x", "-f", "y"), ["-p", "-f"]),
        (("run", "-p", "x", "-n", "0"), ["-n", "0"]),
        (("run", "-p", "x", "-f", "y", "--temp", "-1"), ["-p"]),
        (("check", "-f", "nowhere.txt"), ["nowhere.txt"]),
    ],
)
def test_a_mistake_gets_one_sentence(arguments: tuple[str, ...], words: list[str]) -> None:
    done = call(*arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words)


def test_options_out_of_range_are_refused(files: tuple[str, ...]) -> None:
    for option, value in (("--temp", "-1"), ("--top-p", "0"), ("--draft-max", "33"), ("-c", "0"), ("--min-p", "2")):
        done = call("run", *files, "-p", "x", "-n", "2", option, value)
        assert (done.exit_code, done.stdout) == (1, ""), option


def test_a_checkout_runs_without_an_install() -> None:
    done = subprocess.run([sys.executable, ROOT / "cli.py", "--version"], capture_output=True, text=True, cwd="/")
    assert done.stdout.startswith("localspec, version ")


def test_a_reader_that_goes_away_is_no_traceback(files: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "localspec.cli.main", "run", *files, "-p", "abc", "-n", "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        assert b"Traceback" not in child.stderr.read()


def test_the_readme_names_only_what_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"`?localspec ([a-z]+)(?=[ `\n])", re.sub(r"\]\([^)]*\)", "", readme)))
    known = set(main.commands)
    assert known <= commands  # every command is shown
    code = "\n".join(re.findall(r"^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))
    lines = [line for line in code.splitlines() if line.startswith("localspec ")]
    assert lines
    assert {line.split()[1] for line in lines} <= known
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", readme, re.MULTILINE)) <= targets
    for path in re.findall(r"`((?:localspec|models|tools|tests|benchmarks|convert)/[\w./-]*)`", readme):
        assert (ROOT / path).exists(), path
