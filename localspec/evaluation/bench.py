"""Ways of decoding side by side, on the same prompts, in one process, alternating."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from localspec.engine import paths
from localspec.engine.lattice import Lattice
from localspec.engine.stats import Stats, total
from localspec.errors import MissingError, OptionError
from localspec.llama import default_threads, native, system_info
from localspec.options import Options
from localspec.pair import Pair
from localspec.planning.ngram import repeats as repeats_itself

MODES: dict[str, Options] = {
    "plain": {"spec": False},
    "greedy": {"path": "greedy"},
    "expected": {"path": "expected"},
    "tree": {"path": "tree"},
    "ngram": {"path": "ngram"},
    "auto": {"path": "auto"},
}
Each = Callable[[str, Stats], None]


@dataclass
class Run:
    """One mode over all prompts of one repeat: figures of each class of prompts, and what became of each round."""

    stats: dict[str, list[Stats]] = field(default_factory=dict)
    fresh: list[int] = field(default_factory=list)  # tokens of rounds whose text had not repeated itself
    repeating: list[int] = field(default_factory=list)

    def speed(self, kind: str | None = None) -> float:
        return self.total(kind).predicted_per_second

    def total(self, kind: str | None = None) -> Stats:
        return total(one for name, some in self.stats.items() if kind in (None, name) for one in some)


def bench(
    pair: Pair,
    prompts: Mapping[str, Sequence[str]],
    *,
    modes: Sequence[str] = ("plain", "auto"),
    repeats: int,
    max_tokens: int,
    temperature: float = 0.0,
    draft_max: int | None = None,
    synthetic: float | None = None,
    seed: int = 0,
    each: Each = lambda *_: None,
) -> dict[str, Any]:
    """Answer the prompts of every class `repeats` times in every mode and give medians over the repeats.

    Of each repeat the tokens and seconds of all prompts are summed, prefill left out. `ratio` is the median of the
    repeats' ratios to plain decoding, so a machine whose speed drifts tells on all sides alike. `draft_max` bounds
    every mode that drafts. With `synthetic` there is a mode of that name: the drafter runs, but in each slot its pick
    is right with that probability, whatever it has learnt.
    """
    if {"auto", "ngram"} & set(modes):
        pair.settle()
    options = {mode: MODES[mode] | _bound(mode, draft_max) for mode in dict.fromkeys(["plain", *modes])}
    if synthetic is not None:
        options["synthetic"] = {"path": "greedy"}
    shared: Options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    runs: dict[str, list[Run]] = {mode: [] for mode in options}
    for repeat in range(repeats):
        for some in runs.values():
            some.append(Run())
        for index, (kind, prompt) in enumerate((kind, text) for kind, texts in prompts.items() for text in texts):
            ids = pair.encode(prompt)
            truth = pair.generate(ids, **(shared | MODES["plain"])).tokens if synthetic is not None else []
            for mode in _turned(list(options), repeat + index):
                chosen = shared | options[mode]
                if mode == "synthetic":
                    chosen["path"] = Synthetic(pair, ids + truth, synthetic or 0.0, seed + index)
                stats = _answer(pair, ids, chosen, runs[mode][-1])
                runs[mode][-1].stats.setdefault(kind, []).append(stats)
                each(mode, stats)
    plain = runs["plain"]
    return {
        "modes": {mode: _figures(some, plain) for mode, some in runs.items()},
        "prompts": sum(len(texts) for texts in prompts.values()),
        "repeats": repeats,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "machine": machine(),
    }


class Synthetic:
    """A path whose tokens are right with probability `rate` each: the greedy walk, mended and spoilt by lot."""

    def __init__(self, pair: Pair, text: Sequence[int], rate: float, seed: int) -> None:
        self._pair, self._text, self._rate = pair, text, rate
        self._random = np.random.default_rng(seed)

    def __call__(self, lattice: Lattice) -> paths.Chain:
        start = self._pair.n_tokens
        truth = self._text[start : start + len(lattice)]
        right = self._random.random(len(truth)) < self._rate
        n_vocab = self._pair.vocab.n_tokens
        tokens = [token if ok else (token + 1) % n_vocab for token, ok in zip(truth, right, strict=True)]
        return paths.Chain(tokens, [self._rate ** (k + 1) for k in range(len(tokens))])


def oracle(pair: Pair, prompts: Sequence[str], *, max_tokens: int) -> dict[str, float]:
    """Greedy acceptance length beside that of the best path the pools held, over the rounds of a greedy chain."""
    greedy, best = [], []
    for prompt in prompts:
        ids = pair.encode(prompt)
        seen: list[tuple[int, Lattice]] = []

        def watch(lattice: Lattice, seen: list[tuple[int, Lattice]] = seen) -> paths.Chain:
            seen.append((pair.n_tokens, lattice))
            return paths.greedy(lattice)

        text = ids + pair.generate(ids, max_tokens=max_tokens, path=watch).tokens
        for start, lattice in seen:
            said = text[start : start + len(lattice)]
            greedy.append(_prefix(a == b for a, b in zip(paths.greedy(lattice).tokens, said, strict=False)))
            best.append(_prefix(token in pool for token, pool in zip(said, lattice.ids, strict=False)))
    return {"acceptance_length": 1 + float(np.mean(greedy)), "oracle_acceptance_length": 1 + float(np.mean(best))}


def check_plot(path: Path | None) -> None:
    """Raises MissingError without matplotlib and OptionError for a folder that is not there, before all the work."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingError("a plot needs matplotlib, which is not installed; run: pip install 'localspec[plot]'")
    if not path.parent.is_dir():
        raise OptionError(f"there is no folder {path.parent} for the plot; create it, or name another.")


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Draw speed-ups by class of prompts, and the share of rounds that kept each slot, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    modes = {name: mode for name, mode in figures["modes"].items() if name != "plain"}
    classes = [*figures["modes"]["plain"]["classes"], "all"]
    width = 0.8 / max(len(modes), 1)
    for i, (name, mode) in enumerate(modes.items()):
        heights = [*mode["classes"].values(), mode["ratio"]]
        bars.bar(np.arange(len(classes)) + i * width, heights, width, label=name)
        lines.plot(range(1, len(mode["accepted_per_slot"]) + 1), mode["accepted_per_slot"], "o-", label=name)
    bars.axhline(1, color="black", linewidth=0.8)
    bars.set_xticks(np.arange(len(classes)) + 0.4 - width / 2, classes)
    bars.set_ylabel("speed over plain decoding")
    lines.set(xlabel="tokens behind the anchor", ylabel="share of rounds that kept it", ylim=(0, 1))
    bars.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": default_threads(),
        "llama.cpp": system_info(),
        "kernels": native.state().detail,
    }


