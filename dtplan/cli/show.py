"""dtplan show."""

from __future__ import annotations

import json

import click

from dtplan.cli.completion import MODEL, PLAN
from dtplan.cli.options import DTYPES, echo_lines
from dtplan.plan.read import load_plan


@click.command()
@click.argument("plan", default="auto", type=PLAN)
@click.option(
    "--model", required=True, type=MODEL, help="A model folder, a config.json, or a name that transformers knows."
)
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="Tensor parallel degree.")
@click.option("--shard", default=1, show_default=True, type=click.IntRange(min=1), help="FSDP2 shard degree.")
@click.option("--replicate", default=1, show_default=True, type=click.IntRange(min=1), help="Replicas.")
@click.option("--sequence-parallel", is_flag=True, help="Cut the residual stream along the sequence.")
@click.option("--loss-parallel", is_flag=True, help="Keep the logits cut along the vocabulary.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Sequences of a batch.")
@click.option("--seq", default=4096, show_default=True, type=click.IntRange(min=1), help="Tokens of a sequence.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(DTYPES), help="Of activations.")
@click.option(
    "--te", is_flag=True, help="Also list which modules become TransformerEngine layers, and why others do not."
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
    book = ledger(bound, batch=batch, sequence=seq, dtype=dtype)
    choice = fused.choice_of(whole, bound, fp8=fp8) if te or fp8 else None
    if as_json:
        data = view.as_json(bound, book) | ({} if choice is None else {"fused": fused.as_json(choice)})
        click.echo(json.dumps(data, indent=2, sort_keys=True))
        return
    view.print_tables(bound, book)
    if choice is not None:
        echo_lines(fused.lines(choice))
