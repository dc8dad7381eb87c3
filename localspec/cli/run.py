"""`localspec run`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localspec.cli.options import (
    DRAFT,
    FILE,
    JSON,
    MODEL,
    SAMPLING,
    DraftOptions,
    ModelOptions,
    SamplingOptions,
    answer_options,
)
from localspec.errors import OptionError
from localspec.textfile import read_prompt

if TYPE_CHECKING:
    from localspec.answer import Result
    from localspec.pair import Pair


@click.command()
@MODEL
@DRAFT
@SAMPLING
@click.option("-p", "--prompt", help="The prompt.")
@click.option("-f", "--file", type=FILE, help="File that holds the prompt.")
@click.option("-sys", "--system-prompt", help="What the model is told before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, without the chat template.")
@JSON
def run(
    model: ModelOptions,
    draft: DraftOptions,
    sampling: SamplingOptions,
    prompt: str | None,
    file: Path | None,
    system_prompt: str | None,
    raw: bool,
    as_json: bool,
) -> None:
    """Answer one prompt, from -p, -f or standard input."""
    from localspec.cli import answers, console
    from localspec.cli.open import open_pair

    settings = answer_options(sampling, draft)
    text = _prompt(prompt, file)
    if not text:
        raise OptionError("the prompt is empty; say something with -p, with -f, or through standard input.")
    with open_pair(model) as pair:
        ids = _encode(pair, text, system_prompt, raw)
        stream = pair.stream(ids, **settings | {"progress": answers.prefill_progress()})
        result = answers.show(stream, quiet=as_json)
    if as_json:
        click.echo(_json(result))
    elif not result.text.endswith("\n"):
        click.echo()
    if remark := answers.still_thinking(result):
        console.note(remark)
    if result.finish_reason == "cancelled":
        console.note("stopped")
        sys.exit(130)


def _json(result: Result) -> str:
    names = ("text", "reasoning", "tokens", "finish_reason")
    fields = {name: getattr(result, name) for name in names} | {"stats": result.stats.as_dict()}
    return json.dumps(fields, ensure_ascii=False)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise OptionError("give the prompt with -p or with -f, not both.")
    if prompt is not None:
        return prompt
    if file is not None:
        return read_prompt(file)
    if sys.stdin.isatty():
        raise OptionError("no prompt; give one with -p, with -f, or through standard input.")
    return read_prompt(sys.stdin)


def _encode(pair: Pair, prompt: str, system: str | None, raw: bool) -> list[int]:
    from localspec.text import encode_plain

    if raw:
        if system:
            raise OptionError("-sys needs the chat template, which --raw leaves out.")
        return encode_plain(pair.vocab, prompt)
    if system:
        return pair.encode([{"role": "system", "content": system}, {"role": "user", "content": prompt}])
    return pair.encode(prompt)
