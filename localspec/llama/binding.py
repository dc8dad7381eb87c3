"""What llama-cpp-python binds, the C++ symbols it does not, and llama.cpp's log.

`C` is the low-level module `llama_cpp.llama_cpp`, `ext` the symbols llama.cpp exports from its staging header
`llama-ext.h`. Those may change with any release, so the version is pinned and every symbol is looked up once, here.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from localspec.errors import BackendError
from localspec.llama.openmp import waiting_briefly

PINNED = "0.3.36"


def _import_llama_cpp() -> Any:
    try:
        with waiting_briefly():
            import llama_cpp
    except ImportError as error:
        raise BackendError(f"llama-cpp-python is not installed; run: pip install llama-cpp-python=={PINNED}") from error
    except (OSError, RuntimeError) as error:
        raise BackendError(
            f"llama-cpp-python is installed but its library does not load ({error}); reinstall it with: "
            f"pip install --force-reinstall --no-cache-dir llama-cpp-python=={PINNED}"
        ) from error
    if llama_cpp.__version__ != PINNED:
        raise BackendError(
            f"localspec drives llama-cpp-python {PINNED}, but {llama_cpp.__version__} is installed; "
            f"run: pip install llama-cpp-python=={PINNED}"
        )
    return llama_cpp.llama_cpp


C: Any = _import_llama_cpp()


def _symbol(itanium: str, msvc: str, argtypes: list[Any], restype: Any) -> Callable[..., Any]:
    """A C++ function of libllama by its mangled name (GCC and Clang, or MSVC)."""
    for name in (itanium, msvc):
        try:
            function = getattr(C._lib, name)
        except AttributeError:
            continue
        function.argtypes, function.restype = argtypes, restype
        return function  # type: ignore[no-any-return]
    raise BackendError(
        f"this build of llama-cpp-python {PINNED} does not export {itanium}; "
        f"build it from source: pip install --no-binary llama-cpp-python llama-cpp-python=={PINNED}"
    )


class ext:  # noqa: N801 (used as a namespace, like C)
    """The unbound functions localspec calls (`src/llama-ext.h`)."""

    _ctx, _model = C.llama_context_p_ctypes, C.llama_model_p_ctypes
    set_embeddings_layer_inp = staticmethod(
        _symbol(
            "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
            "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
            [_ctx, ctypes.c_uint32, ctypes.c_bool],
            None,
        )
    )
    get_embeddings_layer_inp = staticmethod(
        _symbol(
            "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
            "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
            [_ctx, ctypes.c_uint32],
            ctypes.c_void_p,
        )
    )
    set_embeddings_nextn = staticmethod(
        _symbol(
            "_Z26llama_set_embeddings_nextnP13llama_contextbb",
            "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
            [_ctx, ctypes.c_bool, ctypes.c_bool],
            None,
        )
    )
    get_embeddings_nextn = staticmethod(
        _symbol(
            "_Z26llama_get_embeddings_nextnP13llama_context",
            "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
            [_ctx],
            ctypes.c_void_p,
        )
    )
    model_target_layer_ids = staticmethod(
        _symbol(
            "_Z28llama_model_target_layer_idsPK11llama_model",
            "?llama_model_target_layer_ids@@YAPEBHPEBUllama_model@@@Z",
            [_model],
            ctypes.c_void_p,
        )
    )
    model_target_layer_ids_n = staticmethod(
        _symbol(
            "_Z30llama_model_target_layer_ids_nPK11llama_model",
            "?llama_model_target_layer_ids_n@@YAIPEBUllama_model@@@Z",
            [_model],
            ctypes.c_uint32,
        )
    )
    model_dflash_selector_top_k = staticmethod(
        _symbol(
            "_Z33llama_model_dflash_selector_top_kPK11llama_model",
            "?llama_model_dflash_selector_top_k@@YAHPEBUllama_model@@@Z",
            [_model],
            ctypes.c_int32,
        )
    )


class Log:
    """llama.cpp's log: silent by default, its last lines kept for error messages."""

    verbose = False
    level = 0
    recent: ClassVar[deque[str]] = deque(maxlen=50)

    @staticmethod
    @C.llama_log_callback  # type: ignore[untyped-decorator]
    def _receive(level: int, text: bytes, _user_data: Any) -> None:
        line = text.decode("utf-8", "replace")
        if level != 5:  # GGML_LOG_LEVEL_CONT goes on with the line before
            Log.level = level
        if Log.level == 4:  # GGML_LOG_LEVEL_ERROR
            Log.recent.append(line.strip())
        if Log.verbose:
            sys.stderr.write(line)

    @classmethod
    def reason(cls) -> str:
        """The first error llama.cpp logged since `clear`, without its function name."""
        lines = [line for line in cls.recent if line]
        return lines[0].split(": ", 1)[-1].rstrip(".") if lines else "llama.cpp gave no reason"

    @classmethod
    def clear(cls) -> None:
        cls.recent.clear()


C.llama_log_set(Log._receive, ctypes.c_void_p(0))
with waiting_briefly():  # some builds load their CPU library only here
    C.llama_backend_init()


def set_verbose(verbose: bool) -> None:
    """Pass llama.cpp's log through to stderr, or keep it silent (the default)."""
    Log.verbose = verbose


def system_info() -> str:
    """llama.cpp's own line on how it was built, e.g. `CPU : AVX2 = 1 | AMX_INT8 = 1 | …`."""
    return str(C.llama_print_system_info().decode())


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until a long call into C is done: raised in a callback of it, it would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if pressed and before != signal.SIG_IGN:
        raise KeyboardInterrupt


def has_amx() -> bool:
    """True if ggml's AMX kernels are compiled in and would be chosen on this CPU."""
    return "AMX_INT8 = 1" in system_info()


def gpu_offload() -> bool:
    """True if this build of llama.cpp can put layers on a GPU."""
    return bool(C.llama_supports_gpu_offload())


def library_folder() -> Path:
    """Folder of libllama and the ggml libraries."""
    return Path(C._lib._name).parent
