"""The compiled part: built where it can be, used where it works, and nothing is lost where it does not."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import tiny
from click.testing import CliRunner

from localspec.cli.main import main
from localspec.errors import OptionError
from localspec.evaluation import doctor
from localspec.llama import native, native_child, selftest
from localspec.storage import recall

ROOT = Path(__file__).parents[2]
UNDEFINED = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []

# Stands in for the library, without kernels for any CPU; dies when it is asked for them the `{fatal}`th time.
FAKE = """
#include <cstdio>
#include <cstdlib>
extern "C" {{
int localspec_kernels_enable() {{
    FILE * calls = fopen("{calls}", "a");
    fputc('x', calls);
    long n = ftell(calls);
    fclose(calls);
    if (n == {fatal}) abort();
    return 0;
}}
{more}
}}
"""
OTHERS = "".join(f"int {name}() {{ return 0; }}\n" for name in native.FUNCTIONS if name != "localspec_kernels_enable")
SAY = """
import json, sys, localspec
from localspec.llama import native
with localspec.load(target=sys.argv[1], n_threads=1) as pair:
    tokens = pair.generate([1, 2, 3], max_tokens=4).tokens
print(json.dumps([tokens, native.state().detail]))
"""


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """Compiles such a library."""

    def compile(*, fatal: int = 0, more: str = "") -> Path:
        source, library = tmp_path / "fake.cpp", tmp_path / "fake.so"
        source.write_text(FAKE.format(calls=tmp_path / "calls", fatal=fatal, more=OTHERS + more))
        subprocess.run(["c++", "-shared", "-fPIC", *UNDEFINED, "-o", library, source], check=True, capture_output=True)
        return library

    return compile


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An empty cache."""
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    return monkeypatch


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What was found before does not count, nor after it what a test finds."""
    native.state.cache_clear()
    yield
    native.state.cache_clear()


def say(target: Path, cache: Path, **environment: str) -> tuple[list[int], str, str]:
    """Four tokens said by another process, its native part's state, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", SAY, str(target)],
        capture_output=True,
        text=True,
        env=os.environ | {"LOCALSPEC_CACHE": str(cache)} | environment,
    )
    assert done.returncode == 0, done.stderr
    tokens, detail = json.loads(done.stdout)
    return tokens, detail, done.stderr


def only_finding() -> doctor.Finding:
    (finding,) = doctor.kernels()
    return finding


# --- the library


def test_what_is_installed_loads() -> None:
    state = native.state()
    assert state.library is not None, state
    assert state.library.localspec_kernels_supported(0) == 1
    assert state.step is None
    assert native.identity() != native.OFF


def test_it_is_compiled_from_the_headers_of_the_pinned_version() -> None:
    installed = Path(llama_cpp.__file__).parent.parent / "include"
    ours = ROOT / "localspec" / "native" / "ggml"
    names = [path.name for path in ours.glob("*.h")]
    assert len(names) == 4
    assert filecmp.cmpfiles(ours, installed, names, shallow=False)[0] == names


def test_it_is_whole_on_a_cpu_that_it_has_no_kernels_for(tmp_path: Path) -> None:
    """Its sources, compiled as for another processor: behind the system's headers the macro of x86 is gone."""
    sources = sorted((ROOT / "localspec" / "native").glob("*.cpp"))
    text = "".join(path.read_text() for folder in ("", "ggml") for path in (sources[0].parent / folder).glob("*.[ch]*"))
    system = sorted(set(re.findall(r"#include <(?!immintrin|cpuid).+>", text)))
    (tmp_path / "other.h").write_text("\n".join([*system, "#undef __x86_64__", ""]))
    include = ["-include", tmp_path / "other.h", "-I", sources[0].parent / "ggml"]
    command = ["c++", "-std=c++17", "-fPIC", "-w", *include, "-c"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda path: subprocess.run([*command, path], cwd=tmp_path, check=True), sources))
    objects = sorted(tmp_path.glob("*.o"))
    subprocess.run(["c++", "-shared", *UNDEFINED, "-o", tmp_path / "other.so", *objects], check=True)
    library = native._open(tmp_path / "other.so")  # binds every function it calls
    assert library.localspec_kernels_enable() == 0
    assert not any(library.localspec_kernels_supported(i) for i in (1, 2, 3))


def test_this_environment_has_it_where_it_can_be_built() -> None:
    """Without it the tests of its kernels would all pass by being left out."""
    can_build = sys.platform != "win32" and any(map(shutil.which, ("c++", "g++", "clang++")))
    assert (native.state().library is not None) == can_build, native.state()


# --- off, and why


