"""Threads that share: plain decoding alone, beside a busy process, and beside a second llama.cpp, by OpenMP's setting.

Every figure is tokens/s of a child process, which alone decides how its threads wait; settings take turns. What is
sought keeps 95 % of the best figure alone, and beside another process its fair share of the cores less 20 %.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

from common import arguments

from localspec.hub import registry
from localspec.llama import Context, Model

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
SETTINGS = ("ours", "GOMP_SPINCOUNT=300000", *(f"GOMP_SPINCOUNT={n}" for n in (100, 300, 1000, 3000, 10000)))
BESIDE = ("alone", "busy", "second")
DEPTH = 256  # tokens of context, so that it is the weights that are read
BUSY = "while True: pass"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--settings", default=",".join((*SETTINGS, "OMP_WAIT_POLICY=passive")), help="ours: as installed"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--child", action="store_true", help="be one")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(decode(args.model, args.threads, args.seconds)), flush=True)
        return
    settings = args.settings.split(",")
    taken: dict[tuple[str, str], list[float]] = {(s, b): [] for s in settings for b in BESIDE}
    for turn in range(args.repeats):
        for setting, beside in taken:
            taken[setting, beside].append(measure(setting, beside, args.model, args.threads, args.seconds))
        print(f"{turn + 1} of {args.repeats}", file=sys.stderr, flush=True)
    best = max(median(taken[setting, "alone"]) for setting in settings)
    for setting in settings:
        figures = (f"{beside} {median(taken[setting, beside]):.1f}" for beside in BESIDE)
        print(
            f"{setting}: {', '.join(figures)} tokens/s; alone {median(taken[setting, 'alone']) / best:.0%} of the best"
        )


def decode(model: str | None, n_threads: int | None, seconds: float) -> float:
    """Tokens a second of plain decoding, after a tenth of the time to warm up."""
    path = Path(model) if model else registry.get(registry.DEFAULT).target_path()
    with Model(path) as weights, Context(weights, n_ctx=DEPTH, n_batch=64, n_threads=n_threads, exact=True) as context:
        for _ in answer(context, seconds / 10):
            pass
        began = perf_counter()
        n = sum(1 for _ in answer(context, seconds))
        return n / (perf_counter() - began)


def answer(context: Context, seconds: float) -> Iterator[int]:
    """Decode token after token for some time, from the beginning again where the context is full."""
    ends = perf_counter() + seconds
    for i in count():
        if perf_counter() > ends:
            return
        if i % DEPTH == 0:
            context.clear()
        context.decode([100 + i % 1000], i % DEPTH)
        yield i


def measure(setting: str, beside: str, model: str | None, n_threads: int | None, seconds: float) -> float:
    """One child's figure."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if setting != "ours":
        environment |= [setting.split("=")]
    command = [sys.executable, __file__, "--child", "--seconds", str(seconds)]
    command += ["--model", model] if model else []
    command += ["--threads", str(n_threads)] if n_threads else []
    long = [*command, "--seconds", str(4 * seconds + 10)]
    other = {"alone": None, "busy": [sys.executable, "-c", BUSY], "second": long}[beside]
    with running(other, environment):
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout))


@contextmanager
def running(command: list[str] | None, environment: dict[str, str]) -> Iterator[None]:
    """Meanwhile another process runs, or none."""
    if command is None:
        yield
        return
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
