"""dtplan report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtplan.cli.completion import PLAN
from dtplan.cli.options import a_model, bound_at, of_a_step
from dtplan.plan.read import load_plan

if TYPE_CHECKING:
    from dtplan.planner.bound import BoundPlan
    from dtplan.report.diff import Diff

_BOUND = (".json", ".lock")
"""Files that hold a bound plan."""


@click.command()
@click.argument("plan", default="auto", type=PLAN)
@a_model
@bound_at
@of_a_step
@click.option("--gpus-per-host", default=8, show_default=True, type=click.IntRange(min=1), help="For the picture.")
@click.option(
    "--te",
    is_flag=True,
    help="Which modules become TransformerEngine layers, and why others do not; their collectives.",
)
@click.option("--fp8", is_flag=True, help="The same for FP8, which needs dims that are multiples of 16.")
@click.option("--proof", metavar="FILE", help="What `dtplan prove --json` printed.")
@click.option("--against", metavar="PLAN|JSON|LOCK", help="Show the difference from it.")
@click.option("-o", "--output", default="report.html", show_default=True, metavar="FILE", help="Where to write it.")
def report(
    plan: str,
    *,
    model: str,
    tp: int,
    shard: int,
    replicate: int,
    sequence_parallel: bool,
    loss_parallel: bool,
    batch: int,
    seq: int,
    dtype: str,
    gpus_per_host: int,
    te: bool,
    fp8: bool,
    proof: str | None,
    against: str | None,
    output: str,
) -> None:
    """Draw what PLAN (default: the built-in one for the model's class) does to a model: one HTML file."""
    for given in (plan, against):  # a wrong plan is told before torch is imported
        if given is not None and given != "auto" and Path(given).suffix not in _BOUND:
            load_plan(given)
    from dtplan.planner.bind import bind, find_plan
    from dtplan.planner.ledger import ledger
    from dtplan.planner.meta import meta_model
    from dtplan.report.diff import diff
    from dtplan.report.fused import choice_of, counted
    from dtplan.report.page import page
    from dtplan.report.page.proofs import read_proof

    proved = None if proof is None else read_proof(proof)
    whole = meta_model(model)
    chosen = find_plan(whole, plan, tp=tp)
    degrees: dict[str, Any] = {"tp": tp, "shard": shard, "replicate": replicate}
    switches = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    bound = bind(whole, chosen, **degrees, **switches)
    step: dict[str, Any] = {"batch": batch, "sequence": seq, "dtype": dtype}
    other = None if against is None else _read(against) or bind(whole, against, **degrees, **switches)
    choice = choice_of(whole, bound, fp8=fp8) if te or fp8 else None
    text = page(
        bound,
        ledger(counted(bound, choice), **step, fp8=fp8),
        model=Path(model).name,
        gpus_per_host=gpus_per_host,
        choice=choice,
        proof=proved,
        difference=None if other is None else _difference(diff(other, bound, **step), against, plan),
        plan=chosen,
    )
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"cannot write {output}: {error.strerror}", param_hint="--output") from None
    click.echo(f"{output}: {len(text.encode()) / 1000:.0f} kB, one file; open it in a browser")


def _read(given: str) -> BoundPlan | None:
    """The bound plan in a file; None for a plan."""
    from dtplan.planner.bound_json import bound_from_json
    from dtplan.report.lock import read_lock

    if given.endswith(".lock"):
        return read_lock(given).bound
    if not given.endswith(".json"):
        return None
    try:
        return bound_from_json(json.loads(Path(given).read_text(encoding="utf-8")), given)
    except OSError as error:
        raise click.BadParameter(f"cannot read {given}: {error.strerror}", param_hint="--against") from None
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"{given} is not JSON: {error}", param_hint="--against") from None


def _difference(found: Diff, against: str | None, plan: str) -> Diff:
    """With the names as they were given, where the two are called alike."""
    if found.before != found.after:
        return found
    return dataclasses.replace(found, before=f"{against}: {found.before}", after=f"{plan}: {found.after}")
