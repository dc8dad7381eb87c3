"""Options that several commands share: each family is parsed once, into a frozen value with typed fields.

A family is a dataclass and the click options that fill it; `MODEL`, `DRAFT` and `SAMPLING` decorate a command, which
then takes the parameter `model`, `draft` or `sampling`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from localspec.errors import OptionError

if TYPE_CHECKING:
    from localspec.options import Options

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

FILE = click.Path(path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def family(cls: type[Any], parameter: str, *options: Decorator) -> Decorator:
    """The click `options`, whose values reach the command as one `cls` in `parameter`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def gathered(*args: Any, **values: Any) -> Any:
            values[parameter] = cls(**{field.name: values.pop(field.name) for field in fields(cls)})
            return command(*args, **values)

        return functools.reduce(lambda inner, option: option(inner), reversed(options), cast(Command, gathered))

    return decorate


def layers(value: str) -> int | None:
    """A number of layers: None for `auto` (as many as fit), negative for `all`."""
    if value in ("auto", "all"):
        return None if value == "auto" else -1
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"must be auto, all or a number, not {value!r}.") from None


@dataclass(frozen=True)
class ModelOptions:
    """Which pair or files to load, and how; None: what fits, or what the pair says."""

    name: str | None
    model: Path | None
    model_draft: Path | None
    gpu_layers: int | None
    gpu_layers_draft: int | None
    ctx_size: int | None
    threads: int | None
    think: bool | None
    exact: bool
    verbose: bool


MODEL = family(
    ModelOptions,
    "model",
    click.argument("name", required=False),
    click.option("-m", "--model", type=FILE, help="Target GGUF file."),
    click.option("-md", "--model-draft", type=FILE, help="Drafter GGUF file."),
    click.option("-ngl", "--gpu-layers", type=layers, help="Target layers on the GPU: auto, all or N (default: auto)."),
    click.option("-ngld", "--gpu-layers-draft", type=layers, help="Drafter layers on the GPU (default: as -ngl)."),
    click.option("-c", "--ctx-size", type=int, help="Context in tokens (default: what fits, usually 8192)."),
    click.option("-t", "--threads", type=int, help="CPU threads (default: physical cores)."),
    click.option(
        "--think/--no-think", default=None, help="Think before answering (default: as the drafter was trained)."
    ),
    click.option("--exact", is_flag=True, help="Keep every pass so narrow that no bit depends on it (see check)."),
    click.option(
        "--no-kernels",
        is_flag=True,
        expose_value=False,
        callback=lambda _context, _option, given: given and os.environ.update(LOCALSPEC_KERNELS="0"),
        help="Compute with llama.cpp's own kernels only.",
    ),
    click.option("-v", "--verbose", is_flag=True, help="Show the memory plan and llama.cpp's log."),
)


@dataclass(frozen=True)
class DraftOptions:
    """How to draft, and bounds of a draft in tokens a round; None: what pays."""

    path: str | None
    draft_max: int | None
    draft_min: int | None
    draft_p_min: float | None


DRAFT = family(
    DraftOptions,
    "draft",
    click.option("--draft-max", type=int, help="Most tokens drafted a round (0: none)."),
    click.option(
        "--path", metavar="WAY", help="How to draft: auto (what pays), ngram, greedy, expected, tree, sampled."
    ),
    click.option("--draft-min", type=int, help="Fewest tokens drafted a round, even where they do not pay."),
    click.option("--draft-p-min", type=float, help="Draft no token less likely than this."),
)


@dataclass(frozen=True)
class SamplingOptions:
    """How the target chooses, and when the answer ends."""

    predict: int
    temp: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    spec: bool | None


SAMPLING = family(
    SamplingOptions,
    "sampling",
    click.option("-n", "--predict", type=int, default=-1, help="Tokens to say at most (-1: no limit)."),
    click.option("--temp", type=float, default=0.0, show_default=True, help="Temperature; 0 is greedy."),
    click.option("--top-k", type=int, default=40, show_default=True),
    click.option("--top-p", type=float, default=0.95, show_default=True),
    click.option("--min-p", type=float, default=0.05, show_default=True),
    click.option("--repeat-penalty", type=float, default=1.0, show_default=True),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option(
        "-s",
        "--seed",
        type=int,
        help="Seed of the random choices (default: a new one).",
    ),
    click.option("--stop", multiple=True, help="Text that ends the answer; may be given more than once."),
    click.option("--spec/--no-spec", default=None, help="Use the drafter or not (default: if there is one)."),
)


def answer_options(sampling: SamplingOptions, draft: DraftOptions) -> Options:
    """The keyword options of `Pair.stream`."""
    if sampling.predict < -1 or sampling.predict == 0:
        raise OptionError(f"-n must be at least 1, or -1 for no limit, not {sampling.predict}.")
    return {
        "temperature": sampling.temp,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": sampling.stop,
        "max_tokens": None if sampling.predict == -1 else sampling.predict,
        "seed": None if sampling.seed == -1 else sampling.seed,  # llama.cpp's spelling of a new one
        "spec": sampling.spec,
        "path": draft.path,
        "draft_max": draft.draft_max,
        "draft_min": draft.draft_min,
        "draft_p_min": draft.draft_p_min,
    }
