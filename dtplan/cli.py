"""The command line: parse, call, render, exit code (0 ok, 1 findings, 2 usage or internal)."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable
from typing import Any, Literal

import click

from dtplan import __version__
from dtplan._errors import Diagnostic, DtplanError
from dtplan.plan.codes import CODES
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import check, load_plan
from dtplan.plan.schema import schema_text

_DTYPES = ("bfloat16", "float16", "float32", "float64")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dtplan")
def cli() -> None:
    """Sharding plans for Hugging Face models: list, check, show and prove them; checkpoints in and out."""


@cli.command("list")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def list_plans(as_json: bool) -> None:  # noqa: FBT001 - click passes flags by name
    """Built-in plans: name, digest, and the model classes that they serve."""
    plans = [load_plan(name) for name in builtin_plans()]
    if as_json:
        rows = [{"name": plan.name, "digest": plan.digest, "serves": list(plan.serves)} for plan in plans]
        click.echo(json.dumps({"schema_version": 1, "plans": rows}, indent=2))
        return
    width = max(len(plan.name) for plan in plans)
    for plan in plans:
        click.echo(f"{plan.name:<{width}}  {plan.digest[:12]}  {', '.join(plan.serves)}")


@cli.command()
@click.argument("plans", nargs=-1, required=True, metavar="PLAN...")
@click.option("--format", "style", type=click.Choice(["text", "json", "github"]), default="text", show_default=True)
def lint(plans: tuple[str, ...], style: str) -> None:
    """Check plan files (or built-in plans by name); every finding has a place and a code."""
    found = {plan: check(plan) for plan in plans}
    findings = [finding for each in found.values() for finding in each]
    if style == "json":
        click.echo(json.dumps({"schema_version": 1, "findings": [_as_json(f) for f in findings]}, indent=2))
    elif style == "github":
        _echo_lines(_as_github(f) for f in findings)
    else:
        _echo_lines(f.render() for f in findings)
        clean = [plan for plan, each in found.items() if not each]
        _echo_lines(f"{plan}: no findings" for plan in clean)
    sys.exit(1 if findings else 0)


@cli.command()
@click.argument("plan", default="auto")
@click.option("--model", required=True, help="A model folder, a config.json, or a name that transformers knows.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="Tensor parallel degree.")
@click.option("--shard", default=1, show_default=True, type=click.IntRange(min=1), help="FSDP2 shard degree.")
@click.option("--replicate", default=1, show_default=True, type=click.IntRange(min=1), help="Replicas.")
@click.option("--sequence-parallel", is_flag=True, help="Cut the residual stream along the sequence.")
@click.option("--loss-parallel", is_flag=True, help="Keep the logits cut along the vocabulary.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Sequences of a batch.")
@click.option("--seq", default=4096, show_default=True, type=click.IntRange(min=1), help="Tokens of a sequence.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(_DTYPES), help="Of activations.")
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
        _echo_lines(fused.lines(choice))


@cli.command()
@click.argument("plan", default="auto")
@click.option("--model", required=True, help="A model folder, a config.json, or a name that transformers knows.")
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
    degrees, sizes, size = _degrees(tp), _sizes(sets), _batch(batch)
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


@cli.command()
@click.argument("model")
@click.option("--plan", default="auto", show_default=True, help="A built-in plan's name or a file.")
@click.option("--tp", default="1,2,4", show_default=True, help="Tensor parallel degrees, with commas.")
@click.option("--fsdp", is_flag=True, help="Each degree also with FSDP2 over two shards.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def roundtrip(model: str, *, plan: str, tp: str, fsdp: bool, as_json: bool) -> None:
    """Load the checkpoint in the folder MODEL onto shards, save it, and compare byte for byte.

    Ranks are threads of this process, which holds the whole model. Exits with 0 if every mesh gave the same bytes
    back, 1 if one did not or the plan refuses it, 2 if the folder cannot be read.
    """
    degrees = _degrees(tp)
    load_plan(plan) if plan != "auto" else None  # a wrong plan is told before torch is imported
    from dtplan.prove.shrink import refuse_old_torch

    refuse_old_torch()
    from dtplan.roundtrip import round_trip

    result = round_trip(model, plan, tp=degrees, fsdp=fsdp)
    click.echo(json.dumps(result.to_json(), indent=2, sort_keys=True) if as_json else result.as_text())
    sys.exit(result.exit_code)


@cli.command()
@click.argument("source")
@click.argument("target")
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
    _echo_lines(f"{name}: left out, it is a tie" for name in written.left_out)


def _degrees(text: str) -> list[int]:
    """``2,4,8`` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is no list of degrees such as 2,4,8", param_hint="--tp")
    return [int(part) for part in parts]


def _batch(text: str | None) -> tuple[int, int] | None:
    """``1x4`` as numbers."""
    if text is None:
        return None
    rows, _, tokens = text.partition("x")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in (rows, tokens)):
        raise click.BadParameter(f"{text!r} is no batch such as 1x4", param_hint="--batch")
    return int(rows), int(tokens)


def _sizes(sets: tuple[str, ...]) -> dict[str, Any]:
    """``num_hidden_layers=1`` and such as fields."""
    sizes = {}
    for text in sets:
        field, equals, value = text.partition("=")
        try:
            sizes[field] = json.loads(value)
        except json.JSONDecodeError:
            equals = ""
        if not (field and equals):
            raise click.BadParameter(f"{text!r} is no field such as num_hidden_layers=1", param_hint="--set")
    return sizes


@cli.command()
def schema() -> None:
    """The JSON Schema of plan files, for editors."""
    click.echo(schema_text(), nl=False)


@cli.command()
@click.argument("code")
def explain(code: str) -> None:
    """What a diagnostic code means."""
    if code.upper() not in CODES:
        raise click.UsageError(f"there is no code {code}; codes are {', '.join(CODES)}")
    click.echo(f"{code.upper()}: {CODES[code.upper()]}")


def _echo_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


def _as_json(finding: Diagnostic) -> dict[str, object]:
    keys = ("code", "file", "line", "column", "message", "hint")
    return {key: getattr(finding, key) for key in keys}


def _as_github(finding: Diagnostic) -> str:
    text = f"{finding.message} ({finding.hint})" if finding.hint else finding.message
    place = f"file={finding.file},line={finding.line},col={finding.column}" if finding.line else f"file={finding.file}"
    return f"::error {place},title={finding.code}::{text}"


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


if __name__ == "__main__":
    main()
