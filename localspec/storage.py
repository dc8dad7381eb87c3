"""Where localspec keeps what it downloads and finds out."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """LOCALSPEC_CACHE if that is set, else the user's cache folder."""
    if chosen := os.environ.get("LOCALSPEC_CACHE"):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("localspec", appauthor=False)
