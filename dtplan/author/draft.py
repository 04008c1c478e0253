"""A drafted plan as data, in the words of the plan language, with the comments that belong to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Keys = Mapping[str, Any]
"""Keys of a rule as they stand in a file: ``{"style": "rowwise", "unit": "head", "output": "residual"}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleDraft:
    """One rule. ``path`` is whole and dotted, with ``*`` for the numbers of layers."""

    path: str
    keys: Keys
    notes: tuple[str, ...] = ()
    """Comments in lines above it."""
    remark: str = ""
    """A comment behind it."""
    choices: tuple[Keys, ...] = ()
    """Where it is undecided: what may stand here if every rank does all of it, the likeliest first."""

    @property
    def undecided(self) -> bool:
        """Whether a person has to replace it."""
        return self.keys.get("style") == "todo"

    def chosen(self, number: int, note: str) -> RuleDraft:
        """With one of its choices, or the last, in place of `todo`, and ``note``."""
        if not self.undecided or not self.choices:
            return self
        keys = self.choices[min(number, len(self.choices) - 1)]
        return dataclasses.replace(self, keys=keys, notes=(*self.notes, note), choices=())


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantDraft:
    """Rules that hold only where config fields have the values of ``when``."""

    when: Mapping[str, Any]
    rules: tuple[RuleDraft, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDraft:
    """A whole plan, in the order in which it is written."""

    name: str
    serves: tuple[str, ...] = ()
    units: Mapping[str, Any] = field(default_factory=dict)
    """Name -> config field, fields, or ``{"field": ..., "indivisible": ...}``."""
    unit_notes: Mapping[str, str] = field(default_factory=dict)
    """Comments behind units."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rules: tuple[RuleDraft, ...] = ()
    variants: tuple[VariantDraft, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    te: Mapping[str, tuple[Keys, ...]] = field(default_factory=dict)
    fsdp: tuple[str, ...] = ()
    """Patterns of the modules that FSDP2 wraps one by one."""
    cuts_stream: bool = True
    """Whether sequence parallelism is possible."""
    comments: tuple[str, ...] = ()
    """Lines on top."""

    @property
    def undecided(self) -> tuple[RuleDraft, ...]:
        """The rules that a person has to replace before lint takes the plan."""
        every = (*self.rules, *(rule for variant in self.variants for rule in variant.rules))
        return tuple(rule for rule in every if rule.undecided)
