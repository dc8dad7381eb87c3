"""Reading prompt files, and the package's own few prompts."""

from __future__ import annotations

import json
import os
from importlib import resources

from localspec.errors import OptionError
from localspec.textfile import read_text


def read(path: str | os.PathLike[str]) -> list[str]:
    """Prompts of a file: one a line, or JSONL whose objects have a field `prompt`; empty lines are passed over.

    Raises OptionError for a file that cannot be read, holds no prompt, or has a line that fits neither form.
    """
    return [prompt for prompts in by_class(path).values() for prompt in prompts]


def by_class(path: str | os.PathLike[str]) -> dict[str, list[str]]:
    """As `read`, by the field `class` of each object; what has none is of the class "file"."""
    prompts = _parse(read_text(path), str(path))
    if not prompts:
        raise OptionError(f"{path} holds no prompt; write one a line, or JSONL with a field 'prompt'.")
    return prompts


def own() -> dict[str, list[str]]:
    """The prompts that ship with the package, two of each class: chat, code, maths, copy, long."""
    text = resources.files("localspec").joinpath("evaluation/prompts.jsonl").read_text(encoding="utf-8")
    return _parse(text, "prompts.jsonl")


def _parse(text: str, name: str) -> dict[str, list[str]]:
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    found: dict[str, list[str]] = {}
    for n, line in lines:
        kind, prompt = "file", line
        if lines[0][1].lstrip().startswith("{"):
            kind, prompt = _fields(line, f"line {n} of {name}")
        found.setdefault(kind, []).append(prompt)
    return found


def _fields(line: str, where: str) -> tuple[str, str]:
    """Class and prompt of a line of JSONL."""
    try:
        fields = json.loads(line)
        prompt = fields["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise OptionError(f"{where} is not a JSON object with a field 'prompt'.") from error
    if not isinstance(prompt, str):
        raise OptionError(f"{where} has a 'prompt' that is no text but {type(prompt).__name__}.")
    return str(fields.get("class", "file")), prompt
