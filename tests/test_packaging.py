"""What an install puts where, and what `make` does before anything is installed."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "localspec",
    "models",
    "convert",
    "cli.py",
    "Makefile",
    "tools",
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is committed, so that no build leaves anything in the working tree."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in (ROOT / name for name in SOURCES):
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif path.exists():
            shutil.copy(path, folder)
    return folder


def build_wheel(checkout: Path, folder: str, **environment: str) -> Path:
    build = f"import setuptools.build_meta as b; b.build_wheel({folder!r})"
    (checkout / folder).mkdir()
    environment = os.environ | environment
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True, env=environment)
    return next((checkout / folder).glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build_wheel(checkout, "dist")


def python(code: str, folder: Path) -> str:
    """Run `code` in a Python that finds localspec in `folder` only, not where this environment has it."""
    alone = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in repr(f)]\n"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", alone + code]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def test_every_package_is_listed() -> None:
    inside = {path.parent.relative_to(ROOT) for path in (ROOT / "localspec").rglob("*.py")}
    folders = {".".join(path.parts) for path in inside}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders


def test_wheel_has_one_top_level_name_one_command_and_all_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        commands = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"localspec"}
    assert commands.split("\n")[:2] == ["[console_scripts]", "localspec = localspec.cli.main:main"]
    assert {"localspec/py.typed", "localspec/evaluation/prompts.jsonl"} <= names
    described = [path for path in (ROOT / "models").rglob("*") if path.suffix in {".toml", ".gguf", ".md"}]
    assert {f"localspec/models/{path.relative_to(ROOT / 'models').as_posix()}" for path in described} <= names


def natives(wheel: Path) -> list[str]:
    """What a wheel holds of the native part."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if "native" in name and not name.endswith((".py", "LICENSE"))]


def test_wheel_has_the_native_part_and_not_its_sources(wheel: Path) -> None:
    assert natives(wheel) == ["localspec/llama/liblocalspec_native.so"]


