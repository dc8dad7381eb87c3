"""Whatever an account, its environment or its folders have wrong ends in an answer or in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

# What a child process does before it is localspec: a folder that may not be entered (root may enter any), or an
# account that the system does not know.
LOCKED = """
import builtins, io, os
def guard(call):
    def guarded(path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and "locked" in os.fspath(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return call(path, *args, **kwargs)
    return guarded
for name in ("stat", "lstat", "mkdir", "open", "listdir", "scandir"):
    setattr(os, name, guard(getattr(os, name)))
io.open = builtins.open = guard(builtins.open)
"""
NOBODY = """
import os, pwd
def unknown(key): raise KeyError(key)
pwd.getpwuid = pwd.getpwnam = unknown
os.environ.pop("HOME", None)
"""
SHUT = "import os\nos.close(0)\n"
MAIN = "import sys\nif sys.argv[1] == 'shut': sys.stdin = None; del sys.argv[1]\n"
MAIN += "from localspec.cli.main import main\nmain(prog_name='localspec')"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    target = tiny.write_target(folder / "t.gguf", "llama", chat_template=tiny.CHATML)
    return ["-m", str(target), "-c", "256", "-t", "1", "-n", "3"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written into the working directory does not stay."""
    monkeypatch.chdir(tmp_path)


def localspec(*arguments: str, before: str = "", **environment: str | None) -> subprocess.CompletedProcess[str]:
    """The command in a child process; a variable that is None is taken out."""
    changed = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", before + MAIN, *arguments],
        env={name: value for name, value in changed.items() if value is not None},
        capture_output=True,
        text=True,
        errors="surrogateescape",
        stdin=subprocess.DEVNULL,
        check=False,
    )


def is_one_sentence(stderr: str) -> bool:
    return stderr.startswith("Error: ") and "Traceback" not in stderr and stderr.count("\n") <= 3


CACHES = {
    "no such user": {"LOCALSPEC_CACHE": "~nosuchuser/x"},
    "a device": {"LOCALSPEC_CACHE": "/dev/null/x"},
    "a name too long": {"LOCALSPEC_CACHE": "x" * 5000},
    "bytes that are no text": {"LOCALSPEC_CACHE": "caf\udce9"},
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
def test_a_cache_that_is_no_place_costs_no_answer(files: list[str], cache: dict[str, str], tmp_path: Path) -> None:
    done = localspec("run", *files, "-p", "hi", **cache)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")


@pytest.mark.parametrize("before", [LOCKED, NOBODY], ids=["locked", "an unknown account"])
def test_an_account_without_folders_gets_its_answer(files: list[str], before: str) -> None:
    cache = {"LOCALSPEC_CACHE": "/locked"} if before == LOCKED else {"LOCALSPEC_CACHE": None, "XDG_CACHE_HOME": None}
    done = localspec("run", *files, "-p", "hi", before=before, **cache)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["models"], ["run", "-p", "hi"], ["pull"]])
def test_what_needs_a_folder_says_so(command: list[str]) -> None:
    done = localspec(*command, before=NOBODY, LOCALSPEC_CACHE=None, XDG_CACHE_HOME=None)
    assert done.returncode == 1
    assert "no home folder to keep files in; set LOCALSPEC_CACHE to a folder" in done.stderr
    assert "Traceback" not in done.stderr
    locked = localspec(*command, before=LOCKED, LOCALSPEC_CACHE="/locked/cache", HF_HOME="/locked/hub")
    assert "Traceback" not in locked.stderr
    assert locked.returncode == 0 or is_one_sentence(locked.stderr), locked.stderr


def test_doctor_finds_what_the_account_lacks() -> None:
    done = localspec("doctor", before=NOBODY, LOCALSPEC_CACHE=None, XDG_CACHE_HOME=None)
    assert (done.returncode, done.stderr) == (1, "")
    assert "this account has no home folder" in done.stdout


def test_a_file_name_need_not_be_text(files: list[str], tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.gguf"
    os.link(files[1], name)
    done = localspec("run", "-m", os.fsdecode(name), *files[2:], "-p", "hi", LOCALSPEC_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stderr) == (0, "")
    missing = localspec("run", "-m", os.fsdecode(name + b"x"), "-p", "hi")
    assert (missing.returncode, is_one_sentence(missing.stderr)) == (1, True)
    assert "no such file" in missing.stderr


@pytest.mark.parametrize("command", ["run", "chat"])
def test_standard_input_may_be_closed(files: list[str], command: str) -> None:
    done = localspec("shut", command, *files)
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) in [(0, ""), (1, "")]


VARIABLES = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "LOCALSPEC_CACHE", "TMPDIR", "LANG", "LC_ALL", "COLUMNS", "TERM",
             "NO_COLOR", "OMP_NUM_THREADS")  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_no_variable_makes_a_traceback(files: list[str], name: str) -> None:
    for value in ("", "no/such\udcff", "x" * 3000):
        done = localspec("models", **{name: value})
        assert "Traceback" not in done.stderr, (name, value)
        assert done.returncode == 0 or is_one_sentence(done.stderr), (name, value, done.stderr)