def test_an_unknown_instruction_set_does_not_change_the_words_silently(
    fresh: pytest.MonkeyPatch,
) -> None:
    fresh.setenv(native.SWITCH, "foo")
    with pytest.raises(OptionError, match=r"^LOCALSPEC_KERNELS is 'foo'; set it to 0, avx2, avxvnni or avx512"):
        native.state()


def test_switched_off(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv(native.SWITCH, "0")
    assert native.state() == native.State(None, "off: switched off by LOCALSPEC_KERNELS=0")
    assert only_finding().status == "ok"
    assert native.identity() == native.OFF


def test_no_kernels_is_the_same(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv(native.SWITCH, "")
    CliRunner().invoke(main, ["run", "--no-kernels", "-m", "nowhere.gguf", "-p", "Hi"])
    assert os.environ[native.SWITCH] == "0"


def test_not_compiled(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv(native.OTHER_LIBRARY, "nowhere.so")
    finding = only_finding()
    assert finding.status == "warn"
    assert "C++ compiler" in finding.detail
    assert "make setup" in (finding.next or "")


def test_another_ggml(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(native, "GGML", "0.0.1")
    with pytest.raises(native.UnusableError, match=r"made for ggml 0\.0\.1, this llama\.cpp has \d") as raised:
        native._open(native._path())
    assert raised.value.step == "pip install llama-cpp-python==0.3.36"


def test_symbols_that_are_not_there(fake: Callable[..., Path]) -> None:
    library = fake(more="int no_such_thing(); int ask() { return no_such_thing(); }")
    with pytest.raises(native.UnusableError, match=r"does not fit this build of llama\.cpp .*no_such_thing"):
        native._open(library)


def test_functions_that_are_not_there(fake: Callable[..., Path], fresh: pytest.MonkeyPatch) -> None:
    fresh.setitem(native.FUNCTIONS, "localspec_of_tomorrow", (None, []))
    with pytest.raises(native.UnusableError, match="localspec_of_tomorrow"):
        native._open(fake())


# --- tried in a child process


def test_a_library_that_works_is_tried_once(fake: Callable[..., Path], tmp_path: Path) -> None:
    library, target = fake(), tiny.write_target(tmp_path / "target.gguf")
    tokens, detail, stderr = say(target, tmp_path / "cache", LOCALSPEC_NATIVE_LIBRARY=str(library))
    assert (detail, stderr) == ("none for this CPU: ggml's own are used", "")
    assert [path.read_text() for path in (tmp_path / "cache" / "native").iterdir()] == [selftest.WORKS]
    assert tokens == say(target, tmp_path / "cache", LOCALSPEC_KERNELS="0")[0]


# The first to ask is the child that tries the library, the second the one that tries a file.
@pytest.mark.parametrize(("fatal", "what"), [(1, "crashes here"), (2, "crashes on target.gguf")])
def test_a_library_that_crashes_is_off(fake: Callable[..., Path], tmp_path: Path, fatal: int, what: str) -> None:
    library, target = fake(fatal=fatal), tiny.write_target(tmp_path / "target.gguf")
    environment = {"LOCALSPEC_NATIVE_LIBRARY": str(library)}
    tokens, detail, stderr = say(target, tmp_path / "cache", **environment)
    assert detail.startswith(f"off: {what}")
    assert stderr.count("LocalspecWarning: localspec's native part crashes") == 1
    assert say(target, tmp_path / "cache", **environment) == (tokens, detail, "")


def test_wrong_numbers_are_a_verdict(fresh: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fresh.setattr(native, "load", lambda: None)
    fresh.setattr(native_child, "logits", lambda path, *, repack: np.array([1.0, 1.2 if repack else 1.0], np.float32))
    with pytest.raises(SystemExit) as ended:
        native_child._compare()
    assert ended.value.code == selftest.WRONG
    words = selftest._words(subprocess.CompletedProcess([], selftest.WRONG, "", capsys.readouterr().err))
    assert words == "computes wrong numbers here (Q4_0 is off by 0.2 of the largest logit)"


def test_what_could_not_be_tried_is_tried_again(fresh: pytest.MonkeyPatch) -> None:
    assert selftest.tried("native", "key", "localspec.no_such_module").startswith("could not be tried")
    assert recall("native", "key") is None


def test_the_command_line_says_it_in_a_sentence(fake: Callable[..., Path], tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target.gguf")
    command = [sys.executable, "-m", "localspec", "run", "-m", str(target), "-p", "Hi", "-n", "2", "-t", "1"]
    environment = {"LOCALSPEC_NATIVE_LIBRARY": str(fake(fatal=1)), "LOCALSPEC_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0
    first = done.stderr.splitlines()[0]
    assert first.startswith("Warning: localspec's native part crashes here (")
    assert first.endswith("); models run without it, more slowly.")
