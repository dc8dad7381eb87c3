"""Build llama-cpp-python for this very machine and install it: `python tools/build_llama.py [--cuda]`.

The wheel is kept in localspec's cache under everything that shaped it, so that only the first clone waits. pip's own
cache knows neither flags nor CPU and is left out.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from localspec.storage import cache_dir  # noqa: E402

# GCC 12 (and older) believes that `ldtilecfg` reads 8 of its 64 bytes and drops the stores of the others as dead: any
# batch of two tokens then dies in ggml's AMX kernels. With its stores kept AMX works and is three times as fast as
# code without it. Other compilers either know both flags and lose nothing by them, or are spared.
KEEP_STORES = ["-fno-tree-dse", "-fno-dse"]


def main() -> None:
    requirement = next(name for name in dependencies() if name.startswith("llama-cpp-python=="))
    compiler = find("C++ compiler", os.environ.get("CXX"), "c++", "g++", "clang++")
    environment = os.environ | build_settings(compiler)
    parts = [requirement, environment["CXXFLAGS"], environment["CMAKE_ARGS"], target(compiler)]
    if "--cuda" in sys.argv:
        nvcc = find("CUDA compiler", "nvcc", "/usr/local/cuda/bin/nvcc")
        parts.append(output(nvcc, "--version"))
    folder = cache_dir() / "wheels" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    if not folder.exists():
        build(requirement, folder, environment)
    pip("install", "--quiet", "--no-deps", "--force-reinstall", *map(str, folder.glob("*.whl")))


def dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["dependencies"])


def find(what: str, *candidates: str | None) -> str:
    for candidate in candidates:
        if candidate and (path := shutil.which(candidate)):
            return path
    sys.exit(f"There is no {what} here (tried {', '.join(filter(None, candidates))}): install one, then make again.")


def build_settings(compiler: str) -> dict[str, str]:
    """The variables that llama-cpp-python's build reads, after those of the user."""
    flags = KEEP_STORES if compiles(compiler, *KEEP_STORES) else []
    cuda = ["-DGGML_CUDA=on"] if "--cuda" in sys.argv else []
    return {
        **{name: " ".join([os.environ.get(name, ""), *flags]).strip() for name in ("CFLAGS", "CXXFLAGS")},
        "CMAKE_ARGS": " ".join(["-DLLAVA_BUILD=OFF", *cuda, os.environ.get("CMAKE_ARGS", "")]).strip(),
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count())),
    }


def compiles(compiler: str, *flags: str) -> bool:
    command = [compiler, "-Werror", *flags, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def target(compiler: str) -> str:
    """The compiler's version and all that this CPU can do, as the macros that the build will see."""
    native = ["-march=native"] if compiles(compiler, "-march=native") else []
    return output(compiler, *native, "-dM", "-E", "-x", "c++", os.devnull)


def build(requirement: str, folder: Path, environment: dict[str, str]) -> None:
    print("Building llama.cpp for this machine, once; this takes minutes.", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        wheels = Path(temporary) / "wheels"
        options = ["--no-deps", "--no-cache-dir", "--no-binary=llama-cpp-python", f"--wheel-dir={wheels}"]
        pip("wheel", *options, requirement, environment=environment)
        wheels.rename(folder)


def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
