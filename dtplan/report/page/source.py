"""The plan's own text beside what it means: each line with the modules that its rules are at work on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtplan.plan.library import builtin_plans
from dtplan.plan.spec import Plan
from dtplan.report.page.tree import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A row of the tree, under a rule."""

    key: int
    path: str
    count: int
    layouts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a plan's file, counted from 1."""

    number: int
    text: str
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A plan's file, under the name that rules' places have."""

    number: int
    name: str
    lines: tuple[Line, ...]

    def anchor(self, line: int) -> str:
        """The id of a line in the page."""
        return f"p{self.number}-{line}"


def files(plan: Plan | None, rows: Sequence[Row]) -> tuple[File, ...]:
    """The files that ``plan`` was read from, those that still say what was read."""
    uses: dict[tuple[str, int], list[Use]] = {}
    for row in rows:
        if row.module is not None:
            file, line, _ = row.module.rule.rsplit(":", 2)
            layouts = dict.fromkeys(str(t.placement) for t in row.module.tensors if not t.buffer)
            use = Use(key=row.key, path=row.path, count=row.count, layouts=tuple(layouts))
            uses.setdefault((file, int(line)), []).append(use)
    return tuple(_files(plan, uses)) if plan is not None else ()


def _files(plan: Plan, uses: dict[tuple[str, int], list[Use]]) -> Iterator[File]:
    for number, name in enumerate(dict.fromkeys(plan.files)):
        said = {rule.at.line: rule.at.source for rule in plan.rules if rule.at.file == name}
        for text in _texts(name):
            if all(text[line - 1 : line] == [source] for line, source in said.items()):
                lines = [
                    Line(number=at, text=line, uses=tuple(uses.get((name, at), ()))) for at, line in enumerate(text, 1)
                ]
                yield File(number=number, name=name, lines=tuple(lines))
                break


def _texts(name: str) -> Iterator[list[str]]:
    """What the name may stand for: a file, or a built-in plan of this name."""
    for path in (Path(name), builtin_plans().get(name.removesuffix(".yaml"))):
        if path is not None and path.is_file():
            yield path.read_text(encoding="utf-8").splitlines()
