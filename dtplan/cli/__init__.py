"""The command line. A command parses, calls and renders; exit code 0 ok, 1 findings, 2 usage or internal."""

from __future__ import annotations

import sys
import traceback

import click

from dtplan import __version__
from dtplan._errors import DtplanError
from dtplan.cli import checkpoints, compare, completion, doctor, fit, lock, new, plans, prove, report, show


class InOrder(click.Group):
    """Commands in the order in which a plan's author meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dtplan")
def cli() -> None:
    """Sharding plans for Hugging Face models: draft, check, see, prove, compare, size; checkpoints in and out."""


for command in (
    plans.list_plans,
    new.new,
    plans.lint,
    show.show,
    fit.fit,
    prove.prove,
    compare.diff,
    lock.lock_command,
    report.report,
    doctor.doctor,
    checkpoints.roundtrip,
    checkpoints.convert,
    plans.schema,
    plans.explain,
    completion.completion,
):
    cli.add_command(command)


def main() -> None:
    """Entry point: errors of dtplan are told on standard error, without a traceback."""
    try:
        cli()
    except DtplanError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001 - a bug of ours: told as one, with exit code 2
        traceback.print_exc()
        click.echo("this is a bug in dtplan: please report it with the lines above", err=True)
        sys.exit(2)
