"""dtplan doctor."""

from __future__ import annotations

import json
import sys

import click

from dtplan.doctor.checks import checkup
from dtplan.doctor.facts import gather


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output, with the facts.")
def doctor(as_json: bool) -> None:  # noqa: FBT001 - click passes flags by name
    """What this machine has of what dtplan uses; what each missing thing costs, and what to do about it.

    Exits with 1 if something required is missing. torch is asked in a process of its own, so that a broken one is told
    of, and nothing is left behind on a GPU.
    """
    found = checkup(gather())
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else found.as_text())
    sys.exit(found.exit_code)
