"""dtplan completion, and what arguments complete to. A shell asks on every tab, so nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from dtplan.plan.codes import CODES
from dtplan.plan.library import builtin_plans

SHELLS = ("bash", "zsh", "fish")
_WHERE = {
    "bash": '# in ~/.bashrc:  eval "$(dtplan completion bash)"',
    "zsh": '# in ~/.zshrc:  eval "$(dtplan completion zsh)"',
    "fish": "# in ~/.config/fish/completions:  dtplan completion fish > dtplan.fish",
}


class _Text(click.ParamType[str, str]):
    """Text that a shell completes."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it is."""
        return value


class PlanName(_Text):
    """A built-in plan's name, or a plan file; ``suffixes`` are those of files that will do."""

    name = "plan"

    def __init__(self, *suffixes: str) -> None:
        self.suffixes = suffixes or (".yaml", ".yml")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names, and plan files where one stands; where there are none, whatever the shell finds by itself."""
        names = [name for name in builtin_plans() if name.startswith(incomplete)]
        found = [*names, *_files(incomplete, self.suffixes)]
        return [CompletionItem(word) for word in found] or [CompletionItem(incomplete, type="file")]


class ModelName(_Text):
    """A model folder, a config.json, or a name that transformers knows."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Files and folders, by the shell itself."""
        return [CompletionItem(incomplete, type="file")]


class Code(_Text):
    """A diagnostic code."""

    name = "code"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Codes, with what they mean."""
        found = [code for code in CODES if code.startswith(incomplete.upper())]
        return [CompletionItem(code, help=CODES[code]) for code in found]


PLAN, PLAN_OR_BOUND, MODEL, CODE = PlanName(), PlanName(".yaml", ".yml", ".json", ".lock"), ModelName(), Code()


def _files(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    """The files in one folder that begin so and end in one of ``suffixes``; none that are hidden."""
    folder, slash, start = incomplete.rpartition("/")
    place = Path(folder + slash or ".")
    if not place.is_dir():
        return []
    names = sorted(i.name for i in place.iterdir() if i.suffix in suffixes and not i.name.startswith("."))
    return [folder + slash + name for name in names if name.startswith(start)]


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, /, *, shell: str) -> None:
    """The script that completes commands, options, plan names, files and codes in SHELL.

    In bash: eval "$(dtplan completion bash)".
    """
    kind: Any = get_completion_class(shell)
    root = ctx.find_root().command
    click.echo(_WHERE[shell])
    click.echo(kind(root, {}, "dtplan", "_DTPLAN_COMPLETE").source())
