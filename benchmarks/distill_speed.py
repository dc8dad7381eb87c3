"""How fast `localspec distill` works: tokens written a second, with their layer inputs, and anchors trained a second.

    python benchmarks/distill_speed.py [-m TARGET.gguf] [--data-folder DATA] [--minutes 3]

Without DATA, a data folder of `localspec distill` for that target, training is timed on the chats just written. Both
rates are those of the second half of the time: the first chats take a while to end, and compiling takes minutes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from common import arguments

from localspec.distill import Options, Shape, synthesise_chats, train_drafter
from localspec.hub import registry


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def written(target: Path, folder: Path, minutes: float, threads: int | None) -> float:
    """Tokens a second over the second half of the time; features included."""
    synthesise_chats(target, folder, n_tokens=10**6, hours=minutes / 60, n_slots=96, n_threads=threads, log_every_s=5)
    log = rows(folder / "synthesise.jsonl")[:-1]  # the last line is the mean of all
    half = log[len(log) // 2 :]
    return float((half[-1]["n_tokens"] - half[0]["n_tokens"]) / (half[-1]["time"] - half[0]["time"]))


def trained(target: Path, data: Path, folder: Path, shape: Shape, minutes: float, threads: int | None) -> float:
    """Anchors a second over the second half of the time: compiling is over by then."""
    options = Options(hours=minutes / 60, eval_batches=1, eval_every_s=1e9, patience=0, log_every=5, n_threads=threads)
    train_drafter(target, data, folder, shape=shape, options=options)
    log = [row for row in rows(folder / "log.jsonl") if "loss" in row]
    half = log[len(log) // 2 :]
    return float((half[-1]["n_anchors"] - half[0]["n_anchors"]) / (half[-1]["elapsed_s"] - half[0]["elapsed_s"]))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-folder", type=Path, help="chats to train on (default: those written here)")
    parser.add_argument("--minutes", type=float, default=3.0, help="time for each figure")
    parser.add_argument("--layers", type=lambda text: [int(n) for n in text.split(",")], default=[2, 3])
    parser.add_argument("--vocab-size", type=int, default=8192)
    args = parser.parse_args()
    target = Path(args.model) if args.model else registry.get(registry.DEFAULT).target_path()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rate = written(target, folder / "data", args.minutes, args.threads)
        print(f"written: {rate:.0f} tokens/s, layer inputs included", flush=True)
        for n in args.layers:
            shape = Shape(n_layers=n, n_rows=args.vocab_size)
            data = args.data_folder or folder / "data"
            rate = trained(target, data, folder / f"run-{n}", shape, args.minutes, args.threads)
            print(f"trained: {rate:.0f} anchors/s, {n} layers, {args.vocab_size:,} tokens drafted", flush=True)


if __name__ == "__main__":
    main()
