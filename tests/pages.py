"""Pages of the documentation whose commands are run: every console block, in order, in one folder."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from click.testing import CliRunner

from dtplan._errors import DtplanError
from dtplan.cli import cli

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps(page: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Each command with what the page says it prints; blocks with a name (```yaml mine.yaml) are written in passing."""
    for kind, name, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        if name:
            (folder / name).write_text(text, encoding="utf-8")
        if kind == "console":
            for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = step.partition("\n")
                yield command, output


def check(command: str, output: str, folder: Path) -> None:
    """Run a command in ``folder``, the current one. ``...`` in ``output`` is anything, and `# exit N` the status."""
    command, _, comment = command.partition(" # exit ")
    wanted = int(comment or 0)
    if command.startswith("dtplan ") and not set("|>&;") & set(command):
        result = CliRunner().invoke(cli, command.split()[1:])
        found, status = result.output, result.exit_code
        if isinstance(result.exception, DtplanError):  # as `main` tells it
            found, status = f"{found}error: {result.exception}\n", result.exception.exit_code
    else:
        done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S602
        found, status = done.stdout + done.stderr, done.returncode
    assert status == wanted, f"{command}: exit {status}\n{found}"
    pattern = ".*?".join(re.escape(part) for part in output.split("..."))
    assert re.fullmatch(pattern, found, re.DOTALL), f"{command} printed\n{found}\nand the page says\n{output}"
