"""What people see: streaming answers, the chat loop, progress and tables. stdout carries answers, stderr the rest."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from localspec.engine.stats import Stats, total
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.answer import Result, Stream
    from localspec.chat import Chat
    from localspec.evaluation.check import Report
    from localspec.evaluation.doctor import Finding
    from localspec.hub.find import Candidate
    from localspec.hub.registry import PairEntry
    from localspec.pair import Pair
    from localspec.planning.cost_model import CostModel

T = TypeVar("T")

HELP = """\
/help           this list
/clear          begin a new conversation
/retry          answer the last question again (another answer only at a temperature)
/undo           take the last turn back
/stats          figures of this conversation
/spec on|off    use the drafter, or decode plainly
/exit           leave (also Ctrl-D)
Ctrl-C stops an answer and keeps what was said."""


def out() -> Console:
    return Console(highlight=False)


def err() -> Console:
    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """A remark on stderr."""
    err().print(text, style="dim", markup=False, soft_wrap=True)


@contextmanager
def status(text: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner on stderr while something loads; nothing when stderr is no terminal."""
    console = err()
    if quiet or not console.is_terminal:
        yield
    else:
        with console.status(text):
            yield


def waiting(text: str, items: Iterator[T], *, quiet: bool = False) -> Iterator[T]:
    """The same items, with a spinner while the next one is not there yet."""
    done = object()
    while True:
        with status(text, quiet=quiet):
            item = next(items, done)
        if item is done:
            return
        yield cast(T, item)


@contextmanager
def progress(text: str, count: int) -> Iterator[Callable[[], None]]:
    """A bar of `count` steps on stderr; yields the function that makes a step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = err()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=count)
        yield lambda: bar.advance(task)


def prefill_progress() -> Callable[[int, int], None] | None:
    """Says on a terminal's stderr how much of a long prompt has been read."""
    if not sys.stderr.isatty():
        return None

    def report(done: int, count: int) -> None:
        text = f"reading the prompt: {done:,} of {count:,} tokens" if done < count else ""
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()

    return report


class Interrupts:
    """Ctrl-C while an answer is shown: while it is `gentle` the first one only sets `pressed`; any other interrupts."""

    def __init__(self) -> None:
        self.gentle = self.pressed = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before or signal.SIG_DFL)

    def _press(self, number: int, frame: Any) -> None:
        if self.pressed or not self.gentle:
            raise KeyboardInterrupt
        self.pressed = True


def show(stream: Stream, *, quiet: bool = False) -> Result:
    """Write an answer to stdout as it comes; returns what was said.

    Ctrl-C ends it between two rounds and keeps what the memories hold, or at once while the prompt is still read.
    """
    with Interrupts() as ctrl_c:
        try:
            for chunk in stream:
                ctrl_c.gentle = True
                if not quiet:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
                if ctrl_c.pressed:
                    break
        except KeyboardInterrupt:
            if ctrl_c.gentle:
                raise
        stream.close()
    return stream.result


def figures(stats: Stats) -> str:
    """The line under an answer."""
    parts = [f"{stats.predicted_n} tokens", f"{stats.predicted_per_second:.1f} tokens/s"]
    if stats.rests:
        parts.append("drafting rests: plain decoding is faster here")
    elif stats.draft_n:
        parts += [
            f"{stats.acceptance_length:.2f} a round",
            f"{stats.accepted_share:.0%} of {stats.draft_n} drafted tokens accepted",
        ]
    if stats.cached_n:
        parts.append(f"{stats.cached_n:,} re-used from memory")
    return " · ".join(parts)


class _Conversation:
    """The chat loop's state: the conversation, its options, and the figures of its answers."""

    def __init__(self, pair: Pair, chat: Chat, settings: dict[str, Any]) -> None:
        self.pair, self.chat, self.settings = pair, chat, dict(settings)
        self.answers: list[Stats] = []
        self.console = err()

    def answer(self, text: str) -> None:
        settings = self.settings
        if settings.get("spec") is False:  # bounds of a draft are for when there is one
            settings = settings | {"draft_max": None, "draft_min": None, "draft_p_min": None}
        stream = self.chat.stream(text, progress=prefill_progress(), **settings)
        result = show(stream)
        sys.stdout.write("" if result.text.endswith("\n") else "\n")
        sys.stdout.flush()
        self.answers.append(result.stats)
        note = {"cancelled": " · stopped", "context": " · the context is full: /clear begins a new one"}
        self.say(figures(result.stats) + note.get(result.finish_reason, ""))
        with status("measuring this machine, once"):
            self.pair.settle()

    def command(self, line: str) -> bool:
        """Obey a line that begins with `/`; False when it asks to leave."""
        name, _, argument = line[1:].partition(" ")
        match name, argument.strip():
            case (("exit" | "quit"), _):
                return False
            case "help", _:
                self.say(HELP)
            case "clear", _:
                self.chat.clear()
                self.say("a new conversation")
            case "retry", _:
                before = self.chat.state()
                self.answer(self.chat.undo())
                if len(self.chat.messages) < len(before[0]):  # nothing was said: keep the old answer
                    self.chat.restore(before)
            case "undo", _:
                self.say(f"taken back: {self.chat.undo()}")
            case "stats", _:
                self.say(figures(total(self.answers)))
            case "spec", "on" if self.pair.engine.drafter is None:
                self.say("there is no drafter; load one with -md")
            case "spec", ("on" | "off") as value:
                self.settings["spec"] = value == "on"
                self.say(f"drafter {value}")
            case _:
                self.say(f"unknown command {line!r}; /help lists them")
        return True

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, soft_wrap=True)

    def turn(self, line: str) -> bool:
        """Answer a line or obey it; errors are said and the conversation goes on. False when it asks to leave."""
        try:
            if line.startswith("/"):
                return self.command(line)
            self.answer(line)
        except KeyboardInterrupt:
            self.say("stopped")
        except LocalspecError as error:
            self.console.print(f"Error: {error}", style="red", markup=False, soft_wrap=True)
        return True


