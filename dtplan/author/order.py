"""The order in which rules are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from dtplan.author.draft import RuleDraft


def gathered(rules: Sequence[RuleDraft]) -> list[RuleDraft]:
    """Within one module, rules that say the same come one after another."""
    found: list[RuleDraft] = []
    for rule in rules:
        owner = rule.path.rpartition(".")[0]
        alike = [i for i, r in enumerate(found) if r.path.rpartition(".")[0] == owner and r.keys == rule.keys]
        found.insert(alike[-1] + 1 if alike and owner and not rule.undecided else len(found), rule)
    return found


def below(rules: Sequence[RuleDraft], prefix: str) -> Iterator[RuleDraft]:
    """``rules`` with their paths below ``prefix``."""
    for rule in rules:
        yield dataclasses.replace(rule, path=f"{prefix}.{rule.path}" if rule.path else prefix)
