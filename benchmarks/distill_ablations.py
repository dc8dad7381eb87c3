"""What each part of a drafter and of its training brings: one line each, at equal training time.

    python benchmarks/distill_ablations.py TARGET.gguf DATA -o FOLDER --steps 2000

DATA is a data folder of `localspec distill`. Every line is a drafter trained from scratch with one thing changed,
written as Q8_0 and measured through llama.cpp: acceptance length on held-out chats, then tokens a second on prompts at
each fixed draft length, the best of which is shown. Training times are equal: a line whose step takes twice as long
makes half as many. How long a step takes is measured first, all lines in turns on the same batches, as a machine may be
a third faster a minute later. A line that is done is not done again; FOLDER then holds costs.json, ablations.json and
ablations.md. Leave the machine alone meanwhile: half of the columns are timings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch

from localspec.distill import Options, Shape, evaluate_drafter, read_data, train_drafter
from localspec.distill.export import export, provenance
from localspec.distill.pipeline import KEEP_MEMORY
from localspec.distill.start import TargetFile, fresh_drafter
from localspec.distill.train import Trained, Trainer
from localspec.distill.windows import split
from localspec.evaluation import prompts
from localspec.evaluation.bench import bench
from localspec.loading.open import open_pair

Changes = Mapping[str, Any]
BASE = {"objective": "mix", "patience": 0, "eval_every_s": 1e9}
HELD_OUT_SHARE = 4  # of so many held-out chats one is drafted along: the target has to read it first
COST_STEPS = 20
VARIANTS: dict[str, tuple[Changes, Changes]] = {  # name -> what of Shape and of Options is changed
    "base": ({}, {}),
    "base, another seed": ({}, {"seed": 1}),
    "random first layers": ({"copy_layers": False}, {}),
    "cross-entropy": ({}, {"objective": "ce"}),
    "KL to the target": ({}, {"objective": "kl"}),
    "no convolution": ({"conv": False}, {}),
    "no selector": ({}, {"selector_weight": 0.0}),
    "the target's head": ({"own_head": False}, {}),
    "1 layer": ({"n_layers": 1}, {}),
    "1 layer, another seed": ({"n_layers": 1}, {"seed": 1}),
    "3 layers": ({"n_layers": 3}, {}),
    "5 layers": ({"n_layers": 5}, {}),
    "1 layer tapped": ({"n_tapped": 1}, {}),
    "2 layers tapped": ({"n_tapped": 2}, {}),
    "2,048 tokens drafted": ({"n_rows": 2048}, {}),
    "4,096 tokens drafted": ({"n_rows": 4096}, {}),
    "16,384 tokens drafted": ({"n_rows": 16384}, {}),
    "all slots count the same": ({}, {"gamma": 1e9}),
    "later slots count half as much": ({}, {"gamma": 2.0}),
    "every slot weighed, none left out": ({}, {"position_weights": "exponential"}),
    "D-PACE weights": ({}, {"position_weights": "d-pace"}),
    "loops a quarter as often": ({}, {"repeat_weight": 0.25}),
    "no loops": ({}, {"repeat_weight": 0.0}),
}
BEGUN = "1 layer, begun with another drafter's first"  # a line only where --from names that drafter's run


def variant(name: str, args: argparse.Namespace, steps: int) -> tuple[Shape, Options]:
    """What a line trains, and how."""
    of_shape, of_options = VARIANTS[name] if name in VARIANTS else ({"n_layers": 1}, {"init": str(args.begin)})
    shape = replace(Shape(n_layers=args.layers, n_rows=args.vocab_size), **of_shape)
    return shape, Options(**{**BASE, "steps": steps, "compile": args.compile, "n_threads": args.threads, **of_options})


def costs(names: Sequence[str], args: argparse.Namespace) -> dict[str, float]:
    """How long a step of each line takes, in steps of the base; from an earlier call or anew.

    The median over steps on the same batch, so that compiling does not count.
    """
    path = args.out / "costs.json"
    known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    if new := [name for name in names if name not in known]:
        torch._dynamo.config.recompile_limit = 1000  # all lines are here at once
        rows, file = read_data(args.data), TargetFile(args.target)
        with tempfile.TemporaryDirectory() as scratch:
            trainings = []
            for i, name in enumerate(("base", *new)):
                shape, options = variant(name, args, 10**6)
                trainings.append(
                    Trainer(fresh_drafter(file, rows, shape), rows, Path(scratch, str(i)), options).steps()
                )
            seconds = [[timed(training) for training in trainings] for _ in range(COST_STEPS)]
        known |= {name: median(row[i] / row[0] for row in seconds) for i, name in enumerate(new, 1)}
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=1))
    return known


def timed(steps: Iterator[Any]) -> float:
    """Seconds of the next step."""
    began = monotonic()
    next(steps)
    return monotonic() - began


def train_and_export(target: Path, data: Path, folder: Path, shape: Shape, options: Options) -> Path:
    """A drafter of that shape as Q8_0 GGUF."""
    train_drafter(target, data, folder, shape=shape, options=options)
    file, trained, path = TargetFile(target), Trained.read(folder), folder / "drafter.gguf"
    export(trained.drafter(file), target, path, provenance=provenance(trained, read_data(data), file))
    return path


def measure(target: Path, drafter: Path, data: Path, texts: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Acceptance on held-out chats, and speed on prompts at the draft lengths asked for."""
    rows = read_data(data)
    _, held_out = split(rows)
    some = held_out[::HELD_OUT_SHARE]
    found = evaluate_drafter(target, drafter, rows, some, n_anchors=args.anchors, n_threads=args.threads)
    with open_pair(target, drafter, n_ctx=2048, n_threads=args.threads) as pair:
        runs = {
            n: bench(
                pair,
                {"prompts": texts},
                modes=["greedy"],
                repeats=args.repeats,
                max_tokens=args.predict,
                draft_max=n,
            )["modes"]
            for n in args.draft_max
        }
    speeds = {n: modes["greedy"] for n, modes in runs.items()}
    best = max(speeds, key=lambda n: speeds[n]["ratio"])
    return asdict(found) | {
        "mb": drafter.stat().st_size / 1e6,
        "draft_max": best,
        "ratio": speeds[best]["ratio"],
        "predicted_per_second": speeds[best]["predicted_per_second"],
        "plain_per_second": runs[best]["plain"]["predicted_per_second"],
        "draft_ms": 1000 * speeds[best]["seconds_per_round"]["draft"],
        "ratios": {n: figures["ratio"] for n, figures in speeds.items()},
    }


