"""What a source says of one module or parameter, in the words of the plan language but without units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtplan._errors import DtplanError


class ImportPlanError(DtplanError, ValueError):
    """A plan of another system cannot be read as a plan for this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One statement of a source.

    ``rule`` holds keys of a rule. ``parts``: equal parts one after another in the dim that is cut, each cut by itself;
    ``sizes``: the same for parts that are not equal. ``why_not``: what the plan language has no words for; such a rule
    becomes a ``todo``.
    """

    rule: Mapping[str, Any] = field(default_factory=dict)
    parts: int = 1
    sizes: tuple[int, ...] = ()
    why_not: str = ""


def colwise(*, gather: bool = False, parts: int = 1) -> Told:
    """A linear layer cut along its outputs, whose input's gradient it sums by itself."""
    return Told(rule={"style": "colwise", "input": "sum"} | ({"output": "gather"} if gather else {}), parts=parts)


def rowwise(*, split: bool = False) -> Told:
    """A linear layer cut along its inputs; ``split``: the input arrives whole."""
    return Told(rule={"style": "rowwise"} | ({"input": "slice"} if split else {}) | {"output": "sum"})


VOCAB = Told(rule={"style": "vocab", "output": "sum"})
EMBEDDING_COLWISE = Told(rule={"style": "colwise", "output": "gather"})
WHOLE = Told(rule={"style": "replicate"})
WHOLE_SUMMED = Told(rule={"style": "replicate", "grad": "sum"})
REDUCED = Told(rule={"output": "sum"})


def cannot(why: str) -> Told:
    """Something that the plan language cannot say."""
    return Told(rule={"style": "todo"}, why_not=why)
