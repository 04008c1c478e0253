"""dtplan new."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from dtplan.cli.options import a_model, parse_degrees

SCHEMA = "plan.schema.json"


@click.command()
@click.argument("file", required=False, type=click.Path())
@a_model
@click.option(
    "--from",
    "source",
    type=click.Choice(["hf", "deepspeed", "styles"]),
    help="Import a plan instead: transformers' own; a DeepSpeed config, FILE; a dict of torch styles, FILE.py:NAME.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="A file; else standard output.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option("--prove", "wants_proof", is_flag=True, help="Prove the draft at once, and write the verdict on top.")
@click.option("--tp", default="2,4", show_default=True, help="Degrees of the proof, with commas.")
def new(
    file: str | None,
    *,
    model: str,
    source: str | None,
    output: Path | None,
    force: bool,
    wants_proof: bool,
    tp: str,
) -> None:
    """Draft a plan for a model, from the data flow of a small one of its class, or from a plan of another system.

    What could not be decided is `todo`, which `dtplan lint` refuses, with what was seen and the choices above it.
    Exits with 0; with --prove as `dtplan prove`: 0 proved, 1 refuted, 2 not run.
    """
    degrees = parse_degrees(tp)
    if output is not None and output.exists() and not force:
        raise click.UsageError(f"{output} is there already: give another name, or --force")
    if file is not None and source is None:
        raise click.UsageError(f"{file}: a file is read with --from only; the model's config is --model")
    from dtplan.prove.shrink import refuse_old_torch

    refuse_old_torch()
    from dtplan.author.new import new_plan, proved
    from dtplan.prove import tell

    schema = schema_beside(output)
    if source is None:
        made = new_plan(model, schema=schema)
    else:
        from dtplan.author.importers.new import imported_plan

        made = imported_plan(model, source, file, schema=schema)
    if output is not None:
        output.write_text(made.text, encoding="utf-8")
    if wants_proof:
        with tell.progress(wanted=True) as on_leg:
            made = proved(made, model, tp=degrees, file=output, schema=schema, on_leg=on_leg)
    if output is None:
        click.echo(made.text, nl=False)
    else:
        output.write_text(made.text, encoding="utf-8")
        click.echo(f"{output}: {made.summary}")
    sys.exit(made.exit_code)


def schema_beside(output: Path | None) -> str:
    """The JSON Schema as seen from a plan's file: that of a checkout around it, else one beside it."""
    folder = (output or Path("plan.yaml")).resolve().parent
    for above in folder.parents:
        if (found := above / "dtplan" / SCHEMA).is_file():
            return Path(os.path.relpath(found, folder)).as_posix()
    return SCHEMA
