"""The one part of localspec that is compiled: `localspec/native`, as one library beside the module that loads it.

It is optional: without a compiler, or where it does not compile, localspec is installed without it and says so in
`localspec doctor`. It is no Python extension: it is not linked with Python, nor with llama.cpp, whose symbols it finds
when it is loaded. So it is the same for every Python, and is built in pip's isolated environments, where there is no
llama.cpp, from the headers in `localspec/native/ggml`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

SOURCES = Path("localspec/native")
LIBRARY = Path("localspec/llama/liblocalspec_native.so")
# No -march: functions name the instruction sets they use, and the best is chosen at run time. Without contraction a
# product and a sum are fused only where the source says so: the same bits however a loop is unrolled.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", f"-I{SOURCES / 'ggml'}", "-w"]
UNDEFINED = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []  # elsewhere they need no permission


class BuildNative(build_ext):
    """Compiles with the C++ compiler that a user would find, not with the one Python was built with."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def run(self) -> None:
        if self.editable_mode or self.inplace:
            LIBRARY.unlink(missing_ok=True)  # an older one must not stay where this one fails, nor be written into
        super().run()

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.unlink(missing_ok=True)
        objects = Path(self.build_temp)
        for folder in (library.parent, objects):
            folder.mkdir(parents=True, exist_ok=True)
        compiler = find_compiler()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            built = list(pool.map(lambda source: compile_one(compiler, Path(source), objects), ext.sources))
        run([compiler, "-shared", *UNDEFINED, "-o", str(library), *built])


class BuildWithModels(build_py):
    """Puts the pairs' files, data that lie beside the package in a checkout, inside it in a wheel.

    Not by a mapping of folders: for one, an editable install would hide the package from type checkers and editors.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("models", Path(self.build_lib, "localspec", "models"), dirs_exist_ok=True)


def find_compiler() -> str:
    """CXX, or the first of the usual names that is there."""
    if sys.platform == "win32":
        raise CompileError("the native part is not built on Windows")
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise CompileError("there is no C++ compiler")


def compile_one(compiler: str, source: Path, folder: Path) -> str:
    target = str(folder / f"{source.stem}.o")
    run([compiler, *FLAGS, "-c", str(source), "-o", target])
    return target


def run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(str(error)) from error


setup(
    cmdclass={"build_ext": BuildNative, "build_py": BuildWithModels},
    ext_modules=[
        Extension(
            ".".join(LIBRARY.with_suffix("").parts),
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=[str(path) for path in sorted(SOURCES.rglob("*")) if path.suffix == ".h" or path.name == "LICENSE"],
            optional=True,
        )
    ],
)
