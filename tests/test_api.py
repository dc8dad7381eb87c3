"""What users may lean on: the exported names, a quiet and lazy import, one tree of errors, and the layers below."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import localspec

PACKAGE = Path(localspec.__file__).parent
NAMES = {
    "BackendError",
    "Chain",
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
    "Tree",
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


@pytest.mark.parametrize("name", sorted(NAMES - {"load", "Pair", "Chain", "Chat", "Chunk", "Result", "Stream"}))
def test_plain_names_do_not_load_llama_cpp(name: str) -> None:
    done = python(f"import sys\nfrom localspec import {name}\nprint('llama_cpp' in sys.modules)")
    assert done.stdout.strip() == "False"


def test_loading_llama_cpp_is_silent_too() -> None:
    done = python("import sys, localspec\nlocalspec.load\nprint('llama_cpp' in sys.modules)")
    assert (done.stdout.strip(), done.stderr) == ("True", "")