def result_of(name: str, out: Path) -> Path:
    """Where the figures of a line are kept."""
    return out / name.replace(" ", "-").replace(",", "") / "result.json"


def line(name: str, cost: float, args: argparse.Namespace, texts: Sequence[str]) -> dict[str, Any]:
    """The figures of one variant, from an earlier call or anew."""
    path = result_of(name, args.out)
    folder = path.parent
    if path.exists():
        return dict(json.loads(path.read_text()))
    shape, options = variant(name, args, round(args.steps / cost))
    drafter = train_and_export(args.target, args.data, folder, shape, options)
    trained = Trained.read(folder)
    figures = measure(args.target, drafter, args.data, texts, args)
    result = {"name": name, "cost": cost, "step": trained.step, "n_anchors": trained.n_anchors, **figures}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1))
    part.replace(path)
    return result


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    head = (
        "| | a step takes | blocks trained | acceptance length, fresh | repeating | pool, slot 1 | MB | draft, ms "
        "| tokens/s | over plain |"
    )
    lines = [head, "|---" * 10 + "|"]
    for r in results:
        fresh, repeating = r["figures"]["fresh"], r["figures"]["repeating"]
        recall = (fresh["recall_per_slot"] or [0])[0]
        lines.append(
            f"| {r['name']} | {r['cost']:.2f} | {r['n_anchors'] / 1e6:.2f} M | {fresh['acceptance_length']:.3f} "
            f"| {repeating['acceptance_length']:.3f} | {recall:.0%} | {r['mb']:.1f} | {r['draft_ms']:.1f} "
            f"| {r['predicted_per_second']:.0f} at {r['draft_max']} drafted | {r['ratio']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--anchors", type=int, default=2000, help="blocks to evaluate")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("-t", "--threads", type=int)
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps of the base; other lines take the same time")
    parser.add_argument("--only", help=f"lines to make, separated by semicolons: {'; '.join(VARIANTS)}")
    parser.add_argument("--from", dest="begin", type=Path, help=f"run of a drafter, for the line {BEGUN!r}")
    parser.add_argument("--prompts", type=Path, help="prompts to time (default: the package's own)")
    parser.add_argument("--count", type=int, default=8, help="prompts to time")
    parser.add_argument("--predict", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft-max", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 3])
    args = parser.parse_args()
    texts = (prompts.read(args.prompts) if args.prompts else [p for some in prompts.own().values() for p in some])[
        : args.count
    ]
    lines = [*VARIANTS, *([BEGUN] if args.begin else [])]
    names = [name.strip() for name in args.only.split(";")] if args.only else lines
    if unknown := [name for name in names if name not in lines]:
        parser.error(f"there is no line {unknown[0]!r}; choose from {'; '.join(lines)}")
    cost = costs(names, args)
    for name in names:
        print(table([line(name, cost[name], args, texts)]).splitlines()[-1], flush=True)
        done = [path for path in (result_of(known, args.out) for known in (*VARIANTS, BEGUN)) if path.exists()]
        results = [json.loads(path.read_text()) for path in done]
        (args.out / "ablations.json").write_text(json.dumps(results, indent=1))
        (args.out / "ablations.md").write_text(table(results))


if __name__ == "__main__":
    if not os.environ.keys() >= KEEP_MEMORY.keys():  # what a training has, too
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    main()
