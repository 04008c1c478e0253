"""Commands that read plans alone: list, lint, schema, explain. They import no torch."""

from __future__ import annotations

import json
import sys

import click

from dtplan._errors import Diagnostic
from dtplan.cli.completion import CODE, PLAN
from dtplan.cli.options import as_annotation, echo_lines
from dtplan.plan.codes import CODES
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import check, load_plan
from dtplan.plan.schema import schema_text


@click.command("list")
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


@click.command()
@click.argument("plans", nargs=-1, required=True, metavar="PLAN...", type=PLAN)
@click.option("--format", "style", type=click.Choice(["text", "json", "github"]), default="text", show_default=True)
def lint(plans: tuple[str, ...], style: str) -> None:
    """Check plan files (or built-in plans by name); every finding has a place and a code."""
    found = {plan: check(plan) for plan in plans}
    findings = [finding for each in found.values() for finding in each]
    if style == "json":
        click.echo(json.dumps({"schema_version": 1, "findings": [_as_json(f) for f in findings]}, indent=2))
    elif style == "github":
        echo_lines(_as_github(f) for f in findings)
    else:
        echo_lines(f.render() for f in findings)
        clean = [plan for plan, each in found.items() if not each]
        echo_lines(f"{plan}: no findings" for plan in clean)
    sys.exit(1 if findings else 0)


@click.command()
def schema() -> None:
    """The JSON Schema of plan files, for editors."""
    click.echo(schema_text(), nl=False)


@click.command()
@click.argument("code", type=CODE)
def explain(code: str) -> None:
    """What a diagnostic code means."""
    if code.upper() not in CODES:
        raise click.UsageError(f"there is no code {code}; codes are {', '.join(CODES)}")
    click.echo(f"{code.upper()}: {CODES[code.upper()]}")


def _as_json(finding: Diagnostic) -> dict[str, object]:
    keys = ("code", "file", "line", "column", "message", "hint")
    return {key: getattr(finding, key) for key in keys}


def _as_github(finding: Diagnostic) -> str:
    text = f"{finding.message} ({finding.hint})" if finding.hint else finding.message
    return as_annotation(text, file=finding.file, line=finding.line, column=finding.column, title=finding.code)
