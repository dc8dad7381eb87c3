"""`localspec distill`."""

from __future__ import annotations

from pathlib import Path

import click

from localspec.cli.options import FILE, family
from localspec.distill.config import DistillConfig


def _prompts(context: click.Context, option: click.Parameter, file: Path | None) -> tuple[str, ...]:
    from localspec.evaluation import prompts

    return tuple(prompts.read(file)) if file else ()


DEFAULT = DistillConfig()
CONFIG = family(
    DistillConfig,
    "config",
    *(
        click.option(flag, name, type=kind, default=getattr(DEFAULT, name), show_default=True, help=text)
        for flag, name, kind, text in (
            ("--tokens", "n_tokens", click.IntRange(1), "Tokens to synthesise."),
            ("--hours", "hours", click.FloatRange(0, min_open=True), "Training time."),
            ("--layers", "n_layers", click.IntRange(1), "Layers of the drafter."),
            ("--block-size", "block_size", click.IntRange(2, 128), "Tokens of a block, the anchor's included."),
            ("--vocab-size", "vocab_size", click.IntRange(16), "Tokens it can draft."),
            ("--slots", "n_slots", click.IntRange(1), "Chats written at a time."),
            ("--objective", "objective", click.Choice(["ce", "kl", "mix"]), "What training aims at."),
            ("--outtype", "outtype", click.STRING, "Encoding; auto: the smallest as good as q8_0."),
        )
    ),
    click.option("--prompts", type=FILE, callback=_prompts, help="Prompts to mix in (one a line, or JSONL)."),
    click.option("--two-pass", is_flag=True, help="Collect features in a second pass: less memory, more time."),
    click.option("--chats", type=FILE, help="Data folder of another file of this model, to re-use."),
    click.option("--from", "begin", type=FILE, help="Folder of another distill to begin with."),
    click.option("--hf", type=FILE, help="Also write a Hugging Face checkpoint here."),
    click.option("-t", "--threads", "n_threads", type=click.IntRange(1), help="CPU threads (default: physical cores)."),
    click.option("-s", "--seed", type=click.IntRange(0), default=DEFAULT.seed, show_default=True),
)


@click.command()
@click.argument("target", type=FILE)
@click.option("-o", "--out", type=FILE, required=True, help="Folder of the work and its result.")
@CONFIG
def distill(target: Path, out: Path, config: DistillConfig) -> None:
    """Make a drafter for the GGUF file TARGET, from what it says itself. Needs torch; goes on where it was stopped."""
    from localspec.distill.pipeline import distill as run_distill

    click.echo(run_distill(target, out, config))
