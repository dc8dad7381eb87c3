"""Reading prompt files, and the package's own few prompts."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path

from localspec.errors import OptionError


def read(path: str | os.PathLike[str]) -> list[str]:
    """Prompts of a file: one a line, or JSONL whose objects have a field `prompt`; empty lines are passed over.

    Raises OptionError for a file that cannot be read, holds no prompt, or has a line that fits neither form.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read prompts from {path}: {error}.") from error
    prompts = _parse(text, str(path))
    if not prompts:
        raise OptionError(f"{path} holds no prompt; write one a line, or JSONL with a field 'prompt'.")
    return prompts


def own() -> list[str]:
    """The five prompts that ship with the package: explanation, code, arithmetic, copying, a list."""
    text = resources.files("localspec").joinpath("data/prompts.jsonl").read_text(encoding="utf-8")
    return _parse(text, "data/prompts.jsonl")


def _parse(text: str, name: str) -> list[str]:
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or not lines[0][1].lstrip().startswith("{"):
        return [line for _, line in lines]
    return [_field(line, f"line {n} of {name}") for n, line in lines]


def _field(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise OptionError(f"{where} is not a JSON object with a field 'prompt'.") from error
    if not isinstance(prompt, str):
        raise OptionError(f"{where} has a 'prompt' that is no text but {type(prompt).__name__}.")
    return prompt
