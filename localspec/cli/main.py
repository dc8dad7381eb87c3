"""The command `localspec`: its commands, and errors as one sentence. Everything heavy is imported by who needs it."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

import click

from localspec import __version__
from localspec.cli.chat import chat
from localspec.cli.convert import convert
from localspec.cli.distill import distill
from localspec.cli.doctor import doctor
from localspec.cli.measure import bench, check, tune
from localspec.cli.models import find, models, pull
from localspec.cli.run import run
from localspec.errors import LocalspecError, LocalspecWarning


class _Group(click.Group):
    """Shows commands in the order they are added and a LocalspecError as one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LocalspecError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            sys.exit(130)
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
    if sys.stdin is None:
        sys.stdin = io.StringIO()  # closed by the caller: nothing to read
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bad bytes in, characters a terminal cannot show: no reason to stop
    warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, *place: Any, **more: Any) -> None:
    """One of ours as a sentence, others as Python shows them."""
    if isinstance(message, LocalspecWarning):
        click.echo(f"Warning: {message}", err=True)
    else:
        _shown_by_python(message, *place, **more)


_shown_by_python = warnings.showwarning


for command in (chat, run, check, bench, tune, models, find, pull, doctor, distill, convert):
    main.add_command(command)

if __name__ == "__main__":
    main()
