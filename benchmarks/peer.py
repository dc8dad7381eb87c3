"""localspec beside llama.cpp's own `draft-dflash`: the same pair, prompts, threads and number of tokens, greedy.

The peer is `llama-server`, built from the source that llama-cpp-python vendors (tools/build_peer.py), and it loads the
libllama and ggml that localspec itself runs on: both sides execute the same kernels. One server runs for each setting,
on 127.0.0.1. First a coarse sweep: every `--spec-draft-n-max` with every `--spec-draft-p-min` on a few prompts, each
answer beside one of the peer's plain decoding, so that a machine whose speed drifts does not choose the winner. Then
the best settings of the sweep (two, because it is coarse), the peer's plain decoding, localspec's plain decoding and
localspec with its default options answer all prompts in alternation; figures are medians over the repeats. The whole
takes about half an hour with the default pair on two cores.

Words.    Prompts are rendered with the model's chat template by localspec and sent as token ids; the peer says how many
          it read, and is asked to render and tokenise every text itself, to see that it would get the same ids. A
          HumanEval prompt is one user turn, as in the other scripts here. Both sides take the largest logit: the peer
          through `top_k` 1, the cheapest of its samplers. localspec runs its target with flash attention and V in bf16,
          where a token's logits do not depend on its batch, and the peer is given the same (`--peer-flags`): then all
          words agree. The best setting of the sweep also runs without these flags, "as it comes"; its words are others,
          because other kernels round otherwise, and its speed counts where it is the peer's best.
Seconds.  Tokens per second of decoding, prompt reading left out. localspec reads all but the last prompt token before
          its clock starts, so n tokens take n passes. The peer's first token comes with the prompt and its clock starts
          after it: n - 1 tokens in `predicted_ms`, which is how it computes its own `predicted_per_second`.
Rounds.   acceptance length = tokens / passes of the target on both sides. The peer does not count its passes: they are
          n - 1 - draft_n_accepted. (What it accepts behind an end-of-text token counts as accepted: a token or two.)
Idleness. Only one side works at a time, but libgomp's threads spin for some 4 ms after a pass before they sleep, and
          would take the cores from the other side for as long. So every answer waits 50 ms before it starts; by then
          the others sleep in the kernel. Within an answer both sides keep libgomp's default policy, or the one that the
          environment sets; llama.cpp's `--poll` has no effect in a build with OpenMP.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from common import arguments, load_pair
from prompt_sets import path_of

from localspec.cli.console import progress
from localspec.errors import BackendError, LocalspecError, OptionError
from localspec.evaluation import prompts as prompt_files
from localspec.evaluation.bench import machine
from localspec.llama import default_threads, gpu_offload, safe_to_repack
from localspec.llama.binding import library_folder
from localspec.pair import Pair

ROOT = Path(__file__).resolve().parents[1]
EXACT = "" if gpu_offload() else "--flash-attn on --cache-type-v bf16"  # what localspec's target does, see `Context`
REST_S = 0.05
LOADING_S = 600
OURS, AUTO, PEER = "localspec plain", "localspec auto", "llama.cpp plain"


class Answer(NamedTuple):
    """`n` tokens decoded in `seconds` and `n_rounds` passes of the target; `tokens` is all that was said."""

    tokens: list[int]
    n: int
    seconds: float
    n_rounds: int


Way = Callable[[list[int], int], Answer]  # prompt ids, tokens to say at most -> what one side answers
Answers = list[list[Answer]]  # [repeat][prompt]
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """One point of the sweep: llama.cpp's `--spec-draft-n-max` and `--spec-draft-p-min`."""

    n_max: int
    p_min: float

    def __str__(self) -> str:
        return f"llama.cpp n-max {self.n_max} p-min {self.p_min:g}"

    def flags(self, drafter: Path) -> list[str]:
        draft = {"model": drafter, "n-max": self.n_max, "p-min": self.p_min}
        return ["--spec-type", "draft-dflash", *(f for k, v in draft.items() for f in (f"--spec-draft-{k}", str(v)))]


