"""Run large language models on one's own machine, faster, with the same output.

    import localspec as ls

    with ls.load("smollm2-135m") as pair:
        print(pair.generate("Why is the sky blue?", max_tokens=100).text)

Nothing is imported, printed or loaded before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.answer import Chunk, Result, Stream
    from localspec.chat import Chat
    from localspec.engine.lattice import Lattice
    from localspec.engine.paths import Chain, Tree
    from localspec.engine.stats import Round, Stats
    from localspec.errors import (
        BackendError,
        LocalspecError,
        MissingError,
        ModelError,
        OptionError,
        PairError,
        TemplateError,
    )
    from localspec.loading.load import load
    from localspec.pair import Pair

__version__ = "0.1.0"

_HOME = {
    "Chain": "engine.paths",
    "Chat": "chat",
    "Chunk": "answer",
    "Lattice": "engine.lattice",
    "Pair": "pair",
    "Result": "answer",
    "Round": "engine.stats",
    "Stats": "engine.stats",
    "Stream": "answer",
    "Tree": "engine.paths",
    "load": "loading.load",
} | dict.fromkeys(
    (
        "BackendError",
        "LocalspecError",
        "MissingError",
        "ModelError",
        "OptionError",
        "PairError",
        "TemplateError",
    ),
    "errors",
)

__all__ = [
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
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"localspec.{_HOME[name]}"), name)
    raise AttributeError(f"module 'localspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
