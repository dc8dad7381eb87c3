"""The command line: options in, errors as one sentence, everything heavy imported only when its command runs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec import __version__
from localspec.cli.convert import convert
from localspec.errors import LocalspecError, OptionError

if TYPE_CHECKING:
    from localspec.pair import Pair

Command = Callable[..., Any]


class _Group(click.Group):
    """Shows commands in the order they are defined and a LocalspecError as one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LocalspecError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            sys.stderr.close()  # the reader has gone; Python would complain once more at exit
            sys.exit(1)
        except OSError as error:
            raise click.ClickException(f"{error.filename or 'output'}: {error.strerror or error}.") from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="localspec")
def main() -> None:
    """Run large language models on your own machine, faster, with the same output.

    Without -m every command uses the default pair; `localspec pull` fetches it once.
    """
    if sys.stdout is None or sys.stderr is None:
        sys.exit(1)  # closed by the caller: there is nobody to speak to
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bad bytes in, characters a terminal cannot show: no reason to stop


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several click options as one decorator, in the order given."""

    def apply(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def layers(value: str) -> int | None:
    """A number of layers: None for `auto` (as many as fit), negative for `all`."""
    if value in ("auto", "all"):
        return None if value == "auto" else -1
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"must be auto, all or a number, not {value!r}.") from None


model_options = options(
    click.argument("name", required=False),
    click.option("-m", "--model", type=click.Path(path_type=Path), help="Target GGUF file."),
    click.option("-md", "--model-draft", type=click.Path(path_type=Path), help="Drafter GGUF file."),
    click.option("-ngl", "--gpu-layers", type=layers, help="Target layers on the GPU: auto, all or N (default: auto)."),
    click.option("-ngld", "--gpu-layers-draft", type=layers, help="Drafter layers on the GPU (default: as -ngl)."),
    click.option("-c", "--ctx-size", type=int, help="Context in tokens (default: what fits, usually 8192)."),
    click.option("-t", "--threads", type=int, help="CPU threads (default: physical cores)."),
    click.option(
        "--think/--no-think", default=None, help="Think before answering (default: as the drafter was trained)."
    ),
    click.option("-v", "--verbose", is_flag=True, help="Show the memory plan and llama.cpp's log."),
)

draft_options = options(
    click.option("--draft-max", type=int, help="Most tokens drafted a round (0: none)."),
    click.option(
        "--path", metavar="WAY", help="How to draft: auto (what pays), ngram, greedy, expected, tree, sampled."
    ),
    click.option("--draft-min", type=int, help="Fewest tokens drafted a round, even where they do not pay."),
    click.option("--draft-p-min", type=float, help="Draft no token less likely than this."),
)

sampling_options = options(
    click.option("-n", "--predict", type=int, default=-1, help="Tokens to say at most (-1: no limit)."),
    click.option("--temp", type=float, default=0.0, show_default=True, help="Temperature; 0 is greedy."),
    click.option("--top-k", type=int, default=40, show_default=True),
    click.option("--top-p", type=float, default=0.95, show_default=True),
    click.option("--min-p", type=float, default=0.05, show_default=True),
    click.option("--repeat-penalty", type=float, default=1.0, show_default=True),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option("-s", "--seed", type=int, help="Seed of the random choices (default: a new one)."),
    click.option("--stop", multiple=True, help="Text that ends the answer; may be given more than once."),
    click.option("--spec/--no-spec", default=None, help="Use the drafter or not (default: if there is one)."),
)

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "spec", "max_tokens", "path", "draft_max", "draft_min", "draft_p_min"),
)


def _load(values: dict[str, Any], *, drafting: bool = True) -> Pair:
    """The pair the model options name, its loading shown on a terminal."""
    from localspec.cli import terminal
    from localspec.llama import set_verbose
    from localspec.loading.load import load

    set_verbose(values["verbose"])
    with terminal.status("loading", quiet=values["verbose"]):
        return load(
            values["name"],
            target=values["model"],
            draft=values["model_draft"],
            n_ctx=values["ctx_size"],
            gpu_layers=values["gpu_layers"],
            draft_gpu_layers=values["gpu_layers_draft"],
            n_threads=values["threads"],
            thinking=values["think"],
            explain=terminal.note if values["verbose"] else None,
        )


def _sampling(values: dict[str, Any]) -> dict[str, Any]:
    """The options of `Pair.stream` among a command's values."""
    n = values["predict"]
    if n < -1 or n == 0:
        raise OptionError(f"-n must be at least 1, or -1 for no limit, not {n}.")
    seed = None if values["seed"] == -1 else values["seed"]  # llama.cpp's spelling of a new one
    values = values | {"temperature": values["temp"], "max_tokens": None if n == -1 else n, "seed": seed}
    return {name: values[name] for name in SAMPLING}


