"""dtplan show."""

from __future__ import annotations

import json

import click

from dtplan.cli.completion import PLAN
from dtplan.cli.options import a_model, bound_at, echo_lines, of_a_step
from dtplan.plan.read import load_plan


@click.command()
@click.argument("plan", default="auto", type=PLAN)
@a_model
@bound_at
@of_a_step
@click.option(
    "--te",
    is_flag=True,
    help="Also list which modules become TransformerEngine layers, and why others do not; count their collectives.",
)
@click.option("--fp8", is_flag=True, help="With --te: for FP8, which needs dims that are multiples of 16.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def show(
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
    te: bool,
    fp8: bool,
    as_json: bool,
) -> None:
    """What PLAN (default: the built-in one for the model's class) does to a model, without its weights."""
    load_plan(plan) if plan != "auto" else None  # a wrong plan is told before torch is imported
    from dtplan.planner.bind import bind
    from dtplan.planner.ledger import ledger
    from dtplan.planner.meta import meta_model
    from dtplan.report import fused
    from dtplan.report import show as view

    whole = meta_model(model)
    bound = bind(
        whole,
        plan,
        tp=tp,
        shard=shard,
        replicate=replicate,
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
    )
    choice = fused.choice_of(whole, bound, fp8=fp8) if te or fp8 else None
    book = ledger(fused.counted(bound, choice), batch=batch, sequence=seq, dtype=dtype, fp8=fp8)
    if as_json:
        data = view.as_json(bound, book) | ({} if choice is None else {"fused": fused.as_json(choice)})
        click.echo(json.dumps(data, indent=2, sort_keys=True))
        return
    view.print_tables(bound, book)
    if choice is not None:
        echo_lines(fused.lines(choice))
