"""dtplan diff."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from dtplan.cli.options import DTYPES
from dtplan.plan.read import load_plan
from dtplan.planner.bound import BoundPlan
from dtplan.planner.bound_json import bound_from_json
from dtplan.report.diff import Diff
from dtplan.report.diff import diff as compare


class Pair(click.ParamType[Any, Any]):
    """One value for both sides, or two with a comma between."""

    name = "VALUE[,VALUE]"

    def __init__(self, words: dict[str, Any] | None = None) -> None:
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, Any]:
        """The value before and the value after."""
        if isinstance(value, tuple):
            return value
        parts = [self._one(part.strip()) for part in str(value).split(",")]
        if None in parts or len(parts) > 2:
            allowed = " or ".join(self.words) if self.words else "a number of ranks"
            self.fail(f"{value!r} is not {allowed}, or two of them with a comma between: before, after", param, ctx)
        return parts[0], parts[-1]

    def _one(self, text: str) -> Any:
        if self.words is not None:
            return self.words.get(text)
        return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


DEGREE, SWITCH = Pair(), Pair({"off": False, "on": True})


@click.command("diff")
@click.argument("before", metavar="A")
@click.argument("after", metavar="[B]", required=False)
@click.option("--model", "models", multiple=True, help="Bind both to this model; twice: one for each.")
@click.option("--tp", default="1", show_default=True, type=DEGREE, help="Tensor parallel degree; 4,8 for A and B.")
@click.option("--shard", default="1", show_default=True, type=DEGREE, help="FSDP2 shard degree.")
@click.option("--replicate", default="1", show_default=True, type=DEGREE, help="Replicas.")
@click.option("--sequence-parallel", default="off", show_default=True, type=SWITCH, help="off, on, or off,on.")
@click.option("--loss-parallel", default="off", show_default=True, type=SWITCH, help="off, on, or off,on.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Sequences of a batch.")
@click.option("--seq", default=4096, show_default=True, type=click.IntRange(min=1), help="Tokens of a sequence.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(DTYPES), help="Of activations.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def diff(
    before: str,
    after: str | None,
    *,
    models: tuple[str, ...],
    batch: int,
    seq: int,
    dtype: str,
    as_json: bool,
    **settings: tuple[Any, Any],
) -> None:
    """What differs in meaning between A and B: plans (names or files), or bound plans (JSON of `dtplan show`).

    With --model both are bound, and every difference tells what it costs in a step. B may be left out where A is
    bound at two settings: `dtplan diff llama --model CONFIG --tp 4,8`. Exits with 0 if nothing differs, else 1.
    """
    sides = [_read(before), _read(after or before)]
    if after is None and not (len(models) > 1 or any(one != other for one, other in settings.values())):
        raise click.UsageError("give B, or two settings for A, as in --model CONFIG --tp 4,8")
    if len(models) > 2:
        raise click.UsageError("--model is given once, or once for each of A and B")
    found = _compared(sides, models, settings, {"batch": batch, "sequence": seq, "dtype": dtype})
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else found.as_text())
    sys.exit(found.exit_code)


def _read(given: str) -> str | BoundPlan:
    """A plan's name or file as it was given, or the bound plan in a JSON file."""
    path = Path(given)
    if path.suffix != ".json":
        load_plan(given)  # a wrong plan is told before torch is imported
        return given
    try:
        return bound_from_json(json.loads(path.read_text(encoding="utf-8")), given)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{given}: {error}") from None


def _compared(
    sides: list[str | BoundPlan], models: tuple[str, ...], settings: dict[str, tuple[Any, Any]], step: dict[str, Any]
) -> Diff:
    if models:
        sides = [_bound(side, models[-at % len(models)], settings, at) for at, side in enumerate(sides)]
    elif len({isinstance(side, str) for side in sides}) > 1:
        raise click.UsageError("a plan and a bound plan: give the --model to which the plan is bound, and its degrees")
    return compare(*sides, **step)


def _bound(side: str | BoundPlan, model: str, settings: dict[str, tuple[Any, Any]], at: int) -> BoundPlan:
    if isinstance(side, BoundPlan):
        return side
    from dtplan.planner.bind import bind
    from dtplan.planner.meta import meta_model

    return bind(meta_model(model), side, **{name: pair[at] for name, pair in settings.items()})