@main.command()
@model_options
@draft_options
@sampling_options
@click.option("-sys", "--system-prompt", help="What the model is told before the conversation.")
def chat(**values: Any) -> None:
    """Talk with a model. NAME is a pair that `localspec models` lists.

    Ctrl-C stops an answer and keeps it; /help lists the commands. When standard input is no terminal, each of its
    lines is answered in turn.
    """
    from localspec.cli import terminal

    settings = _sampling(values)
    with _load(values) as pair:
        terminal.converse(pair, settings, system=values["system_prompt"])


@main.command()
@model_options
@draft_options
@sampling_options
@click.option("-p", "--prompt", help="The prompt.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="File that holds the prompt.")
@click.option("-sys", "--system-prompt", help="What the model is told before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print text, tokens, finish_reason and stats as JSON.")
def run(**values: Any) -> None:
    """Answer one prompt, from -p, -f or standard input."""
    from localspec.cli import terminal

    settings = _sampling(values)
    prompt = _prompt(values["prompt"], values["file"])
    with _load(values) as pair:
        ids = _encode(pair, prompt, values["system_prompt"], values["raw"])
        stream = pair.stream(ids, progress=terminal.prefill_progress(), **settings)
        result = terminal.show(stream, quiet=values["as_json"])
    if values["as_json"]:
        fields = {"text": result.text, "tokens": result.tokens, "finish_reason": result.finish_reason}
        click.echo(json.dumps(fields | {"stats": result.stats.as_dict()}, ensure_ascii=False))
    elif not result.text.endswith("\n"):
        click.echo()
    if result.finish_reason == "cancelled":
        terminal.note("stopped")
        sys.exit(130)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise OptionError("give the prompt with -p or with -f, not both.")
    if prompt is not None:
        return prompt
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"cannot read the prompt from {file}: {error}.") from error
    if sys.stdin.isatty():
        raise OptionError("no prompt; give one with -p, with -f, or through standard input.")
    return sys.stdin.read()


def _encode(pair: Pair, prompt: str, system: str | None, raw: bool) -> list[int]:
    from localspec.text import encode_plain

    if raw:
        if system:
            raise OptionError("-sys needs the chat template, which --raw leaves out.")
        return encode_plain(pair.vocab, prompt)
    if system:
        return pair.encode([{"role": "system", "content": system}, {"role": "user", "content": prompt}])
    return pair.encode(prompt)


prompt_options = options(
    click.option("-f", "--file", type=click.Path(path_type=Path), help="Prompts: one a line, or JSONL with `prompt`."),
    click.option("-n", "--predict", type=click.IntRange(1), default=200, show_default=True, help="Tokens a prompt."),
    click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON."),
)


