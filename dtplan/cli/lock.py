"""dtplan lock."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dtplan._errors import FindingsError
from dtplan.cli.completion import MODEL, PLAN_OR_BOUND
from dtplan.cli.options import as_annotation, bound_at
from dtplan.plan.read import load_plan
from dtplan.report.diff import Diff
from dtplan.report.lock import Lock, compared, lock, read_lock


@click.command("lock")
@click.argument("given", nargs=-1, metavar="[PLAN | LOCK...]", type=PLAN_OR_BOUND)
@click.option(
    "--model", type=MODEL, help="To write a lock: a model folder, a config.json, or a name that transformers knows."
)
@bound_at
@click.option(
    "-o",
    "--output",
    default="plan.lock",
    show_default=True,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Where the lock is written; - prints it.",
)
@click.option("--check", "checking", is_flag=True, help="Bind anew as each LOCK says, and tell what has changed.")
@click.option("--update", "updating", is_flag=True, help="The same, and write each LOCK anew where something has.")
@click.option("--format", "style", type=click.Choice(["text", "json", "github"]), default="text", show_default=True)
@click.pass_context
def lock_command(
    ctx: click.Context,
    /,
    *,
    given: tuple[str, ...],
    model: str | None,
    output: str,
    checking: bool,
    updating: bool,
    style: str,
    **settings: Any,
) -> None:
    """Write down what PLAN (default: the built-in one) does to a model, or check that it still does.

    `dtplan lock --model CONFIG --tp 8` writes plan.lock: the bound plan with the model's config, the same on every
    machine, to be kept beside the plan. `dtplan lock --check plan.lock` needs nothing else; it exits with 0 if the plan
    still does the same, 1 if not, 2 if a lock cannot be read.
    """
    if not (checking or updating):
        return _write(given, model, output, settings)
    _refuse_idle_options(ctx)
    results = [_checked(path) for path in given or ("plan.lock",)]
    if updating:
        for result in results:
            result.update()
    _tell(results, style, updating=updating)
    sys.exit(0 if all(result.holds or (updating and result.now is not None) for result in results) else 1)


def _write(given: tuple[str, ...], model: str | None, output: str, settings: dict[str, Any]) -> None:
    if model is None:
        raise click.UsageError("give --model CONFIG to write a lock, or --check LOCK to check one")
    if len(given) > 1:
        raise click.UsageError(f"one plan for a lock, got {', '.join(given)}")
    plan = given[0] if given else "auto"
    load_plan(plan) if plan != "auto" else None  # a wrong plan is told before torch is imported
    to_file = output != "-"
    made = lock(plan, model, Path(output).parent if to_file else Path(), **settings)
    if not to_file:
        click.echo(made.text(), nl=False)
        return
    Path(output).write_text(made.text(), encoding="utf-8")
    click.echo(f"{output}: {made.plan} on {made.bound.architecture}; dtplan lock --check {output} checks it")


def _refuse_idle_options(ctx: click.Context) -> None:
    """A lock says itself what it was bound to."""
    names = ("model", "tp", "shard", "replicate", "sequence_parallel", "loss_parallel", "output")
    given = [name for name in names if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise click.UsageError(f"{option} is for writing a lock; --check and --update go by what the lock says")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """A lock beside the plan as it is today: bound, or why it cannot be."""

    path: str
    held: Lock
    now: Lock | None
    diff: Diff | None
    error: str = ""

    @property
    def holds(self) -> bool:
        return self.diff is not None and self.diff.equal

    def update(self) -> None:
        """Write the lock anew, unless it says the same already."""
        if self.now is not None and self.now.text() != self.held.text():
            Path(self.path).write_text(self.now.text(), encoding="utf-8")

    def text(self) -> str:
        """What a person is told."""
        if self.diff is None:
            return f"{self.path}: the plan cannot be bound any more\n{self.error}"
        return self.diff.as_text()

    def to_json(self) -> dict[str, Any]:
        """What a machine is told."""
        told = {"error": self.error} if self.diff is None else {"diff": self.diff.to_json()}
        return {"lock": self.path, "holds": self.holds, **told}


def _checked(path: str) -> _Checked:
    held = read_lock(path)
    try:
        bound = held.rebound(Path(path).parent)
    except FindingsError as error:
        return _Checked(path=path, held=held, now=None, diff=None, error=str(error))
    now = Lock(plan=held.plan, config=held.config, bound=bound)
    return _Checked(path=path, held=held, now=now, diff=compared(held, bound, path))


def _tell(results: list[_Checked], style: str, *, updating: bool) -> None:
    if style == "json":
        click.echo(json.dumps({"schema_version": 1, "locks": [result.to_json() for result in results]}, indent=2))
        return
    for result in results:
        if style == "github":
            if not result.holds:
                click.echo(as_annotation(result.text(), file=result.path, title="the plan does something else"))
        elif result.holds:
            click.echo(f"{result.path}: holds ({result.held.plan} on {result.held.bound.architecture})")
        else:
            click.echo(result.text())
            if result.now is not None:
                advice = "is written anew" if updating else f"if this is meant: dtplan lock --update {result.path}"
                click.echo(f"{result.path}: {advice}")
