"""`localspec chat`."""

from __future__ import annotations

import click

from localspec.cli.options import DRAFT, MODEL, SAMPLING, DraftOptions, ModelOptions, SamplingOptions, answer_options


@click.command()
@MODEL
@DRAFT
@SAMPLING
@click.option("-sys", "--system-prompt", help="What the model is told before the conversation.")
def chat(model: ModelOptions, draft: DraftOptions, sampling: SamplingOptions, system_prompt: str | None) -> None:
    """Talk with a model. NAME is a pair that `localspec models` lists.

    Ctrl-C stops an answer and keeps it; /help lists the commands. When standard input is no terminal, each of its
    lines is answered in turn.
    """
    from localspec.cli.conversation import converse
    from localspec.cli.open import open_pair

    settings = answer_options(sampling, draft)
    with open_pair(model) as pair:
        converse(pair, settings, system=system_prompt)