@main.command()
@model_options
@click.option("--path", default="greedy", show_default=True, help="How to draft: greedy, expected, tree, auto, ngram.")
@click.option("--draft-max", type=int, help="Most tokens drafted a round (default: the whole block; a tree of 16).")
@prompt_options
def check(**values: Any) -> None:
    """Prove the output: every prompt with and without the drafter, token by token.

    Where the two differ, the plain decoder's two best logits are printed; a difference counts as a near-tie only if
    they lie within 1 % of each other. Exit status 0 only if nothing else differs.
    """
    from localspec.cli import terminal
    from localspec.evaluation.check import check as run_check

    given = _given(values["file"])
    with _load(values) as pair:
        _need_drafter(pair)
        texts = [text for some in (given or _own(pair)).values() for text in some]
        with terminal.progress("checking", len(texts)) as advance:
            report = run_check(
                pair,
                texts,
                max_tokens=values["predict"],
                path=values["path"],
                draft_max=values["draft_max"],
                each=lambda *_: advance(),
            )
    if values["as_json"]:
        click.echo(json.dumps(report.as_dict()))
    else:
        terminal.show_check(report)
    sys.exit(1 if report.different else 0)


@main.command()
@model_options
@prompt_options
@click.option("--modes", default="plain,greedy,tree,ngram,auto", show_default=True, help="Ways of decoding to compare.")
@click.option("--draft-max", type=int, help="Most tokens drafted a round, in every mode.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--temp", type=float, default=0.0, show_default=True)
@click.option("--synthetic", type=click.FloatRange(0, 1), help="Also draft tokens right with this chance each.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the figures into this PNG file.")
def bench(**values: Any) -> None:
    """Measure ways of decoding, alternating in one process: plain, greedy, expected, tree, ngram, auto."""
    from localspec.cli import terminal
    from localspec.evaluation.bench import MODES, bench, check_plot, oracle, plot

    modes = [mode.strip() for mode in values["modes"].split(",")]
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise OptionError(f"there is no mode {unknown[0]!r}; choose from {', '.join(MODES)}.")
    n_modes = len({"plain", *modes}) + (values["synthetic"] is not None)
    check_plot(values["plot"])
    given = _given(values["file"])
    with _load(values) as pair:
        _need_drafter(pair)
        classes = given or _own(pair)
        texts = [text for some in classes.values() for text in some]
        with terminal.progress("measuring", n_modes * values["repeats"] * len(texts)) as advance:
            figures = bench(
                pair,
                classes,
                modes=modes,
                repeats=values["repeats"],
                max_tokens=values["predict"],
                temperature=values["temp"],
                draft_max=values["draft_max"],
                synthetic=values["synthetic"],
                each=lambda *_: advance(),
            )
        figures |= oracle(pair, texts, max_tokens=values["predict"])
    if values["as_json"]:
        click.echo(json.dumps(figures))
    else:
        terminal.show_bench(figures)
    if values["plot"]:
        plot(figures, values["plot"])


@main.command()
@model_options
def tune(**values: Any) -> None:
    """Measure anew what drafting costs on this machine, and forget what it has brought so far."""
    from localspec.cli import terminal

    with _load(values) as pair, terminal.status("measuring", quiet=values["verbose"]):
        profile = pair.tune()
    terminal.show_costs(profile.costs)


def _given(file: Path | None) -> dict[str, list[str]] | None:
    """The prompts of a file by class, read before anything heavy is loaded."""
    from localspec.evaluation import prompts

    return prompts.by_class(file) if file else None


def _own(pair: Pair) -> dict[str, list[str]]:
    """Our own prompts, those that leave half of the context to the answer."""
    from localspec.evaluation import prompts

    short = {kind: [p for p in some if 2 * len(pair.encode(p)) < pair.n_ctx] for kind, some in prompts.own().items()}
    return {kind: some for kind, some in short.items() if some}


def _need_drafter(pair: Pair) -> None:
    if not pair.has_drafter:
        raise OptionError("there is no drafter to compare with; give one with -md.")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def models(as_json: bool) -> None:
    """List the pairs localspec knows and whether they are here."""
    from localspec.cli import terminal
    from localspec.hub import registry

    entries = [registry.get(name) for name in registry.names()]
    if as_json:
        click.echo(json.dumps([entry.as_dict() for entry in entries]))
    else:
        terminal.show_models(entries)