@pytest.mark.parametrize("environment", [{"CXX": "false", "PATH": ""}, {"CXX": "false"}], ids=["no", "a failing"])
def test_wheel_with_such_a_compiler_is_without_it(
    checkout: Path, tmp_path: Path, environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    wheel = build_wheel(checkout, request.node.callspec.id, **environment)
    assert natives(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    printed = python("from localspec.llama import native; print(native.__file__, native.state())", tmp_path)
    assert printed.startswith(str(tmp_path))
    assert "installed without it" in printed


def test_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import localspec.hub.registry as m, localspec.convert as c; print(m.names(), m.__file__, c.__file__)"
    printed = python(code, tmp_path)
    assert "smollm2-135m" in printed
    assert printed.count(str(tmp_path)) == 2


def test_a_checkout_needs_no_install(checkout: Path) -> None:
    code = "import cli, localspec.convert; from localspec.hub import registry; print(registry.names())"
    assert "smollm2-135m" in python(code, checkout)


# ---- types, as a user's checker sees them

USER = """
import localspec as ls
from localspec.hub import registry

reveal_type(registry.get("smollm2-135m"))
with ls.load("smollm2-135m") as pair:
    reveal_type(pair)
    reveal_type(pair.generate("x", max_tokens=3, temperature=0.5).text)
    reveal_type(next(pair.stream("x")).drafted)
    with pair.stream("x") as stream:
        reveal_type([chunk.tokens for chunk in stream])
        reveal_type(stream.result.stats.acceptance_length)
    chat = pair.chat(system="y")
    reveal_type(chat.send("x", stop=["a"]).finish_reason)
    chat.messages = [{"role": "user", "content": "x"}]
    reveal_type(chat.undo())
    pair.generate("x", path=lambda pool: ls.Chain([int(pool.ids[0, 0])], [1.0]))
    pair.generate("x", max_token=3)
    pair.generate("x", max_tokens="3")
    chat.send("x", temperature="hot")
"""
REVEALED = (
    "localspec.hub.registry.PairEntry",
    "localspec.pair.Pair",
    "str",
    "list[bool]",
    "list[list[int]]",
    "float",
    "str",
    "str",
)
REFUSED = ('Unexpected keyword argument "max_token"', 'argument "max_tokens"', 'argument "temperature"')


def test_a_users_checker_sees_the_types_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """Without `py.typed` in the wheel all of it is `Any`."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = next(path for path in (tmp_path / "venv").glob("*/python*") if path.stem == "python")
    (site,) = (tmp_path / "venv").rglob("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "others.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n")  # what it depends on; not localspec
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "user.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert re.findall(r'Revealed type is "(?:builtins\.)?(.*)"', said.replace("builtins.", "")) == list(REVEALED), said
    errors = [line for line in said.splitlines() if ": error: " in line]
    assert len(errors) == len(REFUSED), said
    assert all(words.lower() in error.lower() for words, error in zip(REFUSED, errors, strict=True)), said


# ---- make


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=cwd, check=False, capture_output=True, text=True)


class TestMake:
    def test_chat_does_all_of_it(self, checkout: Path) -> None:
        plan = make("-n", "chat", cwd=checkout).stdout
        steps = ["-m venv .venv", "build_llama.py", "--editable .", "localspec pull", "localspec chat"]
        places = [plan.index(step) for step in steps]
        assert places == sorted(places)
        assert "--cuda" not in plan

    def test_cuda_is_another_build(self, checkout: Path) -> None:
        assert "build_llama.py --cuda" in make("-n", "chat", "CUDA=1", cwd=checkout).stdout
        assert "--cuda" not in make("-n", "chat", "CUDA=0", cwd=checkout).stdout

    def test_too_old_a_python_is_named(self, checkout: Path) -> None:
        done = make("setup", "PYTHON=", cwd=checkout)
        assert done.returncode
        assert "needs Python 3.11 or newer" in done.stderr


# ---- the build of llama-cpp-python


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/build_llama.py with pip and the four minutes taken out."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = importlib.import_module("build_llama")
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["build_llama.py"])
    monkeypatch.setattr(module, "built", [], raising=False)

    def pip(command: str, *options: str, environment: dict[str, str] | None = None) -> None:
        if command == "wheel" and environment:
            module.built.append(environment)
            folder = next(option for option in options if option.startswith("--wheel-dir=")).partition("=")[2]
            Path(folder).mkdir()

    monkeypatch.setattr(module, "pip", pip)
    return module


def test_one_build_for_one_set_of_flags(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tool.main()
    tool.main()
    assert len(tool.built) == 1
    monkeypatch.setenv("CXXFLAGS", "-O2")
    tool.main()
    assert len(tool.built) == 2
    assert tool.built[1]["CXXFLAGS"].startswith("-O2")
    assert "-DLLAVA_BUILD=OFF" in tool.built[1]["CMAKE_ARGS"]


def test_flags_are_passed_where_the_compiler_knows_them(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "compiles", lambda compiler, *flags: True)
    assert tool.build_settings("c++")["CFLAGS"].endswith("-fno-tree-dse -fno-dse")
    monkeypatch.setattr(tool, "compiles", lambda compiler, *flags: False)
    assert "dse" not in tool.build_settings("c++")["CXXFLAGS"]


def test_compiler_is_asked(tool: ModuleType) -> None:
    assert tool.compiles("c++")
    assert not tool.compiles("c++", "-fno-such-flag-anywhere")


def test_without_a_compiler_it_says_so(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler here \(tried c\+\+, g\+\+"):
        tool.main()


def test_an_editable_install_is_a_path_that_checkers_can_follow() -> None:
    """Not a finder, which only a running Python asks."""
    assert not [finder for finder in sys.meta_path if "localspec" in getattr(finder, "__module__", "")]
