"""The pair that a command's options name, opened with what a terminal shows meanwhile."""

from __future__ import annotations

from localspec.cli import console
from localspec.cli.options import ModelOptions
from localspec.errors import OptionError
from localspec.llama import set_verbose
from localspec.loading.load import load
from localspec.pair import Pair


def open_pair(model: ModelOptions) -> Pair:
    """Load the pair; raises what `load` raises."""
    set_verbose(model.verbose)
    with console.status("loading", quiet=model.verbose):
        return load(
            model.name,
            target=model.model,
            draft=model.model_draft,
            n_ctx=model.ctx_size,
            gpu_layers=model.gpu_layers,
            draft_gpu_layers=model.gpu_layers_draft,
            n_threads=model.threads,
            thinking=model.think,
            exact=model.exact,
            explain=console.note if model.verbose else None,
        )


def need_drafter(pair: Pair) -> None:
    """OptionError if there is nothing to compare plain decoding with."""
    if not pair.has_drafter:
        raise OptionError("there is no drafter to compare with; give one with -md.")
