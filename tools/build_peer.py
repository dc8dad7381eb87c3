"""Build llama.cpp's own server for benchmarks/peer.py and print its folder: `python tools/build_peer.py`.

It is built from the very source that llama-cpp-python vendors, with the flags of build_llama.py, and kept in the cache
of localspec. libllama and the ggml libraries are left out of the folder: the server is to load those that
llama-cpp-python has installed, so that both sides of the comparison run the same machine code, on a GPU as well.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from build_llama import build_settings, dependencies, find, target  # puts the checkout on sys.path

from localspec.storage import cache_dir

SETTINGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
    *(f"-DLLAMA_BUILD_{name}=OFF" for name in ("APP", "EXAMPLES", "TESTS", "UI")),
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # or the build would download one
    "-DLLAMA_OPENSSL=OFF",
]


def main() -> None:
    requirement = next(name for name in dependencies() if name.startswith("llama-cpp-python=="))
    compiler = find("C++ compiler", os.environ.get("CXX"), "c++", "g++", "clang++")
    environment = os.environ | build_settings(compiler)
    parts = [requirement, environment["CXXFLAGS"], *SETTINGS, target(compiler)]
    folder = cache_dir() / "peer" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    if not folder.exists():
        build(requirement, folder, environment)
    print(folder)


def build(requirement: str, folder: Path, environment: dict[str, str]) -> None:
    print("Building llama.cpp's server, once; this takes minutes.", file=sys.stderr, flush=True)
    cmake = find("CMake", "cmake", str(Path(sys.executable).with_name("cmake")))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "build"
        source = fetch(requirement, Path(temporary)) / "vendor" / "llama.cpp"
        run(cmake, "-S", str(source), "-B", str(made), *SETTINGS, environment=environment)
        run(cmake, "--build", str(made), "--target", "llama-server", environment=environment)
        for library in [*(made / "bin").glob("libllama.*"), *(made / "bin").glob("libggml*")]:
            library.unlink()
        (made / "bin").rename(folder)


def fetch(requirement: str, folder: Path) -> Path:
    """Download the source distribution into `folder` and unpack it there."""
    options = ["--quiet", "--no-deps", "--no-binary=llama-cpp-python", f"--dest={folder}"]
    run(sys.executable, "-m", "pip", "download", *options, requirement)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def run(*command: str, environment: dict[str, str] | None = None) -> None:
    """Run a step; what it says (GCC has megabytes of warnings) is shown only where it fails, and only the end."""
    said = subprocess.PIPE
    done = subprocess.run(command, env=environment, stdout=said, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\n{command[0]} failed with status {done.returncode}.")


if __name__ == "__main__":
    main()
