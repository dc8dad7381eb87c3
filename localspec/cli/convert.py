"""`localspec convert target|drafter`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from localspec.convert.writer import Report

PATH = click.Path(path_type=Path)
TYPES = "f32, f16, bf16, q8_0, q4_0, q4_k_m, q6_k ... (default: the checkpoint's own)."


@click.group()
def convert() -> None:
    """Make GGUF files of Hugging Face checkpoints (safetensors)."""


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """What both commands take."""
    command = click.option("--force", is_flag=True, help="Overwrite an existing file.")(command)
    command = click.option("--outtype", metavar="TYPE", callback=_lower, help=TYPES)(command)
    command = click.option("-o", "--out", type=PATH, required=True, help="GGUF file to write.")(command)
    return click.argument("folder", type=PATH)(command)


def _lower(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Types are written Q4_K_M as often as q4_k_m."""
    return value and value.lower()


@convert.command()
@_common
@click.option("--llama-cpp", type=PATH, help="Folder of llama.cpp's source: let its convert_hf_to_gguf.py do it.")
def target(folder: Path, out: Path, outtype: str | None, force: bool, llama_cpp: Path | None) -> None:
    """Convert the model in FOLDER (config.json, tokenizer.json and safetensors).

    Llama, Qwen3, Qwen3-MoE and the text part of Qwen3.5 are converted by localspec itself. Code that comes with a
    checkpoint is never run, except by llama.cpp's converter, where that does.
    """
    from localspec.convert.target import convert

    with _progress() as report:
        convert(folder, out, outtype=outtype, force=force, progress=report, llama_cpp=llama_cpp)
    click.echo(out)


@convert.command()
@_common
@click.option("--target", type=PATH, required=True, help="Its target: a GGUF file or a checkpoint folder.")
def drafter(folder: Path, out: Path, outtype: str | None, force: bool, target: Path) -> None:
    """Convert the DFlash or DFlash 2 drafter in FOLDER for its target."""
    from localspec.convert.drafter import convert

    with _progress() as report:
        convert(folder, out, target=target, outtype=outtype, force=force, progress=report)
    click.echo(out)


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar on stderr for each stage; nothing when stderr is no terminal."""
    from rich.progress import DownloadColumn

    from localspec.progress import bar

    stages: dict[str, Any] = {}
    shown = bar(DownloadColumn(), transient=False)

    def report(what: str, done: int, total: int) -> None:
        if what not in stages:
            shown.start()
            stages[what] = shown.add_task(what, total=None)
        shown.update(stages[what], completed=done, total=total or None)

    try:
        yield report
    finally:
        if stages:
            shown.stop()
