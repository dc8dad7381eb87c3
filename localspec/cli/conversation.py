"""The chat loop: lines in, answers out, commands that begin with a slash."""

from __future__ import annotations

import sys

from localspec.chat import Chat
from localspec.cli import console
from localspec.cli.answers import figures, prefill_progress, show, still_thinking
from localspec.engine.stats import Stats, total
from localspec.errors import LocalspecError
from localspec.options import Options
from localspec.pair import Pair
from localspec.textfile import without_mark

HELP = """\
/help           this list
/clear          begin a new conversation
/retry          answer the last question again (another answer only at a temperature)
/undo           take the last turn back
/stats          figures of this conversation
/spec on|off    use the drafter, or decode plainly
/exit           leave (also Ctrl-D)
Ctrl-C stops an answer and keeps what was said."""


class Conversation:
    """The chat loop's state: the conversation, its options, and the figures of its answers."""

    def __init__(self, pair: Pair, chat: Chat, settings: Options) -> None:
        self.pair, self.chat, self.settings = pair, chat, settings.copy()
        self.answers: list[Stats] = []
        self.console = console.err()

    def answer(self, text: str) -> None:
        settings = self.settings | Options(progress=prefill_progress())
        if settings.get("spec") is False:  # bounds of a draft are for when there is one
            settings |= Options(draft_max=None, draft_min=None, draft_p_min=None)
        stream = self.chat.stream(text, **settings)
        result = show(stream)
        sys.stdout.write("" if result.text.endswith("\n") else "\n")
        sys.stdout.flush()
        self.answers.append(result.stats)
        note = {"cancelled": " · stopped", "context": " · the context is full: /clear begins a new one"}
        self.say(figures(result.stats) + note.get(result.finish_reason, ""))
        if remark := still_thinking(result):
            self.say(remark)
        with console.status("measuring this machine, once"):
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
            case "spec", "on" if not self.pair.has_drafter:
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


def converse(pair: Pair, settings: Options, *, system: str | None) -> None:
    """Chat on a terminal, or answer the lines of a piped stdin one after the other."""
    talk = Conversation(pair, pair.chat(system=system), settings)
    if not sys.stdin.isatty():
        for line in map(without_mark, sys.stdin):
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
