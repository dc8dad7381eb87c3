"""`localspec check`, `bench` and `tune`: is the output the same, and how fast is it here."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localspec.cli.options import FILE, JSON, MODEL, ModelOptions, family
from localspec.errors import OptionError

if TYPE_CHECKING:
    from localspec.pair import Pair


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts to answer, and with how many tokens each."""

    file: Path | None
    predict: int


PROMPTS = family(
    PromptOptions,
    "prompts",
    click.option("-f", "--file", type=FILE, help="Prompts: one a line, or JSONL with `prompt`."),
    click.option("-n", "--predict", type=click.IntRange(1), default=200, show_default=True, help="Tokens a prompt."),
)


@click.command()
@MODEL
@click.option("--path", default="greedy", show_default=True, help="How to draft: greedy, expected, tree, auto, ngram.")
@click.option("--draft-max", type=int, help="Most tokens drafted a round (default: the whole block; a tree of 16).")
@PROMPTS
@JSON
def check(model: ModelOptions, path: str, draft_max: int | None, prompts: PromptOptions, as_json: bool) -> None:
    """Prove the output: every prompt with and without the drafter, token by token.

    What is promised is measured first: up to some width a pass gives every token the bits it has alone. Within that
    any difference counts. Wider passes may swap two nearly equal logits; both are printed, as decoded alone and in
    that pass, and unless they explain it the outputs are DIFFERENT. Exit status 0 only if nothing is.
    """
    from localspec.cli import console, tables
    from localspec.cli.open import need_drafter, open_pair
    from localspec.evaluation.check import check as run_check

    given = _given(prompts.file)
    with open_pair(model) as pair:
        need_drafter(pair)
        texts = [text for some in (given or _own(pair)).values() for text in some]
        with console.progress("checking", len(texts)) as advance:
            report = run_check(
                pair,
                texts,
                max_tokens=prompts.predict,
                path=path,
                draft_max=draft_max,
                each=lambda *_: advance(),
            )
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        tables.show_check(report)
    sys.exit(1 if report.different else 0)


@click.command()
@MODEL
@PROMPTS
@JSON
@click.option("--modes", default="plain,greedy,tree,ngram,auto", show_default=True, help="Ways of decoding to compare.")
@click.option("--draft-max", type=int, help="Most tokens drafted a round, in every mode.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--temp", type=float, default=0.0, show_default=True)
@click.option("--synthetic", type=click.FloatRange(0, 1), help="Also draft tokens right with this chance each.")
@click.option("--plot", type=FILE, help="Draw the figures into this PNG file.")
def bench(
    model: ModelOptions,
    prompts: PromptOptions,
    as_json: bool,
    modes: str,
    draft_max: int | None,
    repeats: int,
    temp: float,
    synthetic: float | None,
    plot: Path | None,
) -> None:
    """Measure ways of decoding, alternating in one process: plain, greedy, expected, tree, ngram, auto."""
    from localspec.cli import console, tables
    from localspec.cli.open import need_drafter, open_pair
    from localspec.evaluation import bench as benchmark

    chosen = _modes(modes)
    n_modes = len({"plain", *chosen}) + (synthetic is not None)
    benchmark.check_plot(plot)
    given = _given(prompts.file)
    with open_pair(model) as pair:
        need_drafter(pair)
        classes = given or _own(pair)
        texts = [text for some in classes.values() for text in some]
        with console.progress("measuring", n_modes * repeats * len(texts)) as advance:
            figures = benchmark.bench(
                pair,
                classes,
                modes=chosen,
                repeats=repeats,
                max_tokens=prompts.predict,
                temperature=temp,
                draft_max=draft_max,
                synthetic=synthetic,
                each=lambda *_: advance(),
            )
        figures |= benchmark.oracle(pair, texts, max_tokens=prompts.predict)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        tables.show_bench(figures)
    if plot:
        benchmark.plot(figures, plot)


def _modes(text: str) -> list[str]:
    """The ways of decoding in a list with commas; OptionError for one that does not exist."""
    from localspec.evaluation.bench import MODES

    modes = [mode.strip() for mode in text.split(",")]
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise OptionError(f"there is no mode {unknown[0]!r}; choose from {', '.join(MODES)}.")
    return modes


@click.command()
@MODEL
def tune(model: ModelOptions) -> None:
    """Measure anew what drafting costs on this machine, and forget what it has brought so far."""
    from localspec.cli import console, tables
    from localspec.cli.open import open_pair

    with open_pair(model) as pair, console.status("measuring", quiet=model.verbose):
        profile = pair.tune()
    tables.show_costs(profile.costs)


def _given(file: Path | None) -> dict[str, list[str]] | None:
    """The prompts of a file by class, read before anything heavy is loaded."""
    from localspec.evaluation import prompts

    return prompts.by_class(file) if file else None


def _own(pair: Pair) -> dict[str, list[str]]:
    """Our own prompts, those that leave half of the context to the answer."""
    from localspec.evaluation import prompts

    short = {kind: [p for p in some if 2 * len(pair.encode(p)) < pair.n_ctx] for kind, some in prompts.own().items()}
    return {kind: some for kind, some in short.items() if some}
