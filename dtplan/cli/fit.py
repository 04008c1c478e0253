"""dtplan fit."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click

from dtplan.cli.completion import PLAN
from dtplan.cli.options import DTYPES, a_model, echo_lines
from dtplan.plan.read import load_plan
from dtplan.sizing.gpus import GPUS

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)?", re.IGNORECASE)
_FACTORS = {"gib": 1 << 30, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}


class Size(click.ParamType):  # type: ignore[type-arg]
    """``80GiB`` as bytes."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is no size such as 80GiB or 141GB", param, ctx)
        return int(float(found[1]) * _FACTORS[(found[2] or "GiB").lower()])


@click.command()
@click.argument("plan_argument", metavar="[PLAN]", default="auto", type=PLAN)
@a_model
@click.option("--gpus", required=True, type=click.IntRange(min=1), help="GPUs in all.")
@click.option("--seq", default=4096, show_default=True, type=click.IntRange(min=2), help="Tokens of a sequence.")
@click.option(
    "--batch", type=click.IntRange(min=1), help="Sequences of a step over all GPUs; as many as GPUs, if not given."
)
@click.option(
    "--micro-batch",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Sequences that a rank computes at once; gradients of its others are added.",
)
@click.option(
    "--gpu",
    default="h100",
    show_default=True,
    type=click.Choice(list(GPUS), case_sensitive=False),
    help="Whose rates and memory.",
)
@click.option("--memory", type=Size(), help="Of one GPU, as 80GiB; that of the named GPU, if not given.")
@click.option("--reserve", type=Size(), default="6GiB", show_default=True, help="Of it, for CUDA, NCCL, fragmentation.")
@click.option("--gpus-per-host", default=8, show_default=True, type=click.IntRange(min=1), help="Linked by NVLink.")
@click.option("--plan", "plan_option", type=PLAN, help="As the argument: a built-in plan's name or a file.")
@click.option("--tp", type=click.IntRange(min=1), help="Only this tensor parallel degree.")
@click.option(
    "--sequence-parallel/--no-sequence-parallel", default=None, help="Only with or without; both, if not given."
)
@click.option("--checkpointing/--no-checkpointing", default=None, help="Only with or without; both, if not given.")
@click.option("--loss-parallel/--no-loss-parallel", default=True, show_default=True, help="Logits cut or gathered.")
@click.option("--optimizer", default="adamw", show_default=True, type=click.Choice(["adamw", "momentum", "sgd"]))
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(DTYPES), help="Of all numbers.")
@click.option(
    "--mixed-precision", "mixed", is_flag=True, help="Parameters and optimizer in float32, computation in --dtype."
)
@click.option("--te", is_flag=True, help="With TransformerEngine's layers where the plan names them.")
@click.option("--fp8", is_flag=True, help="With TransformerEngine's layers, in FP8.")
@click.option("--compiled", is_flag=True, help="With dtplan.compile_model.")
@click.option("--explain", is_flag=True, help="Also what every number is made of.")
@click.option("--trace", metavar="FILE", help="Write the chosen layout's step as a Chrome trace, for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def fit(
    plan_argument: str,
    *,
    model: str,
    gpus: int,
    seq: int,
    batch: int | None,
    micro_batch: int,
    gpu: str,
    memory: int | None,
    reserve: int,
    gpus_per_host: int,
    plan_option: str | None,
    tp: int | None,
    sequence_parallel: bool | None,
    checkpointing: bool | None,
    loss_parallel: bool,
    optimizer: str,
    dtype: str,
    mixed: bool,
    te: bool,
    fp8: bool,
    compiled: bool,
    explain: bool,
    trace: str | None,
    as_json: bool,
) -> None:
    """The smallest tensor parallel degree at which a model trains on some GPUs, and all other layouts beside it.

    Memory is followed through one rank's step of the real model on shapes without storage; time is an estimate.
    Exits with 0 if a layout fits, 1 if none does.
    """
    plan = plan_option or plan_argument
    load_plan(plan) if plan != "auto" else None  # a wrong plan is told before torch is imported
    from dtplan.planner.memory import Precision
    from dtplan.planner.meta import meta_model
    from dtplan.sizing import data, tell
    from dtplan.sizing import fit as sizing

    named = GPUS[gpu]
    ask = sizing.Ask(
        gpus=gpus,
        memory=memory or named.memory,
        gpu=named,
        sequence=seq,
        batch=batch or gpus * micro_batch,
        micro=micro_batch,
        reserve=reserve,
        per_host=gpus_per_host,
        optimizer=optimizer,  # type: ignore[arg-type]
        precision=Precision.of(dtype, dtype if mixed else None),
        loss_parallel=loss_parallel,
        sequence_parallel=sequence_parallel,
        checkpointing=checkpointing,
        layers="fp8" if fp8 else "te" if te else "torch",
        compiled=compiled,
        tp=tp,
    )
    fitted = sizing.fit(meta_model(model), plan, ask)
    if trace is not None:
        from dtplan.report.timeline import chrome_trace

        _, variant = fitted.smallest or fitted.nearest
        Path(trace).write_text(json.dumps(chrome_trace(variant, ask)) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(data.as_json(fitted), indent=2, sort_keys=True))
    else:
        echo_lines(tell.lines(fitted, explain=explain))
    sys.exit(0 if fitted.smallest is not None else 1)