@main.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--in", "folders", type=click.Path(path_type=Path), multiple=True, help="Look in this folder, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def find(target: Path, folders: tuple[Path, ...], as_json: bool) -> None:
    """Name the drafters that fit the GGUF file TARGET, and why the others do not.

    Looks into the files themselves, here and in the list of pairs. Exit status 0 only if one fits.
    """
    from localspec.cli import terminal
    from localspec.hub.find import find as find_drafters

    candidates = find_drafters(target, folders)
    if as_json:
        click.echo(json.dumps([candidate.as_dict() for candidate in candidates]))
    else:
        terminal.show_found(candidates)
    sys.exit(0 if any(candidate.fits for candidate in candidates) else 1)


@main.command()
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Fetch a pair or a model. The only command that touches the network.

    NAME is a pair that `localspec models` lists (default: the default pair), or NAME:QUANT, or a repository of the
    Hugging Face Hub: user/repo, user/repo:QUANT, user/repo/file.gguf or the address of its page. What a repository gave
    is printed as paths for -m and -md. A pull that was stopped goes on where it was.
    """
    from localspec.hub import pull as fetch
    from localspec.hub import registry

    paths = fetch.pull(registry.DEFAULT if name is None else name)
    for path in paths if name and "/" in name else ():
        click.echo(path)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of name, status, detail and next.")
def doctor(as_json: bool) -> None:
    """Look whether everything here works, and say what to do where it does not.

    Exit status 1 only if something has failed; a warning is something that could be better.
    """
    from localspec.cli import terminal
    from localspec.evaluation.doctor import examine

    found = []
    for finding in terminal.waiting("looking", examine(), quiet=as_json):
        found.append(finding)
        if not as_json:
            terminal.show_finding(finding)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found], ensure_ascii=False))
    sys.exit(1 if any(finding.status == "fail" for finding in found) else 0)


@main.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder of the work and its result.")
@click.option("--tokens", type=click.IntRange(1), default=1_000_000, show_default=True, help="Tokens to synthesise.")
@click.option("--hours", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Training time.")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, help="Layers of the drafter.")
@click.option("--block-size", type=click.IntRange(2, 128), default=8, show_default=True)
@click.option("--vocab-size", type=click.IntRange(16), default=8192, show_default=True, help="Tokens it can draft.")
@click.option("--prompts", "file", type=click.Path(path_type=Path), help="Prompts to mix in (one a line, or JSONL).")
@click.option("--slots", type=click.IntRange(1), default=96, show_default=True, help="Chats written at a time.")
@click.option("--two-pass", is_flag=True, help="Collect features in a second pass: less memory, more time.")
@click.option("--chats", type=click.Path(path_type=Path), help="Data folder of another file of this model, to re-use.")
@click.option("--from", "begin", type=click.Path(path_type=Path), help="Folder of another distill to begin with.")
@click.option("--objective", type=click.Choice(["ce", "kl", "mix"]), default="ce", show_default=True)
@click.option("--outtype", default="auto", show_default=True, help="Encoding; auto: the smallest as good as q8_0.")
@click.option("--hf", type=click.Path(path_type=Path), help="Also write a Hugging Face checkpoint here.")
@click.option("-t", "--threads", type=click.IntRange(1), help="CPU threads (default: physical cores).")
@click.option("-s", "--seed", type=click.IntRange(0), default=0, show_default=True)
def distill(**values: Any) -> None:
    """Make a drafter for the GGUF file TARGET, from what it says itself. Needs torch; goes on where it was stopped."""
    from localspec.distill.pipeline import distill as run_distill
    from localspec.evaluation import prompts

    path = run_distill(
        values["target"],
        values["out"],
        n_tokens=values["tokens"],
        hours=values["hours"],
        n_layers=values["layers"],
        block_size=values["block_size"],
        vocab_size=values["vocab_size"],
        objective=values["objective"],
        prompts=tuple(prompts.read(values["file"])) if values["file"] else (),
        chats=values["chats"],
        begin=values["begin"],
        two_pass=values["two_pass"],
        n_slots=values["slots"],
        n_threads=values["threads"],
        outtype=values["outtype"],
        hf=values["hf"],
        seed=values["seed"],
    )
    click.echo(path)


main.add_command(convert)

if __name__ == "__main__":
    main()
