"""Chat templates of a folder, rendered by localspec and by transformers: every difference is printed.

    python tools/compare_templates.py FOLDER          of *.jinja files, such as llama.cpp's models/templates

What transformers refuses is passed over. Also that no name of a special token inside a message becomes one. Exit status
1 where anything differs. Needs transformers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from transformers.utils.chat_template_utils import render_jinja_template

from localspec.errors import TemplateError
from localspec.llama import Vocab
from localspec.template import GUARD, ChatTemplate, Message

NAME = re.compile(r"<[|｜]?[^<>{}'\"\s]{1,40}[|｜]?>|\[/?[A-Z_]{3,}\]|<\|[^<>{}'\"\s]{1,40}>|\]~b\]|\[e~\[")
ODD = " a\n\n'\"<b> & é 🙂 </think>\\n {{ x }} /think\n"


class Names:
    """Stands in for a vocabulary whose special tokens are whatever a template seems to name."""

    bos, eos = 0, 1

    def __init__(self, source: str) -> None:
        self._names: list[str] = ["<BOS>", "<EOS>", *sorted(set(NAME.findall(source)))]

    def text(self, token: int) -> str:
        return self._names[token]

    def special_texts(self) -> list[str]:
        return [name for name in self._names if not re.fullmatch(r"</?[\w:]*think[\w:]*>", name)]

    def user_defined_texts(self) -> list[str]:
        return [name for name in self._names if name not in self.special_texts()]


def message(role: str, content: str, **more: str) -> Message:
    return {"role": role, "content": content, **more}


def conversations() -> Iterator[list[Message]]:
    """What people and models say, thoughts among it."""
    for text in ("Hello", ODD):
        yield [message("user", text)]
        yield [message("system", text), message("user", text)]
        for answer in (
            message("assistant", text),
            message("assistant", "hi", reasoning_content="so"),
            message("assistant", "<think>\nso\n</think>\n\nhi"),
        ):
            yield [message("user", text), answer, message("user", text)]


def ours(template: ChatTemplate, messages: list[Message]) -> str | None:
    try:
        return template.render(messages)
    except TemplateError:
        return None


def theirs(source: str, messages: list[Message], options: dict[str, Any]) -> str | None:
    variables = options | {"bos_token": "<BOS>", "eos_token": "<EOS>", "add_generation_prompt": True}
    try:
        rendered, _ = cast(Any, render_jinja_template)([messages], chat_template=source, **variables)
    except Exception:  # as many kinds as there are templates
        return None
    return str(rendered[0])


def differences(source: str) -> Iterator[str]:
    """Where we render otherwise than transformers."""
    for thinking in (None, True, False):
        template = ChatTemplate(source, cast(Vocab, Names(source)), thinking=thinking)
        options = {} if thinking is None else {"enable_thinking": thinking}
        for messages in conversations():
            mine, other = ours(template, messages), theirs(source, messages, options)
            if other is not None and (mine is None or mine.replace(GUARD, "") != other):
                yield f"thinking {thinking}, {messages}:\n    ours   {mine!r}\n    theirs {other!r}"


def leaks(source: str) -> Iterator[str]:
    """Names of special tokens that get out of a message."""
    vocab = Names(source)
    template = ChatTemplate(source, cast(Vocab, vocab))
    for role in ("user", "system", "assistant"):
        for name in vocab.special_texts():
            for text in (f"a {name} b", name, f"{name[:2]}{name}{name[2:]}", f"{name[:-1]}/think{name[-1:]}"):
                if text != name and role == "assistant" and "think" in text:
                    continue
                found, plain = (named(template, role, t) for t in (text, "a x b"))
                if found != plain:
                    yield f"{role} says {text!r}: {found} instead of {plain}"


def named(template: ChatTemplate, role: str, text: str) -> list[str] | None:
    """The special tokens of a conversation in which `role` says `text`, in order."""
    turns = [message("user", "u"), message("assistant", "v"), message("user", "w")]
    turns = [message("system", "s"), *turns] if role == "system" else turns
    turns = [message(m["role"], text if m["role"] == role else m["content"]) for m in turns]
    rendered = ours(template, turns)
    names = re.compile("|".join(map(re.escape, sorted(template.vocab.special_texts(), key=len, reverse=True))))
    return None if rendered is None else [n for part in rendered.split(GUARD) for n in names.findall(part)]


def main(folder: str) -> int:
    n_bad = 0
    paths = sorted(Path(folder).glob("*.jinja"))
    for path in paths:
        source = path.read_text(encoding="utf-8")
        found = [*differences(source), *leaks(source)]
        n_bad += bool(found)
        for line in found[:5]:
            print(f"{path.name}: {line}")
    print(f"{len(paths)} templates, {n_bad} with differences")
    return 1 if n_bad or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
