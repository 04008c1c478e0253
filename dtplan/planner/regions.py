"""Where a module lies: the region of cut work around it, the block whose input it reads, its siblings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dtplan.plan.spec import RESIDUAL, R, Rule
from dtplan.planner.bound import BoundUnit
from dtplan.planner.placing import CUTS
from dtplan.planner.units import is_whole


def parent_of(pattern: str) -> str:
    """The module that a module lies in."""
    return pattern.rpartition(".")[0]


class Regions:
    """Answers from the rule of every module pattern; ``tp`` decides which cut rules stay whole."""

    def __init__(self, rule_of: Mapping[str, Rule | None], units: Mapping[str, BoundUnit], tp: int) -> None:
        self._rule_of, self._units, self._tp = rule_of, units, tp

    def around(self, pattern: str) -> str | None:
        """The nearest module above whose rule prepares an input for cut work below it."""
        while pattern:
            pattern = parent_of(pattern)
            rule = self._rule_of.get(pattern)
            if rule is None or rule.style == "replicate":
                continue
            if rule.parallel_residual or any(move.dst == R for _, move in rule.inputs):
                return pattern
        return None

    def block_of(self, pattern: str, rule: Rule | None) -> str | None:
        """The parallel-residual block whose input this norm reads."""
        region = self.around(pattern)
        above = None if region is None else self._rule_of[region]
        if rule is None or rule.style != "norm" or above is None or not above.parallel_residual:
            return None
        return region

    def is_whole(self, rule: Rule | None) -> bool:
        """Whether a rule that cuts leaves its module whole, because the degree does not divide its unit."""
        units = () if rule is None else (rule.unit, *(section.unit for section in rule.sections))
        return any(is_whole(self._units.get(unit), self._tp) for unit in units if unit is not None)

    def lies_in_whole(self, pattern: str) -> bool:
        """Whether the region around a module stays whole, so that nothing in it is a part of the work."""
        region = self.around(pattern)
        return region is not None and self.stays_whole(region)

    def stays_whole(self, pattern: str) -> bool:
        """Whether all cut work below stays whole, so that every rank does the same with the region's input."""
        below = self.cut_rules_below(pattern)
        return bool(below) and all(self.is_whole(rule) for rule in below)

    def cut_rules_below(self, pattern: str) -> list[Rule]:
        """The rules with a style that cuts, below a module."""
        under = f"{pattern}."
        rules = [rule for name, rule in self._rule_of.items() if name.startswith(under) and rule is not None]
        return [rule for rule in rules if rule.style in CUTS]

    def has_cut_siblings(self, pattern: str) -> bool:
        """Whether a column-parallel and a row-parallel layer lie beside a module."""
        parent = parent_of(pattern)
        beside = [rule for name, rule in self._rule_of.items() if parent_of(name) == parent and name != pattern]
        styles = {rule.style for rule in beside if rule is not None and not self.is_whole(rule)}
        return bool(parent) and {"colwise", "rowwise"} <= styles

    def reads_stream(self, pattern: str) -> bool:
        """Whether the module around is a block on the residual stream: norms may lie beside cut layers in it."""
        rule = self._rule_of.get(pattern.rpartition(".")[0])
        return rule is not None and any(move.dst == RESIDUAL for _, move in rule.inputs)

    def mixed(self) -> Iterator[tuple[str, Rule]]:
        """Regions in which some layers stay whole and others are cut, with a rule that stays whole."""
        for pattern, rule in self._rule_of.items():
            if rule is not None and (rule.parallel_residual or any(move.dst == R for _, move in rule.inputs)):
                wholes = [r for r in self.cut_rules_below(pattern) if self.is_whole(r)]
                if wholes and len(wholes) < len(self.cut_rules_below(pattern)):
                    yield pattern, wholes[0]