def _bound(mode: str, draft_max: int | None) -> Options:
    return {} if draft_max is None or mode == "plain" else {"draft_max": draft_max}


def _turned(modes: list[str], by: int) -> list[str]:
    """The modes in another order each time, so that none always comes first."""
    by %= len(modes)
    return modes[by:] + modes[:by]


def _answer(pair: Pair, ids: list[int], options: Options, run: Run) -> Stats:
    stream, text = pair.stream(ids, **options), list(ids)
    for chunk in stream:
        if chunk.tokens:
            (run.repeating if repeats_itself(text) else run.fresh).append(len(chunk.tokens))
        text += chunk.tokens
    return stream.result.stats


def _prefix(right: Iterator[bool]) -> int:
    n = 0
    for one in right:
        if not one:
            break
        n += 1
    return n


def _figures(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """One mode's entry: speeds and ratios of the repeats, and what drafting did in all of them."""
    speeds = [run.speed() for run in runs]
    ratios = [run.speed() / base.speed() for run, base in zip(runs, plain, strict=True)]
    stats = total(run.total() for run in runs)
    return {
        "predicted_per_second": median(speeds),
        "predicted_per_second_min": min(speeds),
        "predicted_per_second_max": max(speeds),
        "predicted_n": runs[0].total().predicted_n,
        "ratio": median(ratios),
        "ratios": ratios,
        "classes": {
            kind: median(run.speed(kind) / base.speed(kind) for run, base in zip(runs, plain, strict=True))
            for kind in runs[0].stats
        },
        "acceptance_length": stats.acceptance_length,
        "acceptance_length_fresh": _mean(n for run in runs for n in run.fresh),
        "acceptance_length_repeating": _mean(n for run in runs for n in run.repeating),
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "accepted_share": stats.accepted_share,
        "accepted_per_slot": stats.acceptance_per_slot,
        "n_rounds": stats.n_rounds,
        "n_parked": stats.n_parked,
        "seconds_per_round": {
            name: getattr(stats, f"{name}_s") / max(stats.n_rounds, 1)
            for name in ("draft", "verify", "inject", "predicted")
        },
        "host_share": stats.host_share,
    }


def _mean(values: Iterator[int]) -> float | None:
    some = list(values)
    return float(np.mean(some)) if some else None
