"""The folders are layers: each imports only what lies below it, no circle anywhere, and one door to C.

Imports inside functions and those that only a type checker reads count like all others.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "localspec"

# What each top-level module or folder may import, besides itself and `errors`.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "progress": set(),
    "storage": set(),
    "llama": {"storage"},
    "machine": {"llama"},
    "dflash": {"llama"},
    "engine": {"llama"},
    "hub": {"dflash", "llama", "machine", "progress", "storage"},
    "turns": set(),
    "textfile": set(),
    "reasoning": set(),
    "text": {"llama", "reasoning"},
    "template": {"llama", "reasoning"},
    "answer": {"engine", "turns"},
    "options": {"engine", "text"},
    "planning": {"engine", "options", "storage"},
    "prompt": {"llama", "template", "text"},
    "chat": {"answer", "options", "prompt", "template"},
    "pair": {"answer", "chat", "engine", "llama", "options", "planning", "prompt", "template", "text", "turns"},
    "loading": {"dflash", "engine", "hub", "llama", "machine", "options", "pair", "planning", "storage", "template"},
    "convert": {"dflash", "llama", "storage"},
    "distill": {
        "convert",
        "dflash",
        "engine",
        "llama",
        "machine",
        "planning",
        "progress",
        "storage",
        "template",
        "text",
    },
}
LAYERS["evaluation"] = LAYERS.keys() - {"convert", "distill"}
LAYERS["__init__"] = LAYERS.keys() - {"convert", "distill", "evaluation"}
LAYERS["cli"] = set(LAYERS)
LAYERS["__main__"] = {"cli"}

PURE = ("accept", "lattice", "paths", "plan", "sampling", "stats")  # of engine: numpy and nothing else


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, by its name inside it (`llama.context`; a folder by its own name)."""
    names = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports(path: Path) -> Iterator[str]:
    """Full names of whatever a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path) -> set[str]:
    """The modules of the package that a file imports, by their names inside it."""
    found = set()
    for name in imports(path):
        root, _, inside = name.partition(".")
        while root == "localspec" and inside and inside not in modules():
            inside = inside.rpartition(".")[0]
        if root == "localspec":
            found.add(inside or "__init__")
    return found


def test_every_module_has_its_layer() -> None:
    assert {name.split(".")[0] for name in modules()} == set(LAYERS)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_layer_imports_only_what_lies_below_it(name: str) -> None:
    for module, path in modules().items():
        if module.split(".")[0] == name:
            used = {other.split(".")[0] for other in ours(path)} - {name, "errors"}
            assert used <= LAYERS[name], f"{module} imports {used - LAYERS[name]}"


def test_the_layers_are_no_circle() -> None:
    graphlib.TopologicalSorter(LAYERS).prepare()


def test_no_module_imports_itself_in_the_end() -> None:
    graphlib.TopologicalSorter({name: ours(path) - {name} for name, path in modules().items()}).prepare()


def test_only_the_door_touches_c() -> None:
    for module, path in modules().items():
        if not module.startswith("llama"):
            roots = {name.split(".")[0] for name in imports(path)}
            assert not roots & {"llama_cpp", "ctypes", "_ctypes", "cffi"}, module


def test_only_a_pair_touches_its_engine() -> None:
    benchmarks = (PACKAGE.parent / "benchmarks").glob("*.py")
    for path in [path for name, path in modules().items() if name != "pair"] + list(benchmarks):
        inside = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Attribute)
        ]
        assert not [node for node in inside if node.attr == "engine"], path


@pytest.mark.parametrize("name", [f"engine.{name}" for name in PURE] + ["planning.ngram", "planning.auto"])
def test_the_pure_modules_run_without_llama_cpp(name: str) -> None:
    code = (
        f"import sys, localspec.{name}\n"
        "print([m for m in sys.modules if m.startswith(('llama_cpp', 'localspec.llama', 'jinja2'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_walk_sees_every_kind_of_import() -> None:
    assert any(name.startswith("llama_cpp") for name in imports(modules()["llama.header"]))  # inside a function
    assert "llama.context" in ours(modules()["llama"])
    assert "evaluation.check" in ours(modules()["cli.tables"])  # for a type checker only


def test_every_slow_file_is_there() -> None:
    from conftest import FOLDER, SLOW

    assert [name for name in sorted(SLOW) if not (FOLDER / f"{name}.py").exists()] == []


def test_the_file_map_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE.parent / "tools")
    import file_map

    document = file_map.DOCUMENT.read_text(encoding="utf-8")
    assert file_map.updated(document) == document, "run: python tools/file_map.py"
