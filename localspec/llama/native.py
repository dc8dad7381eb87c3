"""localspec's compiled part (`localspec/native`): found, tried in a child process, loaded after llama.cpp's libraries.

It is optional. Where it is missing, does not belong to this llama.cpp, crashes or is switched off, everything works
without it, more slowly; `state` says which of these it is. Its functions are declared here, in one table.
"""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecWarning, OptionError
from localspec.llama import selftest
from localspec.llama.binding import PINNED, C
from localspec.storage import recall, remember

KIND = "native"  # of its verdicts
OFF = "off"
SLOWER = "models run without it, more slowly"
SWITCH = "LOCALSPEC_KERNELS"  # 0: off; avx2, avxvnni, avx512: this instruction set and no better one
WISHES = ("", "0", "avx2", "avxvnni", "avx512")
OTHER_LIBRARY = "LOCALSPEC_NATIVE_LIBRARY"  # another build of it, such as one with sanitizers
GGML = "0.25.3"  # of llama-cpp-python's pinned version; `ggml_internals.h` holds for no other
# One symbol of each library that ours calls: ggml-base, ggml, ggml-cpu.
CALLED = ("ggml_backend_tensor_get", "ggml_backend_dev_by_type", "_Z39ggml_backend_cpu_get_extra_buffer_typesv")
INSTALL = "with a C++ compiler at hand run `make setup` in a checkout, or: pip install --force-reinstall --no-deps ."

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "localspec_kernels_enable": (ctypes.c_int, []),
    "localspec_kernels_supported": (ctypes.c_int, [ctypes.c_int]),
    "localspec_kernels_name": (ctypes.c_char_p, [ctypes.c_int]),
    "localspec_kernels_use": (ctypes.c_int, [ctypes.c_int]),
    "localspec_layer_inputs_take": (ctypes.c_bool, [ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p]),
    "localspec_kernels_attention": (ctypes.c_int, [ctypes.c_int]),
}


@dataclass(frozen=True)
class State:
    """The loaded library, or None. `detail` says what it does or why it is off, `step` what helps where that is bad."""

    library: Any
    detail: str
    step: str | None = None


class UnusableError(Exception):
    """Why the native part is off, as the end of a sentence, and what to do about it."""

    def __init__(self, why: str, step: str | None = None) -> None:
        super().__init__(why)
        self.step = step


@cache
def state() -> State:
    """The native part of this process; the first call loads it, which must come before the first model."""
    try:
        _try()
        return load()
    except UnusableError as error:
        return State(None, f"off: {error}", error.step)


@cache
def load() -> State:
    """Load it and put its kernels before ggml's, tried or not. Raises UnusableError."""
    library = _open(_path())
    chosen = library.localspec_kernels_enable()
    if not chosen and (wish := os.environ.get(SWITCH)):
        raise UnusableError(f"this CPU lacks {wish}, which {SWITCH} asks for", f"unset {SWITCH}")
    detail = library.localspec_kernels_name(chosen).decode() if chosen else "none for this CPU: ggml's own are used"
    return State(library, detail)


def is_loaded() -> bool:
    """Whether it is in this process, where it stays until the process ends."""
    return load.cache_info().currsize > 0


def identity() -> str:
    """What every figure and verdict found with it depends on; loads nothing."""
    try:
        _try()
        return _key()
    except UnusableError:
        return OFF


def distrust(words: str) -> None:
    """Leave it off on this machine from now on, because it `words`; says so in a LocalspecWarning."""
    remember(KIND, _key(), words)
    _distrusted.append(words)  # for this process at least: the cache may be read-only
    state.cache_clear()
    _warn(words)


_distrusted: list[str] = []


def _try() -> None:
    """Raise UnusableError unless it works in a child process; say so in a LocalspecWarning the first time."""
    key = _key()
    is_known = recall(KIND, key) is not None
    words = _distrusted[0] if _distrusted else selftest.tried(KIND, key, "localspec.llama.native_child")
    if words != selftest.WORKS:
        if not is_known and not _distrusted:
            _warn(words)
        raise UnusableError(words, SLOWER)


def _warn(words: str) -> None:
    warnings.warn(f"localspec's native part {words}; {SLOWER}.", LocalspecWarning, stacklevel=3)


def _key() -> str:
    """What a verdict on it depends on, besides ggml: the library, the CPU, the instruction set that was asked for."""
    return selftest.key(_path(), _cpu(), os.environ.get(SWITCH, ""))


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features")))


def _path() -> Path:
    """The library's file, if it is wanted and there."""
    if (wish := os.environ.get(SWITCH, "")) == "0":
        raise UnusableError(f"switched off by {SWITCH}=0")
    if wish not in WISHES:
        raise OptionError(f"{SWITCH} is {wish!r}; set it to 0, avx2, avxvnni or avx512, or unset it.")
    path = Path(os.environ.get(OTHER_LIBRARY) or Path(__file__).with_name("liblocalspec_native.so"))
    if not path.exists():
        raise UnusableError(
            "localspec was installed without it, for want of a C++ compiler or because it did not compile", INSTALL
        )
    return path


def _open(path: Path) -> Any:
    _check_ggml()
    try:
        for symbol in CALLED:
            _publish(symbol)
        library = ctypes.CDLL(str(path))
        for name, (restype, argtypes) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = restype, argtypes
    except (AttributeError, OSError) as error:
        raise UnusableError(f"it does not fit this build of llama.cpp ({error})", INSTALL) from error
    return library


def _check_ggml() -> None:
    """What it knows of ggml's inner structs holds for one version."""
    version = getattr(C._lib, "ggml_version", None)
    if version is None:
        raise UnusableError("this build of llama.cpp does not say which ggml it holds")
    version.restype = ctypes.c_char_p
    if (found := version().decode()) != GGML:
        raise UnusableError(
            f"it is made for ggml {GGML}, this llama.cpp has {found}", f"pip install llama-cpp-python=={PINNED}"
        )


class _Place(ctypes.Structure):  # Dl_info
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _publish(symbol: str) -> None:
    """Let libraries that are loaded later find what is in the library of `symbol`.

    By the very file that is in use: a wheel holds each library three times, and another copy would be another ggml.
    """
    place = _Place()
    address = ctypes.cast(getattr(C._lib, symbol), ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(place)):
        raise OSError(f"the file of {symbol} is not known")
    ctypes.CDLL(os.fsdecode(place.file), ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
