"""`localspec convert`, and llama.cpp's own converter behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from click.testing import CliRunner, Result
from target_checkpoints import write_checkpoint

from localspec.cli.main import main

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, shutil, sys
folder, out, kind = sys.argv[1], sys.argv[2].removeprefix("--outfile="), sys.argv[3].removeprefix("--outtype=")
assert os.environ["HF_HUB_OFFLINE"] == "1"
shutil.copy(folder + "/made.gguf", out)
open(folder + "/asked", "w").write(kind)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint("qwen3", tmp_path / "tiny-model")
    return tmp_path / "tiny-model"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


def test_the_answer_is_the_path(folder: Path) -> None:
    out = folder.with_suffix(".gguf")
    done = call("target", folder, "-o", out, "--outtype", "Q8_0")
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    assert done.stderr == ""  # no bar where there is no terminal
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert kinds == {"Q8_0", "F32"}


def test_an_error_is_one_sentence(folder: Path) -> None:
    out = folder.with_suffix(".gguf")
    (folder / "tokenizer.json").unlink()
    done = call("target", folder, "-o", out)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr == f"Error: {folder} has no tokenizer.json; download it into that folder.\n"
    assert not out.exists()


def test_an_empty_type_is_no_default(folder: Path) -> None:
    out = folder.with_suffix(".gguf")
    assert "Output type '' is not one of f32" in call("target", folder, "-o", out, "--outtype", "").stderr
    assert "Output type '' is not one" in call("drafter", folder, "-o", out, "--target", folder, "--outtype", "").stderr
    assert not out.exists()


def test_a_terminal_gets_a_bar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich this is a terminal
    assert "Converting" in call("target", folder, "-o", folder.with_suffix(".gguf")).stderr


def test_an_existing_file_needs_force(folder: Path) -> None:
    out = folder.with_suffix(".gguf")
    out.write_bytes(b"")
    assert "overwrite it with --force" in call("target", folder, "-o", out).stderr
    assert call("target", folder, "-o", out, "--force").exit_code == 0
    assert out.stat().st_size > 0


@pytest.mark.parametrize("start", [["-m", "localspec", "convert", "target"], [ROOT / "convert" / "target.py"]])
def test_as_a_script(folder: Path, start: list[str]) -> None:
    out = folder.with_suffix(".gguf")
    command = [sys.executable, *start, folder, "-o", out]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"NO_COLOR": "1"})
    assert done.stdout == f"{out}\n"
    assert "\x1b" not in done.stderr


# ---- llama.cpp's converter


@pytest.fixture
def llama_cpp(tmp_path: Path, folder: Path) -> Path:
    """A folder that looks like llama.cpp's, whose converter gives out what we have made before."""
    assert call("target", folder, "-o", folder / "made.gguf").exit_code == 0
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(SCRIPT)
    (folder / "config.json").write_text('{"architectures": ["GemmaForCausalLM"]}')
    return tmp_path / "llama.cpp"


def test_other_architectures_are_left_to_it(folder: Path, llama_cpp: Path) -> None:
    out = folder.with_suffix(".gguf")
    assert "--llama-cpp DIR" in call("target", folder, "-o", out).stderr
    done = call("target", folder, "-o", out, "--llama-cpp", llama_cpp)
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    assert out.read_bytes() == (folder / "made.gguf").read_bytes()
    assert (folder / "asked").read_text() == "f32"


def test_types_it_does_not_know_are_made_by_the_quantiser(folder: Path, llama_cpp: Path) -> None:
    out = folder.with_suffix(".gguf")
    assert call("target", folder, "-o", out, "--llama-cpp", llama_cpp, "--outtype", "q4_0").exit_code == 0
    assert "Q4_0" in {tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert (folder / "asked").read_text() == "f32"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("raise ValueError('no such model')", "(ValueError: no such model)"),
        ("raise SystemExit(3)", "(it says nothing)"),
        ("", "(it says nothing)"),
    ],
)
def test_its_last_words_are_shown(folder: Path, llama_cpp: Path, script: str, words: str) -> None:
    (llama_cpp / "convert_hf_to_gguf.py").write_text(script)
    done = call("target", folder, "-o", folder.with_suffix(".gguf"), "--llama-cpp", llama_cpp)
    assert done.exit_code == 1
    assert words in done.stderr
    assert {path.name for path in folder.parent.iterdir()} == {"tiny-model", "llama.cpp"}


def test_a_folder_without_it(folder: Path, tmp_path: Path) -> None:
    done = call("target", folder, "-o", folder.with_suffix(".gguf"), "--llama-cpp", tmp_path)
    assert f"Error: {tmp_path} has no convert_hf_to_gguf.py" in done.stderr
