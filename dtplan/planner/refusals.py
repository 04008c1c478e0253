"""What binding refuses when all rules are laid over the model: each check gives its findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from dtplan._errors import Diagnostic, did_you_mean
from dtplan.plan.paths import Segments
from dtplan.plan.source import finding_at
from dtplan.plan.spec import Plan, Rule
from dtplan.planner.bound import BoundModule
from dtplan.planner.match import Alike
from dtplan.planner.placing import module_kind, named_tensors
from dtplan.planner.regions import Regions


def dead_rules(model: nn.Module, groups: Iterable[Alike], rules: Iterable[Rule]) -> Iterator[Diagnostic]:
    """Rules that name nothing, with the nearest real path."""
    groups = list(groups)
    hit = {rule.path for group in groups for rule in group.rules}
    hit |= {rule.path for group in groups for rules_ in group.tensor_rules.values() for rule in rules_}
    names = [n for n, _ in model.named_modules() if n] + [n for n, _ in model.named_parameters()]
    for rule in rules:
        if rule.path not in hit and not rule.optional:
            message = f"the rule `{rule.pattern}` names nothing in {type(model).__name__}"
            yield finding_at("DTP401", rule.at, message, nearest(rule.path, names))


def unruled(groups: Iterable[Alike], rule_of: Mapping[str, Rule | None], file: str) -> Iterator[Diagnostic]:
    """Modules that own parameters or buffers and have no rule, with their sizes in bytes."""
    for group in groups:
        if rule_of[group.pattern] is not None:
            continue
        missing = [(n, t) for n, t in named_tensors(group.module) if not group.tensor_rules.get(n)]
        if missing:
            owned = ", ".join(f"{n} {list(t.shape)}" for n, t in missing)
            size = sum(t.numel() * t.element_size() for _, t in missing) * len(group.names)
            message = f"no rule for `{group.pattern}` ({module_kind(group.module)}: {owned}; {size:,} bytes in all)"
            hint = f"add `{group.pattern}: replicate` to keep it whole on every rank, or a style that cuts it"
            yield Diagnostic(code="DTP403", file=file, message=message, hint=hint)


def split_ties(ties: Iterable[tuple[str, ...]], bound: Iterable[BoundModule], file: str) -> Iterator[Diagnostic]:
    """Tied parameters that two rules place differently."""
    where = {full_name(name, t.name): (m, t) for m in bound for name in m.names for t in m.tensors}
    for tie in ties:
        placed = [(name, *where[name]) for name in tie if name in where]
        if len({tensor.placement for _, _, tensor in placed}) > 1:
            spelled = " and ".join(f"{name} is {tensor.placement} ({module.rule})" for name, module, tensor in placed)
            message = f"{' and '.join(tie)} are one tensor, but {spelled}"
            hint = "give both ends rules that place them alike: `vocab` for the embedding, `colwise` for the head"
            yield Diagnostic(code="DTP409", file=file, message=message, hint=hint)


def mixed_regions(regions: Regions) -> Iterator[Diagnostic]:
    """Regions of which the degree leaves a part whole and cuts another."""
    for pattern, rule in regions.mixed():
        message = f"{pattern}: some of its layers stay whole at this degree and others are cut"
        hint = "give their units the same `indivisible`, or choose another degree"
        yield finding_at("DTP405", rule.at, message, hint)


def uncut_stream(plan: Plan, *, sequence_parallel: bool) -> Iterator[Diagnostic]:
    """Sequence parallelism where the plan says that the stream stays whole."""
    if sequence_parallel and not plan.cuts_stream:
        message = "sequence_parallel is on, and the plan's residual stream stays whole (`sequence_parallel: R`)"
        yield Diagnostic(code="DTP416", file=plan.files[0], message=message, hint="turn sequence_parallel off")


def nearest(path: Segments, names: Iterable[str]) -> str:
    """The real path that is closest to a dead one, with the plan's `*` put back."""
    as_patterns = {".".join("*" if s.isdecimal() and "*" in path else s for s in name.split(".")) for name in names}
    hint = did_you_mean(".".join(path), sorted(as_patterns))
    return hint or "compare with `dtplan show`, or mark the rule `optional: true`"


def full_name(prefix: str, name: str) -> str:
    """A tensor's name under its module's."""
    return f"{prefix}.{name}" if prefix else name
