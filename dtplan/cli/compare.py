"""dtplan diff."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from dtplan._errors import DtplanError
from dtplan.cli.completion import MODEL, PLAN_OR_BOUND
from dtplan.cli.options import DTYPES
from dtplan.plan.read import load_plan
from dtplan.planner.bound import BoundPlan
from dtplan.planner.bound_json import bound_from_json
from dtplan.report.diff import Diff
from dtplan.report.diff import diff as compare
from dtplan.report.lock import Lock, read_lock


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


Side = str | BoundPlan | Lock
DEGREE, SWITCH = Pair(), Pair({"off": False, "on": True})


@click.command("diff")
@click.argument("before", metavar="A", type=PLAN_OR_BOUND)
@click.argument("after", metavar="[B]", required=False, type=PLAN_OR_BOUND)
@click.option("--model", "models", multiple=True, type=MODEL, help="Bind both to this model; twice: one for each.")
@click.option("--tp", default="1", show_default=True, type=DEGREE, help="Tensor parallel degree; 4,8 for A and B.")
@click.option("--shard", default="1", show_default=True, type=DEGREE, help="FSDP2 shard degree.")
@click.option("--replicate", default="1", show_default=True, type=DEGREE, help="Replicas.")
@click.option("--sequence-parallel", default="off", show_default=True, type=SWITCH, help="off, on, or off,on.")
@click.option("--loss-parallel", default="off", show_default=True, type=SWITCH, help="off, on, or off,on.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Sequences of a batch.")
@click.option("--seq", default=4096, show_default=True, type=click.IntRange(min=1), help="Tokens of a sequence.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(DTYPES), help="Of activations.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.pass_context
def diff(
    ctx: click.Context,
    /,
    *,
    before: str,
    after: str | None,
    models: tuple[str, ...],
    batch: int,
    seq: int,
    dtype: str,
    as_json: bool,
    **settings: tuple[Any, Any],
) -> None:
    """What differs in meaning between A and B: plans, locks, or bound plans (JSON of `dtplan show`).

    With --model plans are bound, and every difference tells what it costs in a step. B may be left out where A is
    bound at two settings: `dtplan diff llama --model CONFIG --tp 4,8`. A plan beside a lock is bound as the lock says.
    Exits with 0 if nothing differs, 1 if something does, 2 if the two cannot be compared.
    """
    if len(models) > 2:
        raise click.UsageError("--model is given once, or once for each of A and B")
    if after is None and not (len(models) > 1 or any(one != other for one, other in settings.values())):
        raise click.UsageError("give B, or two settings for A, as in --model CONFIG --tp 4,8")
    step = {"batch": batch, "sequence": seq, "dtype": dtype}
    try:
        found = _compared((before, after or before), models, settings, step, given=_given(ctx, settings))
    except DtplanError as error:  # a plan that is wrong or does not fit is no difference
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else found.as_text())
    sys.exit(found.exit_code)


def _compared(
    names: tuple[str, str],
    models: tuple[str, ...],
    settings: dict[str, tuple[Any, Any]],
    step: dict[str, Any],
    *,
    given: str | None,
) -> Diff:
    sides = [_read(name) for name in names]
    if models:
        sides = _bound(sides, models, settings)
    elif given is not None:
        raise click.UsageError(f"{given} is for plans that are bound: give the --model, too")
    found = compare(*_alike(sides), **step)
    files = [f"{name}: " if "." in name else "" for name in names]
    if files[0] != files[1]:
        found = dataclasses.replace(found, before=files[0] + found.before, after=files[1] + found.after)
    return found


def _read(given: str) -> Side:
    """A plan's name or file as it was given, or what is in a lock or in the JSON of a bound plan."""
    if given.endswith(".lock"):
        return read_lock(given)
    if not given.endswith(".json"):
        load_plan(given)  # a wrong plan is told before torch is imported
        return given
    try:
        return bound_from_json(json.loads(Path(given).read_text(encoding="utf-8")), given)
    except OSError as error:
        raise click.UsageError(f"{given}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise click.UsageError(f"{given}: no JSON: {error}") from None


def _given(ctx: click.Context, settings: Iterable[str]) -> str | None:
    """The first of the settings that stands on the command line."""
    given = (s for s in settings if ctx.get_parameter_source(s) is click.core.ParameterSource.COMMANDLINE)
    return next(("--" + name.replace("_", "-") for name in given), None)


def _bound(sides: list[Side], models: tuple[str, ...], settings: dict[str, tuple[Any, Any]]) -> list[Side]:
    """Plans bound, each to its model at its settings; what is bound stays."""
    from dtplan.planner.bind import bind
    from dtplan.planner.meta import meta_model

    built = {model: meta_model(model) for model in models}
    bound: list[Side] = []
    for at, side in enumerate(sides):
        degrees = {name: pair[at] for name, pair in settings.items()}
        bound.append(bind(built[models[-at % len(models)]], side, **degrees) if isinstance(side, str) else side)
    return bound


def _alike(sides: list[Side]) -> list[str | BoundPlan]:
    """Two plans, or two bound plans; a plan beside a lock is bound to the lock's model, at its degrees."""
    held = next((side for side in sides if isinstance(side, Lock)), None)
    kinds = {isinstance(side, str) for side in sides}
    if len(kinds) > 1 and held is None:
        raise click.UsageError("a plan and a bound plan: give the --model to which the plan is bound, and its degrees")
    alike: list[str | BoundPlan] = []
    for side in sides:
        if isinstance(side, Lock):
            alike.append(side.bound)
        elif isinstance(side, str) and held is not None:
            alike.append(held.bound_with(side))
        else:
            alike.append(side)
    return alike
