"""`localspec models`, `find` and `pull`: which pairs there are, which drafter fits, and fetching them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from localspec.cli.options import FILE


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def models(as_json: bool) -> None:
    """List the pairs localspec knows and whether they are here."""
    from localspec.cli import tables
    from localspec.hub import registry

    entries = [registry.get(name) for name in registry.names()]
    if as_json:
        click.echo(json.dumps([entry.as_dict() for entry in entries]))
    else:
        tables.show_models(entries)


@click.command()
@click.argument("target", type=FILE)
@click.option("--in", "folders", type=FILE, multiple=True, help="Look in this folder, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def find(target: Path, folders: tuple[Path, ...], as_json: bool) -> None:
    """Name the drafters that fit the GGUF file TARGET, and why the others do not.

    Looks into the files themselves, here and in the list of pairs. Exit status 0 only if one fits.
    """
    from localspec.cli import tables
    from localspec.hub.find import find as find_drafters

    candidates = find_drafters(target, folders)
    if as_json:
        click.echo(json.dumps([candidate.as_dict() for candidate in candidates]))
    else:
        tables.show_found(candidates)
    sys.exit(0 if any(candidate.fits for candidate in candidates) else 1)


@click.command()
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Fetch a pair or a model. The only command that touches the network.

    NAME is a pair that `localspec models` lists (default: the default pair), or NAME:QUANT, or a repository of the
    Hugging Face Hub: user/repo, user/repo:QUANT, user/repo/file.gguf or the address of its page. What a repository gave
    is printed as paths for -m and -md. A pull that was stopped goes on where it was.
    """
    from localspec.hub import registry
    from localspec.hub.pull import pull as fetch

    paths = fetch(registry.DEFAULT if name is None else name)
    for path in paths if name and "/" in name else ():
        click.echo(path)
