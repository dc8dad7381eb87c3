"""Whether anything else keeps this machine busy."""

from __future__ import annotations

import os
from time import perf_counter

import psutil

BUSY = 0.1  # share of all CPUs that others use: from here on measured seconds are not trusted for ever


class Others:
    """What other processes use of the CPUs, from when this is made until it is asked."""

    def __init__(self) -> None:
        self._began, self._used_s = perf_counter(), _others_s()

    @property
    def share(self) -> float:
        """Share of all CPUs, 0 … 1; 0 where the system does not tell."""
        seconds = (perf_counter() - self._began) * (os.cpu_count() or 1)
        return min(max((_others_s() - self._used_s) / max(seconds, 1e-9), 0.0), 1.0)

    @property
    def are_busy(self) -> bool:
        return self.share > BUSY


def _others_s() -> float:
    """CPU seconds of all processes but this one, since the system began."""
    try:
        everybody, own = psutil.cpu_times(), psutil.Process().cpu_times()
    except (OSError, psutil.Error):
        return 0.0
    return float(everybody.user + everybody.system - own.user - own.system)
