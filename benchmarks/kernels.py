"""localspec's kernels against llama.cpp's own: two processes with the same model, alternating, medians.

llama.cpp's is the faster of flash attention and plain attention, figure by figure. `--model` takes any GGUF file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from common import arguments

from localspec.hub import registry
from localspec.llama import Context, Model, native

WIDTHS = (1, 2, 3, 4, 6, 8, 16, 32)
WAYS: dict[str, dict[str, Any]] = {"flash": {"flash": True}, "plain": {"flash": False}, "exact": {"exact": True}}
OURS, STOCK = "localspec", "llama.cpp"


class Worker:
    """Another process with the model loaded, which measures when it is told to and sleeps meanwhile."""

    def __init__(self, path: str, threads: int, *, kernels: bool) -> None:
        command = [sys.executable, __file__, "--worker", "-m", path, "-t", str(threads)]
        switch = {} if kernels else {"LOCALSPEC_KERNELS": "0"}
        self.process = subprocess.Popen(
            command, env=os.environ | switch, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.detail = self._read()

    def measure(self, way: str, n: int, depth: int) -> float:
        """Seconds of a pass over n tokens behind `depth` others."""
        assert self.process.stdin
        print(json.dumps([way, n, depth]), file=self.process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def work(path: str, threads: int) -> None:
    detail = native.state().detail
    tokens = np.random.default_rng(0).integers(100, 30_000, 4096).astype(np.int32)
    with Model(path) as model:
        contexts = {
            name: Context(model, n_ctx=4096, n_batch=2048, n_threads=threads, **way) for name, way in WAYS.items()
        }
        reached = dict.fromkeys(WAYS, 0)
        print(json.dumps(detail), flush=True)
        for line in sys.stdin:
            way, n, depth = json.loads(line)
            context = contexts[way]
            if reached[way] != depth:
                context.clear()
                for start in range(0, depth, 500):
                    context.decode(tokens[start : min(start + 500, depth)], start, output=False)
                reached[way] = depth
            context.synchronize()
            began = perf_counter()
            context.decode(tokens[:n], depth, output=n <= max(WIDTHS))
            context.synchronize()
            print(perf_counter() - began, flush=True)
            context.remove(depth)
        for context in contexts.values():
            context.close()


def alternate(workers: dict[str, Worker], n: int, depth: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of each."""
    times: dict[tuple[str, str], list[float]] = {(OURS, "exact"): [], (STOCK, "flash"): [], (STOCK, "plain"): []}
    for repeat in range(repeats + 1):
        for (who, way), taken in times.items():
            took = workers[who].measure(way, n, depth)
            if repeat:  # the first warms up
                taken.append(1e3 * took)
    ours, *stock = (median(taken) for taken in times.values())
    return {OURS: ours, STOCK: min(stock)}


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--depth", type=int, default=2000)
    parser.add_argument("--worker", action="store_true", help="measure for another process of this script")
    args = parser.parse_args()
    path = str(args.model or registry.get(registry.DEFAULT).target_path())
    threads = args.threads or 2
    if args.worker:
        work(path, threads)
        return
    workers = {OURS: Worker(path, threads, kernels=True), STOCK: Worker(path, threads, kernels=False)}
    print(f"{cpu_name()}, {threads} threads, {Path(path).name}; kernels: {workers[OURS].detail}", flush=True)
    one: dict[int, dict[str, float]] = {}
    for depth, widths in ((0, WIDTHS), (args.depth, (1, 8))):
        for n in widths:
            figures = alternate(workers, n, depth, args.repeats)
            base = one.setdefault(depth, figures)
            said = ", ".join(f"{who} {ms:.2f} ms ({ms / base[who]:.2f} × one)" for who, ms in figures.items())
            print(f"{n} tokens behind {depth}: {said}: {figures[STOCK] / figures[OURS]:.2f} times as fast", flush=True)
    print(
        ", ".join(
            f"{who} behind {args.depth} / behind none: {one[args.depth][who] / one[0][who]:.2f}" for who in workers
        )
    )
    figures = alternate(workers, 2000, 0, max(1, args.repeats // 5))
    said = ", ".join(f"{who} {2e6 / ms:.0f} tokens/s" for who, ms in figures.items())
    print(f"prefill of 2000: {said}: {figures[STOCK] / figures[OURS]:.2f} times as fast")
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
