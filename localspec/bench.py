"""Plain against speculative decoding on the same prompts, in one process, alternating."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from localspec.llama import default_threads, system_info
from localspec.pair import Options, Pair
from localspec.stats import Stats, total

Each = Callable[[str, Stats], None]


def bench(
    pair: Pair,
    prompts: Sequence[str],
    *,
    repeats: int,
    max_tokens: int,
    draft_max: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    each: Each = lambda *_: None,
) -> dict[str, Any]:
    """Answer every prompt `repeats` times each way and give medians over the repeats.

    Of each repeat the tokens and seconds of all prompts are summed, prefill left out. `ratio` is the median of the
    repeats' ratios, so a machine whose speed drifts tells on both sides alike.
    """
    sides: dict[str, list[Stats]] = {"plain": [], "spec": []}
    for repeat in range(repeats):
        runs: dict[str, list[Stats]] = {"plain": [], "spec": []}
        for index, prompt in enumerate(prompts):
            ids = pair.encode(prompt)
            order = ("plain", "spec") if (repeat + index) % 2 == 0 else ("spec", "plain")
            for side in order:
                options: Options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
                options |= {"draft_max": draft_max} if side == "spec" else {"spec": False}
                result = pair.generate(ids, **options)
                runs[side].append(result.stats)
                each(side, result.stats)
        for side, stats in runs.items():
            sides[side].append(total(stats))
    ratios = [s.predicted_per_second / p.predicted_per_second for p, s in zip(*sides.values(), strict=True)]
    return {
        "plain": _figures(sides["plain"]),
        "spec": _figures(sides["spec"]) | _drafting(total(sides["spec"])),
        "ratio": median(ratios),
        "ratios": ratios,
        "prompts": len(prompts),
        "repeats": repeats,
        "max_tokens": max_tokens,
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": default_threads(),
        "llama.cpp": system_info(),
    }


def _figures(repeats: list[Stats]) -> dict[str, Any]:
    speeds = [stats.predicted_per_second for stats in repeats]
    return {
        "predicted_per_second": median(speeds),
        "predicted_per_second_min": min(speeds),
        "predicted_per_second_max": max(speeds),
        "predicted_n": repeats[0].predicted_n,
    }


def _drafting(stats: Stats) -> dict[str, Any]:
    return {
        "acceptance_length": stats.acceptance_length,
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "accepted_share": stats.accepted_share,
        "accepted_per_slot": stats.acceptance_per_slot,
        "seconds_per_round": {
            name: getattr(stats, f"{name}_s") / max(stats.n_rounds, 1)
            for name in ("draft", "verify", "inject", "predicted")
        },
        "host_share": stats.host_share,
    }
