"""What users may lean on: the exported names, a quiet and lazy import, one tree of errors, and the layers below."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import localspec

PACKAGE = Path(localspec.__file__).parent
NAMES = {
    "BackendError",
    "Chat",
    "Chunk",
    "Lattice",
    "LocalspecError",
    "MissingError",
    "ModelError",
    "OptionError",
    "Pair",
    "PairError",
    "Result",
    "Round",
    "Stats",
    "Stream",
    "TemplateError",
    "load",
}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# --- names


def test_the_exported_names() -> None:
    assert set(localspec.__all__) == NAMES
    assert set(dir(localspec)) == NAMES | {"__version__"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_there_and_documented(name: str) -> None:
    thing = getattr(localspec, name)
    assert thing.__name__ == name
    assert thing.__doc__


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        localspec.nothing  # noqa: B018


def test_star_import_brings_exactly_the_names() -> None:
    done = python("from localspec import *\nprint(*sorted(n for n in dir() if not n.startswith('__')))")
    assert set(done.stdout.split()) == NAMES


def test_the_errors_are_one_tree() -> None:
    errors = {name for name in NAMES if name.endswith("Error")}
    assert all(issubclass(getattr(localspec, name), localspec.LocalspecError) for name in errors)
    assert not any(
        issubclass(getattr(localspec, a), getattr(localspec, b)) for a in errors for b in errors - {a, "LocalspecError"}
    )


def test_import_is_silent_and_lazy() -> None:
    heavy = ("llama_cpp", "numpy", "jinja2", "gguf", "rich", "click", "torch", "ctypes")
    done = python(f"import sys, localspec\nprint([m for m in {heavy} if m in sys.modules])")
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("[]", "", 0)


@pytest.mark.parametrize("name", sorted(NAMES - {"load", "Pair", "Chat", "Chunk", "Result", "Stream"}))
def test_plain_names_do_not_load_llama_cpp(name: str) -> None:
    done = python(f"import sys\nfrom localspec import {name}\nprint('llama_cpp' in sys.modules)")
    assert done.stdout.strip() == "False"


def test_loading_llama_cpp_is_silent_too() -> None:
    done = python("import sys, localspec\nlocalspec.load\nprint('llama_cpp' in sys.modules)")
    assert (done.stdout.strip(), done.stderr) == ("True", "")


# --- layers (the table of the design, section 2)

PURE = {
    "lattice": set(),
    "paths": {"lattice"},
    "sampling": set(),
    "accept": {"paths"},
    "stats": set(),
    "ngram": set(),
    "record": {"ngram"},
    "planner": {"lattice", "paths", "ngram", "record", "sampling", "stats"},
}
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "cache": set(),
    **PURE,
    "llama": {"cache"},
    "memory": {"llama"},
    "compat": {"llama"},
    "fit": {"llama", "memory", "compat"},
    "target": {"llama", "lattice", "paths"},
    "drafter": {"llama", "lattice", "target"},
    "generate": {"target", "drafter", "lattice", "paths", "planner", "sampling", "accept", "stats"},
    "staircase": {"cache", "target", "drafter", "paths", "record"},
    "text": {"llama"},
    "options": {"lattice", "paths", "planner", "sampling", "text"},
    "chat": {"generate", "text"},
}
TOP = {"pair", "check", "bench", "prompts", "probe", "doctor", "app", "terminal", "distill", "models", "convert"}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package, by its name inside it (`llama.context`)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports when it runs; what only a type checker reads is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name: str) -> str | None:
    """`localspec.llama.context.Context` -> `llama`; None for what is not ours."""
    parts = name.split(".")
    known = LAYERS.keys() | TOP
    return parts[1] if parts[0] == "localspec" and len(parts) > 1 and parts[1] in known else None


def test_the_table_has_every_module() -> None:
    found = {name.split(".")[0] for name, _ in modules()} - {"__init__"}
    assert found <= LAYERS.keys() | TOP
    assert LAYERS.keys() <= found


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_module_imports_only_what_lies_below_it(name: str) -> None:
    for module, path in modules():
        if module.split(".")[0] == name:
            ours = {layer(imported) for imported in imports(path)} - {None, name, "errors"}
            assert ours <= LAYERS[name], f"{module} imports {ours - LAYERS[name]}"


def test_only_the_door_touches_c() -> None:
    for module, path in modules():
        if not module.startswith("llama"):
            roots = {name.split(".")[0] for name in imports(path)}
            assert not roots & {"llama_cpp", "ctypes", "_ctypes", "cffi"}, module


@pytest.mark.parametrize("name", sorted(PURE))
def test_the_pure_modules_run_without_llama_cpp(name: str) -> None:
    done = python(
        f"import sys, localspec.{name}\n"
        "print([m for m in sys.modules if m.startswith(('llama_cpp', 'localspec.llama', 'jinja2'))])"
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_walk_sees_imports_inside_functions() -> None:
    found = dict(modules())
    assert any(name.startswith("llama_cpp") for name in imports(found["llama.header"]))
    assert "localspec.pair.Pair" not in set(imports(found["chat"]))  # under TYPE_CHECKING
