"""`localspec distill`: a drafter for the GGUF at hand, trained on what that very model says.

    from localspec import distill

    distill.distill(Path("target.gguf"), Path("folder"), distill.DistillConfig(n_tokens=1_000_000, hours=2))

does all of it; each stage can be called by itself. In the order of work: `store` (chats and features on disk), `chats`
(how a chat comes about), `synthesise` (the target asks and answers itself while its layer inputs are kept), `collect`
(the same for chats that are written), `model` and `start` (the drafter in torch and its first weights), `windows`,
`objective` and `metrics` (batches, losses, figures), `train`, `export` (GGUF), `evaluate` (through llama.cpp),
`release` and `card` (what is handed out), `pipeline` (all of it). Nothing is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.distill.collect import collect as collect_features
    from localspec.distill.config import DistillConfig
    from localspec.distill.evaluate import evaluate as evaluate_drafter
    from localspec.distill.options import Options
    from localspec.distill.pipeline import distill
    from localspec.distill.pipeline import train as train_drafter
    from localspec.distill.release import release as release_drafter
    from localspec.distill.start import Shape
    from localspec.distill.store import read as read_data
    from localspec.distill.synthesise import synthesise as synthesise_chats

_HOME = {
    "DistillConfig": ("config", "DistillConfig"),
    "Options": ("options", "Options"),
    "Shape": ("start", "Shape"),
    "collect_features": ("collect", "collect"),
    "distill": ("pipeline", "distill"),
    "evaluate_drafter": ("evaluate", "evaluate"),
    "read_data": ("store", "read"),
    "release_drafter": ("release", "release"),
    "synthesise_chats": ("synthesise", "synthesise"),
    "train_drafter": ("pipeline", "train"),
}

__all__ = [
    "DistillConfig",
    "Options",
    "Shape",
    "collect_features",
    "distill",
    "evaluate_drafter",
    "read_data",
    "release_drafter",
    "synthesise_chats",
    "train_drafter",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, attribute = _HOME[name]
        return getattr(importlib.import_module(f"localspec.distill.{module}"), attribute)
    raise AttributeError(f"module 'localspec.distill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