class Peer:
    """A running llama-server; a context manager that ends it. Raises BackendError when it does not start or fails."""

    def __init__(self, program: Path, flags: Sequence[str]) -> None:
        self._port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        search = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
        self._process = subprocess.Popen(
            [program, *flags, "--host", "127.0.0.1", "--port", str(self._port)],
            env=os.environ | {search: str(library_folder())},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def __enter__(self) -> Peer:
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def answer(self, ids: list[int], max_tokens: int) -> Answer:
        """What the server says to a prompt, greedily, the prompt read anew."""
        options = {"n_predict": max_tokens, "samplers": ["top_k"], "top_k": 1, "cache_prompt": False}
        said = self.post("/completion", options | {"prompt": ids, "return_tokens": True})
        if said["tokens_evaluated"] != len(ids):
            raise BackendError(f"llama-server read {said['tokens_evaluated']} prompt tokens, but {len(ids)} were sent.")
        times = said["timings"]
        n = times["predicted_n"] - 1
        return Answer(said["tokens"], n, times["predicted_ms"] / 1e3, n - times.get("draft_n_accepted", 0))

    def encode(self, text: str) -> list[int]:
        """The ids of one user turn, rendered and tokenised by the server."""
        rendered = self.post("/apply-template", {"messages": [{"role": "user", "content": text}]})["prompt"]
        ids = self.post("/tokenize", {"content": rendered, "add_special": True, "parse_special": True})["tokens"]
        return list(ids)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        status, reply = self._request("POST", path, json.dumps(body))
        if status != 200:
            raise BackendError(f"llama-server refuses {path} with status {status}: {reply[:500].decode()}.")
        return json.loads(reply)

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LOADING_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def _wait(self) -> None:
        """Until the model is loaded."""
        end = time.monotonic() + LOADING_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if self._request("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.05)
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-10:]
        raise BackendError("llama-server does not start; its last words:\n" + "\n".join(last))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def peer_flags(pair: Pair, setting: Setting | None, threads: int, more: str) -> list[str]:
    """What the server is started with: the pair's files, context and threads; one slot, no network, no prompt cache."""
    shared = f"--ctx-size {pair.n_ctx} --threads {threads} --parallel 1 --cache-ram 0 --fit off --no-ui --offline"
    flags = ["--model", str(pair.target_path), *shared.split(), *shlex.split(more)]
    if not safe_to_repack():
        flags.append("--no-repack")
    if setting and pair.drafter_path:
        flags += setting.flags(pair.drafter_path)
    return flags


def ours(pair: Pair, *, spec: bool) -> Way:
    def answer(ids: list[int], max_tokens: int) -> Answer:
        said = pair.generate(ids, max_tokens=max_tokens, spec=spec)
        return Answer(said.tokens, said.stats.predicted_n, said.stats.predicted_s, said.stats.n_rounds)

    return answer


def compare(ways: dict[str, Way], prompts: list[list[int]], max_tokens: int, repeats: int) -> dict[str, Answers]:
    """Every way answers every prompt `repeats` times, in alternation; the order rotates."""
    names = list(ways)
    answers: dict[str, Answers] = {name: [[] for _ in range(repeats)] for name in names}
    for way in ways.values():
        way(prompts[0], 8)  # the first passes of a process are slow
    with progress("measuring", repeats * len(prompts)) as advance:
        for repeat in range(repeats):
            for index, ids in enumerate(prompts):
                first = (repeat + index) % len(names)
                for name in names[first:] + names[:first]:
                    time.sleep(REST_S)
                    answers[name][repeat].append(ways[name](ids, max_tokens))
                advance()
    return answers


def speed(answers: Iterable[Answer]) -> float:
    """Tokens per second of several answers together."""
    done = list(answers)
    return sum(a.n for a in done) / max(sum(a.seconds for a in done), 1e-9)


def acceptance_length(answers: Iterable[Answer]) -> float:
    done = list(answers)
    return sum(a.n for a in done) / max(sum(a.n_rounds for a in done), 1)


def sweep(start: Callable[[Setting], Peer], plain: Way, prompts: list[list[int]], args: argparse.Namespace) -> Any:
    """For each setting, its speed over the peer's plain decoding; the best comes first."""
    points = []
    for setting in (Setting(n_max, p_min) for n_max in args.n_max for p_min in args.p_min):
        with start(setting) as peer:
            answers = compare({"plain": plain, "draft": peer.answer}, prompts, args.sweep_predict, 1)
        point = {
            "n_max": setting.n_max,
            "p_min": setting.p_min,
            "over_plain": ratio(answers["draft"], answers["plain"]),
            "acceptance_length": acceptance_length(answers["draft"][0]),
        }
        note(f"{setting}: {point['over_plain']:.3f} × plain, acceptance length {point['acceptance_length']:.2f}")
        points.append(point)
    return sorted(points, key=lambda point: -point["over_plain"])


def figures(answers: Answers, plain: Answers, files: Sequence[str]) -> dict[str, Any]:
    """Medians over the repeats, for all prompts and file by file; `same` counts answers equal to those of `plain`."""
    speeds = [speed(repeat) for repeat in answers]
    return {
        "predicted_per_second": median(speeds),
        "predicted_per_second_min": min(speeds),
        "predicted_per_second_max": max(speeds),
        "per_file": {
            name: median(speed(a for a, file in zip(repeat, files, strict=True) if file == name) for repeat in answers)
            for name in dict.fromkeys(files)
        },
        "acceptance_length": acceptance_length(a for repeat in answers for a in repeat),
        "predicted_n": sum(a.n for a in answers[0]),
        "same": sum(a.tokens == b.tokens for a, b in zip(answers[0], plain[0], strict=True)),
    }


def ratio(over: Answers, under: Answers) -> float:
    """Median of the repeats' ratios, so that a machine whose speed drifts tells on both sides alike."""
    return median(speed(a) / speed(b) for a, b in zip(over, under, strict=True))


def measure(args: argparse.Namespace, program: Path) -> dict[str, Any]:
    texts, files = read_prompts(args)
    with load_pair(args) as pair, ExitStack() as servers:
        if pair.drafter_path is None:
            raise OptionError("there is no drafter to compare; give one with -md.")
        prompts = [pair.encode(text) for text in texts]
        pair.generate(prompts[0], max_tokens=8)  # at first use it measures the machine: now, while nothing else runs

        def start(setting: Setting | None, flags: str = args.peer_flags) -> Peer:
            return Peer(program, peer_flags(pair, setting, args.threads or default_threads(), flags))

        plain = servers.enter_context(start(None))
        alike = sum(plain.encode(text) == ids for text, ids in zip(texts, prompts, strict=True))
        note(f"{len(prompts)} prompts, {alike} of them rendered and tokenised alike by both sides")
        points = sweep(start, plain.answer, spread(prompts, args.sweep_prompts), args)
        finalists = [Setting(point["n_max"], point["p_min"]) for point in points[: args.finalists]]
        drafting = {str(setting): servers.enter_context(start(setting)).answer for setting in finalists}
        if args.peer_flags:
            drafting[f"{finalists[0]} as it comes"] = servers.enter_context(start(finalists[0], "")).answer
        ways = {OURS: ours(pair, spec=False), AUTO: ours(pair, spec=True), PEER: plain.answer}
        answers = compare(ways | drafting, prompts, args.predict, args.repeats)
    best = max(drafting, key=lambda name: median(map(speed, answers[name])))
    return report(answers, best, files) | {
        "sweep": points,
        "prompts": len(prompts),
        "prompts_alike": alike,
        "repeats": args.repeats,
        "max_tokens": args.predict,
        "peer_flags": args.peer_flags,
        "machine": machine() | {"threads": args.threads or default_threads()},
    }


def report(answers: dict[str, Answers], best: str, files: Sequence[str]) -> dict[str, Any]:
    """Figures of every way and the ratios between them; `best` names the peer's fastest drafting."""
    return {
        "ways": {name: figures(said, answers[OURS], files) for name, said in answers.items()},
        "best": best,
        "auto_over_best": ratio(answers[AUTO], answers[best]),
        "auto_over_plain": ratio(answers[AUTO], answers[OURS]),
        "plain_over_peer_plain": ratio(answers[OURS], answers[PEER]),
        "best_over_peer_plain": ratio(answers[best], answers[PEER]),
    }


def read_prompts(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Texts, and the name of the file each is from: as many of each file, evenly spaced over it."""
    paths = args.files or [path_of(name, args.data) for name in ("mt_bench", "humaneval")]
    share = -(-args.prompts // len(paths))
    pairs = [(text, path.stem) for path in paths for text in spread(prompt_files.read(path), share)]
    return [text for text, _ in pairs], [name for _, name in pairs]


def spread(items: Sequence[T], n: int) -> list[T]:
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def table(measured: dict[str, Any]) -> str:
    ways = measured["ways"]
    files = list(ways[OURS]["per_file"])
    rows = [["", "tokens/s", "from – to", *files, "τ", "same words"]]
    for name, figure in ways.items():
        span = f"{figure['predicted_per_second_min']:.1f} – {figure['predicted_per_second_max']:.1f}"
        by_file = [f"{figure['per_file'][file]:.1f}" for file in files]
        same = f"{figure['same']} of {measured['prompts']}"
        speed_, length = f"{figure['predicted_per_second']:.1f}", f"{figure['acceptance_length']:.2f}"
        rows.append([name, speed_, span, *by_file, length, same])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [
            *lines,
            f"localspec auto over {measured['best']}: {measured['auto_over_best']:.3f}",
            f"localspec auto over localspec plain: {measured['auto_over_plain']:.3f}",
            f"localspec plain over llama.cpp plain: {measured['plain_over_peer_plain']:.3f}",
            f"{measured['best']} over llama.cpp plain: {measured['best_over_peer_plain']:.3f}",
        ]
    )


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="*", type=Path, help="prompt files (default: mt_bench and humaneval of --data)")
    parser.add_argument("--prompts", type=count, default=40, help="prompts in all, as many of each file (40)")
    parser.add_argument("--predict", type=count, default=200, help="tokens an answer (200)")
    parser.add_argument("--repeats", type=count, default=5, help="times every prompt is answered (5)")
    parser.add_argument("--n-max", type=numbers(int), default=list(range(1, 8)), help="swept (1,2,3,4,5,6,7)")
    parser.add_argument("--p-min", type=numbers(float), default=[0, 0.3, 0.6, 0.8], help="swept (0,0.3,0.6,0.8)")
    parser.add_argument("--sweep-prompts", type=count, default=8, help="prompts of the sweep (8)")
    parser.add_argument("--sweep-predict", type=count, default=64, help="tokens an answer of the sweep (64)")
    parser.add_argument("--finalists", type=count, default=2, help="best settings of the sweep to measure in full (2)")
    parser.add_argument("--peer-flags", default=EXACT, help=f"more flags of llama-server ({EXACT or 'none'})")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def count(text: str) -> int:
    """A whole number of at least 1."""
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{n} is less than 1")
    return n


def numbers(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    args = options().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the servers, dying of the signal would not
    build = subprocess.run([sys.executable, ROOT / "tools" / "build_peer.py"], stdout=subprocess.PIPE, text=True)
    if build.returncode:
        sys.exit(build.returncode)
    try:
        measured = measure(args, Path(build.stdout.strip()) / "llama-server")
    except LocalspecError as error:
        sys.exit(f"Error: {error}")
    print(json.dumps(measured) if args.json else table(measured))


if __name__ == "__main__":
    main()
