"""dtplan prove."""

from __future__ import annotations

import json
import sys
from typing import Literal

import click

from dtplan.cli.completion import PLAN
from dtplan.cli.options import a_model, parse_batch, parse_degrees, parse_sizes
from dtplan.plan.read import load_plan


@click.command()
@click.argument("plan", default="auto", type=PLAN)
@a_model
@click.option("--tp", default="2", show_default=True, help="Tensor parallel degrees, with commas.")
@click.option(
    "--sequence-parallel",
    default="both",
    show_default=True,
    type=click.Choice(["off", "on", "both"]),
    help="Settings of the switch to prove.",
)
@click.option(
    "--loss-parallel",
    default="both",
    show_default=True,
    type=click.Choice(["off", "on", "both"]),
    help="Settings of that switch, each with all of the other.",
)
@click.option("--fsdp", is_flag=True, help="Also with FSDP2 around it; one leg on processes that talk over gloo.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Of weights and tokens.")
@click.option("--batch", metavar="ROWSxTOKENS", help="Size of the batch; 4x16 or a few more, if not given.")
@click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help="A field of the shrunken config, in JSON.")
@click.option(
    "--smallest/--no-smallest",
    default=True,
    show_default=True,
    help="After a refutation, look for the smallest config that fails so; takes a few seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def prove(
    plan: str,
    *,
    model: str,
    tp: str,
    sequence_parallel: Literal["off", "on", "both"],
    loss_parallel: Literal["off", "on", "both"],
    fsdp: bool,
    seed: int,
    batch: str | None,
    sets: tuple[str, ...],
    smallest: bool,
    as_json: bool,
) -> None:
    """Prove PLAN (default: the built-in one for the model's class) on a shrunken model, in float64, on this CPU.

    Exits with 0 if every leg was proved, 1 if one was refuted, 2 if one could not be run.
    """
    degrees, sizes, size = parse_degrees(tp), parse_sizes(sets), parse_batch(batch)
    load_plan(plan) if plan != "auto" else None  # a wrong plan is told before torch is imported
    from dtplan.prove.shrink import refuse_old_torch

    refuse_old_torch()  # before what an old torch cannot import
    from dtplan.prove import tell
    from dtplan.prove.proof import prove as proof_of

    with tell.progress(wanted=not as_json) as on_leg:
        proof = proof_of(
            plan,
            model,
            tp=degrees,
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
            fsdp=fsdp,
            seed=seed,
            sizes=sizes,
            batch=size,
            shrink_failure=smallest,
            on_leg=on_leg,
        )
    click.echo(json.dumps(proof.to_json(), indent=2, sort_keys=True) if as_json else tell.as_text(proof))
    sys.exit(proof.exit_code)
