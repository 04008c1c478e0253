"""Commands on checkpoints: roundtrip, convert."""

from __future__ import annotations

import json
import sys

import click

from dtplan.cli.completion import MODEL, PLAN
from dtplan.cli.options import echo_lines, parse_degrees
from dtplan.plan.read import load_plan


@click.command()
@click.argument("model", type=MODEL)
@click.option("--plan", default="auto", show_default=True, type=PLAN, help="A built-in plan's name or a file.")
@click.option("--tp", default="1,2,4", show_default=True, help="Tensor parallel degrees, with commas.")
@click.option("--fsdp", is_flag=True, help="Each degree also with FSDP2 over two shards.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def roundtrip(model: str, *, plan: str, tp: str, fsdp: bool, as_json: bool) -> None:
    """Load the checkpoint in the folder MODEL onto shards, save it, and compare byte for byte.

    Ranks are threads of this process, which holds the whole model. Exits with 0 if every mesh gave the same bytes
    back, 1 if one did not or the plan refuses it, 2 if the folder cannot be read.
    """
    degrees = parse_degrees(tp)
    load_plan(plan) if plan != "auto" else None  # a wrong plan is told before torch is imported
    from dtplan.prove.shrink import refuse_old_torch

    refuse_old_torch()
    from dtplan.roundtrip import round_trip

    result = round_trip(model, plan, tp=degrees, fsdp=fsdp)
    click.echo(json.dumps(result.to_json(), indent=2, sort_keys=True) if as_json else result.as_text())
    sys.exit(result.exit_code)


@click.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="A module's path and its new one; as often as needed.")
@click.option("--max-shard-bytes", default=5_000_000_000, show_default=True, type=click.IntRange(min=1))
def convert(source: str, target: str, *, rename: tuple[str, ...], max_shard_bytes: int) -> None:
    """Write the weights in the folder SOURCE, pickles or safetensors, to TARGET as safetensors, in pieces.

    `--rename embed_out=lm_head` gives a head its other name. Of a pickle only tensors are read, and nothing is run.
    """
    if wrong := next((one for one in rename if "=" not in one), None):
        raise click.BadParameter(f"{wrong!r} is not OLD=NEW", param_hint="--rename")
    from dtplan.weights.convert import convert as rewrite

    renames = {old: new for old, _, new in (one.partition("=") for one in rename)}
    written = rewrite(source, target, renames=renames, max_shard_bytes=max_shard_bytes)
    click.echo(f"{written.folder}: {written.tensors} tensors, {written.bytes} bytes, in {', '.join(written.files)}")
    echo_lines(f"{name}: left out, it is a tie" for name in written.left_out)
