"""`localspec doctor`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of name, status, detail and next.")
def doctor(as_json: bool) -> None:
    """Look whether everything here works, and say what to do where it does not.

    Exit status 1 only if something has failed; a warning is something that could be better.
    """
    from localspec.cli import console, tables
    from localspec.evaluation.doctor import examine

    found = []
    for finding in console.waiting("looking", examine(), quiet=as_json):
        found.append(finding)
        if not as_json:
            tables.show_finding(finding)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in found], ensure_ascii=False))
    sys.exit(1 if any(finding.status == "fail" for finding in found) else 0)
