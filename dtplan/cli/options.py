"""Options that several commands share, and the reading of their values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from dtplan.cli.completion import MODEL

Command = TypeVar("Command", bound=Callable[..., Any])
_COUNT = click.IntRange(min=1)
DTYPES = ("bfloat16", "float16", "float32", "float64")

a_model = click.option(
    "--model", required=True, type=MODEL, help="A model folder, a config.json, or a name that transformers knows."
)
_DEGREES = (
    click.option("--tp", default=1, show_default=True, type=_COUNT, help="Tensor parallel degree."),
    click.option("--shard", default=1, show_default=True, type=_COUNT, help="FSDP2 shard degree."),
    click.option("--replicate", default=1, show_default=True, type=_COUNT, help="Replicas."),
    click.option("--sequence-parallel", is_flag=True, help="Cut the residual stream along the sequence."),
    click.option("--loss-parallel", is_flag=True, help="Keep the logits cut along the vocabulary."),
)
_STEP = (
    click.option("--batch", default=1, show_default=True, type=_COUNT, help="Sequences of a batch."),
    click.option("--seq", default=4096, show_default=True, type=_COUNT, help="Tokens of a sequence."),
    click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(DTYPES), help="Of activations."),
)


def bound_at(command: Command) -> Command:
    """The degrees and switches with which a plan is bound."""
    return _with(_DEGREES, command)


def of_a_step(command: Command) -> Command:
    """The batch for which collectives and bytes are counted."""
    return _with(_STEP, command)


def _with(options: Iterable[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def parse_degrees(text: str) -> list[int]:
    """``2,4,8`` as numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is no list of degrees such as 2,4,8", param_hint="--tp")
    return [int(part) for part in parts]


def parse_batch(text: str | None) -> tuple[int, int] | None:
    """``1x4`` as numbers."""
    if text is None:
        return None
    rows, _, tokens = text.partition("x")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in (rows, tokens)):
        raise click.BadParameter(f"{text!r} is no batch such as 1x4", param_hint="--batch")
    return int(rows), int(tokens)


def parse_sizes(sets: tuple[str, ...]) -> dict[str, Any]:
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


def echo_lines(lines: Iterable[str]) -> None:
    """Each on a line of its own."""
    for line in lines:
        click.echo(line)


def as_annotation(message: str, *, file: str, title: str, line: int = 0, column: int = 0) -> str:
    """A finding as GitHub Actions shows it beside the line: one line, with what would end it escaped.

    The escapes are those of the runner's workflow commands: %, carriage return and newline; in properties : and , too.
    """
    place = {"file": file} | ({"line": str(line), "col": str(column)} if line else {}) | {"title": title}
    properties = ",".join(f"{key}={_escaped(value, more=True)}" for key, value in place.items())
    return f"::error {properties}::{_escaped(message)}"


def _escaped(text: str, *, more: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if more else text
