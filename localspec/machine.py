"""What memory this machine has: RAM as far as this process may use it, and the GPUs llama.cpp would put layers on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_FILE_PAGES = ("inactive_file ", "active_file ")


@dataclass(frozen=True)
class Pool:
    """One memory that weights and caches can lie in, bytes.

    `free` counts what the system can drop at once, such as file pages; `swap` is what RAM could still be swapped to. A
    GPU whose driver tells nothing has `total` 0.
    """

    name: str
    total: int
    free: int
    swap: int = 0


def pools() -> tuple[Pool, ...]:
    """RAM, then the GPUs in the order llama.cpp uses them."""
    from localspec.llama import devices  # RAM alone needs no llama.cpp

    found = devices()
    gpus = [device for device in found if device.kind == "gpu"]
    gpus = gpus or [device for device in found if device.kind == "igpu"]  # as llama.cpp: no iGPU beside a card
    return (ram(), *(Pool(gpu.name, gpu.total, gpu.free) for gpu in gpus))


def ram() -> Pool:
    """RAM, or what a container leaves of it."""
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    whole = Pool("RAM", memory.total, memory.available, swap.free)
    return _narrowed(whole, cgroup_limits())


def _narrowed(pool: Pool, limits: list[tuple[int, int]]) -> Pool:
    """`pool` under the tightest of `limits`, each (bytes allowed, bytes used that cannot be dropped)."""
    for limit, used in limits:
        if limit < pool.total:
            # Swap of a container is a limit of its own kind (memory.swap.max): without asking, count on none.
            pool = Pool(pool.name, limit, max(0, min(pool.free, limit - used)))
    return pool


def cgroup_limits(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """The memory limits of this process's control groups and their parents (Linux; versions 1 and 2)."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        own = top / path.lstrip("/")
        inside = [folder for folder in (own, *own.parents) if folder == top or top in folder.parents]
        limits += [limit for folder in inside if (limit := _limit(folder, *names))]
    return limits


def _limit(folder: Path, maximum: str, current: str) -> tuple[int, int] | None:
    """(bytes allowed, bytes used without file pages); None where there is no limit."""
    try:
        allowed = (folder / maximum).read_text().strip()
        if allowed == "max":
            return None
        used, stat = int((folder / current).read_text()), (folder / "memory.stat").read_text()
        droppable = [int(line.split()[1]) for line in stat.splitlines() if line.startswith(_FILE_PAGES)]
        return int(allowed), max(0, used - sum(droppable))
    except (OSError, ValueError):
        return None