def converse(pair: Pair, settings: dict[str, Any], *, system: str | None) -> None:
    """Chat on a terminal, or answer the lines of a piped stdin one after the other."""
    talk = _Conversation(pair, pair.chat(system=system), settings)
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip() and not talk.turn(line.strip()):
                return
        return
    from prompt_toolkit import PromptSession

    drafter = pair.drafter_path.name if pair.drafter_path else "none"
    talk.say(f"{pair.target_path.name} · drafter {drafter} · {pair.n_ctx:,} tokens of context · /help")
    session: PromptSession[str] = PromptSession()
    while True:
        try:
            line = session.prompt("> ").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line and not talk.turn(line):
            return


def show_check(report: Report) -> None:
    """The outcome of `localspec check`, differences first."""
    console = out()
    for d in report.details:
        kind = "near-tie" if d.near_tie else "DIFFERENT"
        console.print(
            f"prompt {d.prompt}, token {d.position}: plain {d.plain_token}, spec {d.spec_token}; best logits "
            f"{d.logits[0]:.5f} ({d.best[0]}) and {d.logits[1]:.5f} ({d.best[1]}): {kind}",
            markup=False,
            soft_wrap=True,
        )
    console.print(
        f"{report.prompts} prompts: {report.identical} identical, {report.near_ties} near-ties, "
        f"{report.different} different",
        soft_wrap=True,
    )


def show_bench(figures: dict[str, Any]) -> None:
    """The outcome of `localspec bench`."""
    modes = figures["modes"]
    classes = list(modes["plain"]["classes"])
    table = Table("", "tokens/s", "speed-up", *classes, "a round", "accepted", box=None, padding=(0, 2))
    for name, mode in modes.items():
        per_class = [f"{mode['classes'][kind]:.2f}" for kind in classes]
        drafted = (f"{mode['acceptance_length']:.2f}", f"{mode['accepted_share']:.0%}" if mode["draft_n"] else "")
        table.add_row(name, f"{mode['predicted_per_second']:.1f}", f"{mode['ratio']:.2f}", *per_class, *drafted)
    console = out()
    console.print(table)
    console.print(
        f"medians of {figures['repeats']}; an oracle in the drafter's pool would say "
        f"{figures['oracle_acceptance_length']:.2f} tokens a round, the greedy walk {figures['acceptance_length']:.2f}"
    )
    for name, mode in modes.items():
        if mode["accepted_per_slot"] and name != "ngram":
            console.print(f"{name}: kept per slot {' '.join(f'{share:.0%}' for share in mode['accepted_per_slot'])}")


def show_costs(costs: CostModel) -> None:
    """The outcome of `localspec tune`."""
    table = Table("tokens in a pass", "ms", "of one token", "ms behind 1,000 tokens", box=None, padding=(0, 2))
    empty, full = costs.verify, costs.at(1000)
    for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        if n < len(empty):
            table.add_row(str(n), f"{1e3 * empty[n]:.2f}", f"{empty[n] / empty[1]:.2f}", f"{1e3 * full[n]:.2f}")
    for n in sorted({1, len(costs.draft) - 1}):
        seconds = costs.draft[n]
        table.add_row(f"a draft of {n}", f"{1e3 * seconds:.2f}", f"{seconds / empty[1]:.2f}")
    out().print(table)


def show_finding(finding: Finding) -> None:
    """A line of `localspec doctor`, and under it what to do."""
    console, colour = out(), {"ok": "green", "warn": "yellow", "fail": "red"}[finding.status]
    console.print(finding.status.ljust(5), style=colour, end="")
    console.print(f"{finding.name}: {finding.detail}", markup=False, soft_wrap=True)
    if finding.next:
        console.print(f"     -> {finding.next}", style="dim", markup=False, soft_wrap=True)


def show_models(entries: list[PairEntry]) -> None:
    """The table of `localspec models`."""
    from localspec.hub.registry import fits

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "state", "size", "memory", "drafter", "target in"):
        table.add_column(heading, no_wrap=True)
    kinds = {"dflash1": "DFlash 1", "dflash2": "DFlash 2"}
    verdicts = {True: "fits", False: "too small", None: "?"}
    for entry in entries:
        state = "here" if entry.is_here() else "to pull"
        size = f"{entry.n_bytes / 1e9:.1f} GB" if entry.n_bytes else "?"
        verdict, kind = verdicts[fits(entry.n_bytes)], kinds[entry.drafter_kind]
        first, *others = entry.target.files
        table.add_row(entry.name, state, size, verdict, kind, first + (f" +{len(others)}" if others else ""))
    out().print(table)
    if not all(entry.is_here() for entry in entries):
        text = "localspec pull NAME fetches one, NAME:QUANT with another of its target files (--json lists them)"
        err().print(text, soft_wrap=True)


def show_found(candidates: list[Candidate]) -> None:
    """The outcome of `localspec find`: what fits first."""
    console = out()
    for candidate in sorted(candidates, key=lambda c: not c.fits):
        line = f"{candidate.name}: {candidate.refusal or candidate.note}"
        console.print(("fits     " if candidate.fits else "refused  ") + line, markup=False, soft_wrap=True)
    if not candidates:
        err().print("no drafter known or found here was made for this model", soft_wrap=True)
