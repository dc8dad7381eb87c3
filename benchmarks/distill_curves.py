"""Learning curves of a drafter: over steps, from the log of a training, and over data, from trainings on parts of it.

    python benchmarks/distill_curves.py TARGET.gguf DATA -o FOLDER --run RUN
    python benchmarks/distill_curves.py TARGET.gguf DATA -o FOLDER --steps 4000 --shares 1/8,1/4,1/2,1

The first prints the evaluations a run of `localspec distill` (its folder `run`) has logged. The second trains on the
first so many chats of DATA, each time for the same number of steps, and evaluates through llama.cpp on the chats all of
DATA holds out. A part that is done is not done again. FOLDER then holds curves.json, curves.md and, with matplotlib,
curves.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from distill_ablations import HELD_OUT_SHARE, arguments, train_and_export, variant

from localspec.distill import evaluate_drafter, read_data
from localspec.distill.windows import split

Row = Mapping[str, Any]


def over_steps(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run: step, anchors, seconds, and acceptance lengths on fresh and repeating held-out text."""
    rows = [json.loads(text) for text in (run / "log.jsonl").read_text().splitlines()]
    return [
        {key: row[key] for key in ("step", "n_anchors", "elapsed_s")}
        | {text: row[text]["acceptance_length"] for text in ("fresh", "repeating")}
        | {"recall": row["fresh"]["recall_per_slot"][0]}
        for row in rows
        if "eval_loss" in row
    ]


def part_of(data: Path, share: Fraction, folder: Path) -> Path:
    """The first `share` of the chats of a data folder, as a folder whose large files are links."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokens.bin", "features.bin", "candidates.bin", "meta.json"):
        if not (folder / name).exists():
            (folder / name).symlink_to((data / name).resolve())
    lines = (data / "chats.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "chats.jsonl").write_text("".join(lines[: round(len(lines) * share)]), encoding="utf-8")
    return folder


def point(share: Fraction, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of a drafter trained on a share of the data."""
    folder = args.out / f"share-{share.numerator}-{share.denominator}"
    path = folder / "result.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    part = part_of(args.data, share, folder / "data")
    shape, options = variant("base", args, args.steps)
    drafter = train_and_export(args.target, part, folder / "run", shape, options)
    rows = read_data(args.data)
    _, held_out = split(rows)
    some = held_out[::HELD_OUT_SHARE]
    found = evaluate_drafter(args.target, drafter, rows, some, n_anchors=args.anchors, n_threads=args.threads)
    fresh, repeating = found.figures["fresh"], found.figures["repeating"]
    result = {
        "share": str(share),
        "n_tokens": len(read_data(part).tokens),
        "fresh": fresh["acceptance_length"],
        "repeating": repeating["acceptance_length"],
        "recall": fresh["recall_per_slot"][0],
    }
    path.write_text(json.dumps(result))
    return result


def table(title: str, key: str, rows: Sequence[Row]) -> str:
    """One curve as Markdown."""
    lines = [f"| {title} | acceptance length, fresh | repeating | pool, slot 1 |", "|---" * 4 + "|"]
    lines += [f"| {row[key]:,} | {row['fresh']:.3f} | {row['repeating']:.3f} | {row['recall']:.0%} |" for row in rows]
    return "\n".join(lines) + "\n"


def plot(curves: Mapping[str, tuple[str, Sequence[Row]]], path: Path) -> None:
    """All curves side by side: title -> (what runs along the x axis, points)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(curves), 3.6), dpi=120, layout="constrained")
    for axes, (title, (key, rows)) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        for text in ("fresh", "repeating"):
            axes.plot([row[key] for row in rows], [row[text] for row in rows], marker=".", label=f"{text} text")
        axes.set(xlabel=title, ylabel="acceptance length", xscale="log" if key == "n_tokens" else "linear")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--run", type=Path, help="folder of a training, for the curve over steps")
    parser.add_argument("--steps", type=int, help="steps of each training, for the curve over data")
    parser.add_argument("--shares", default="1/8,1/4,1/2,1")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, tuple[str, Sequence[Row]]] = {}
    if args.run:
        curves["anchors"] = "n_anchors", over_steps(args.run)
    if args.steps:
        curves["tokens"] = "n_tokens", [point(Fraction(share), args) for share in args.shares.split(",")]
    text = "\n".join(table(title, key, rows) for title, (key, rows) in curves.items())
    (args.out / "curves.json").write_text(json.dumps({title: rows for title, (_, rows) in curves.items()}, indent=1))
    (args.out / "curves.md").write_text(text)
    if curves and importlib.util.find_spec("matplotlib"):
        plot(curves, args.out / "curves.png")
    print(text, end="")


if __name__ == "__main__":
    main()
