"""The plan language: what a rule may say about a path, and how paths nest."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import yaml

from dtplan._errors import Diagnostic, PlanError
from dtplan.plan import paths
from dtplan.plan.layout_grammar import per_value
from dtplan.plan.spec import Rule, Section
from dtplan.plan.syntax import (
    NUMBER,
    SWITCH,
    TEXT,
    Key,
    Kind,
    Reading,
    choice,
    entries,
    list_of,
    map_of,
    one_of,
    record,
    then,
)

MAX_PATHS = 4096
"""Paths that a plan's patterns may stand for, all together."""

STYLES: dict[str, str] = {
    "colwise": "a linear layer cut along its output features (an embedding along its features)",
    "rowwise": "a linear layer cut along its input features; its outputs are summed, its bias is added once",
    "vocab": "an embedding cut along its rows; looked up where the row lives, then summed",
    "norm": "whole parameters; under sequence parallelism their gradient is summed over ranks",
    "sharded_norm": "a norm over a dim that is cut: the sum of squares is taken over all ranks",
    "replicate": "whole parameters and buffers, whole inputs and outputs",
    "todo": "not decided yet; lint rejects it",
}
STYLE_ALIASES = {
    "ColwiseParallel": "colwise",
    "RowwiseParallel": "rowwise",
    "SequenceParallel": "norm",
    "sequence": "norm",
    "sequence_parallel": "norm",
    "ReplicateParallel": "replicate",
    "NoParallel": "replicate",
}


def expanded(reading: Reading, node: yaml.Node, pattern: str) -> tuple[paths.Segments, ...]:
    """The paths that a pattern stands for; none after noting a finding.

    Raises:
        PlanError: the file's patterns stand for more than 4096 paths.
    """
    try:
        found = paths.expand(pattern)
    except paths.PatternError as error:
        reading.add("DTP206", node, str(error), "write one name, `*` or {a,b} for each segment between dots")
        return ()
    reading.num_paths += len(found)
    if reading.num_paths > MAX_PATHS:
        message, hint = (
            f"the patterns stand for more than {MAX_PATHS} paths",
            "write `*` for repeated modules",
        )
        last = Diagnostic(code="DTP107", file=reading.source.file, message=message, hint=hint)
        raise PlanError([*reading.findings, last])
    return found


def _style(_reading: Reading, _node: yaml.Node, text: str) -> str:
    return STYLE_ALIASES.get(text, text)


STYLE: Kind[str] = then(choice(tuple(STYLES), also=tuple(STYLE_ALIASES)), _style)


def _section(reading: Reading, node: yaml.Node, **values: Any) -> Section:
    section = Section(**values)
    if (section.unit is None) == (section.count is None):
        message = "a section has either a `unit` or a `count`"
        reading.add("DTP304", node, message, "write {unit: head}, or {count: 2, whole: true}")
    elif section.count is not None and not section.whole:
        message = "a section with a `count` is cut by no degree"
        reading.add("DTP304", node, message, "add `whole: true`, or name a `unit`")
    elif section.grad is not None and not section.whole:
        message = f"`grad: {section.grad}` of a section that is cut"
        hint = "what is cut has no partial gradient: add `whole: true`, or drop `grad`"
        reading.add("DTP304", node, message, hint)
    return section


SECTION: Kind[Section] = one_of(
    "a unit or {unit: ..., whole: true, grad: sum}",
    text=then(TEXT, lambda _reading, _node, text: Section(unit=text)),
    keys=record(
        {
            "unit": Key(TEXT, "the unit in which this section is cut"),
            "count": Key(NUMBER, "the number of its units, where no config field holds it"),
            "width": Key(TEXT, "the config field that holds a unit's width (default: alike for all sections)"),
            "whole": Key(SWITCH, "every rank keeps the whole section"),
            "grad": Key(
                choice(("sum", "complete")),
                "of a whole section: `sum`, each rank's gradient is a partial sum, so they are summed; `complete`, "
                "every rank has all of it",
            ),
        },
        _section,
        "One section of a fused dim.",
    ),
)


def _per_unit(_reading: Reading, _node: yaml.Node, numbers: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(numbers.items()))


LOCALIZE_PER: Kind[tuple[tuple[str, str], ...]] = then(map_of(TEXT), _per_unit)

RULE_KEYS: dict[str, Key] = {
    "style": Key(STYLE, "the named style: " + "; ".join(f"{name}: {doc}" for name, doc in STYLES.items())),
    "shard": Key(NUMBER, "the dim along which this parameter or buffer is cut"),
    "sections": Key(list_of(SECTION, at_least=1), "the parts of a fused dim, each cut by itself"),
    "unit": Key(TEXT, "the unit in which the dim is cut; the degree must divide the number of units"),
    "grad": Key(
        choice(("sum", "complete")),
        "of a whole parameter among cut ones: `sum`, each rank's gradient is a partial sum, so they are "
        "summed; `complete`, every rank has all of it",
    ),
    "once": Key(SWITCH, "a whole parameter that is added to an unreduced sum: one rank adds it"),
    "like": Key(
        choice(("Embedding", "Linear")),
        "the class whose style applies to a subclass: an Embedding that does more, row by row (Gemma), with `vocab`; a "
        "Linear that is written anew (Falcon), with `colwise` and `rowwise`",
    ),
    "input": Key(per_value("input"), "the layouts that the module needs its inputs in"),
    "output": Key(per_value("output"), "the layouts that the module hands its outputs out in"),
    "parallel_residual": Key(
        TEXT,
        "the input that the block adds to the unreduced sum of its branches: one forward reduction for the "
        "block; the norms that read it are given the whole value, and share one gradient sum",
    ),
    "localize": Key(
        list_of(TEXT, at_least=1),
        "whole numbers to divide by the degree: attributes, or `config.field` in the module's own copy of the config",
    ),
    "localize_per": Key(
        LOCALIZE_PER,
        "whole numbers of the module that count for each unit (q heads of a kv head), and the unit: where several "
        "ranks share a unit (`replicate_kv`), they are divided by the number of those ranks",
    ),
    "reads": Key(
        list_of(TEXT, at_least=1),
        "modules below whose parameters this module's forward reads without calling them",
    ),
    "below": Key(SWITCH, "the rule holds for every module below, too; with `replicate` only"),
    "optional": Key(SWITCH, "the rule may name nothing"),
    "override": Key(SWITCH, "the rule wins where another one names the same path"),
}


def _styled(reading: Reading, node: yaml.Node, style: str) -> Rule:
    return Rule(path=(), style=style, at=reading.source.place(node))


def _rule(reading: Reading, node: yaml.Node, **values: Any) -> Rule:
    inputs, outputs = values.pop("input", ()), values.pop("output", ())
    return Rule(path=(), inputs=inputs, outputs=outputs, at=reading.source.place(node), **values)


_RECORD = record(
    RULE_KEYS,
    _rule,
    "What happens to one path.",
    unknown=f"keys of a rule: {', '.join(RULE_KEYS)}; a path below it is a key beside it, written with dots",
)
RULE: Kind[Rule] = one_of(
    "a style or a mapping with the keys of a rule",
    text=then(STYLE, _styled, {"enum": [*STYLES, *STYLE_ALIASES], "description": RULE_KEYS["style"].doc}),
    keys=dataclasses.replace(_RECORD, schema=_RECORD.schema | {"minProperties": 1}),
)


def _rules(reading: Reading, node: yaml.Node) -> tuple[Rule, ...]:
    return tuple(_flatten(reading, node, ""))


def _flatten(reading: Reading, node: yaml.Node, prefix: str) -> list[Rule]:
    rules: list[Rule] = []
    for key, value in entries(reading, node, "a mapping from paths to rules"):
        path = prefix.rstrip(".") if key.value == "." else prefix + key.value
        if isinstance(value, yaml.MappingNode) and not _is_rule(value):
            rules += _flatten(reading, value, path + ".")
        elif prefix and _is_misspelt_style(key.value, value):
            reading.add("DTP201", key, f"unknown key `{key.value}`", "did you mean 'style'?")
        else:
            rules += _rules_at(reading, key, value, expanded(reading, key, path))
    return rules


def _is_rule(node: yaml.MappingNode) -> bool:
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    return not node.value or any(key in RULE_KEYS for key in keys)


def _is_misspelt_style(key: str, value: yaml.Node) -> bool:
    """Whether a group is a rule but for a slip: {stile: colwise} would name a module `stile`."""
    is_style = isinstance(value, yaml.ScalarNode) and value.value in (*STYLES, *STYLE_ALIASES)
    return is_style and bool(difflib.get_close_matches(key.lower(), ["style"], cutoff=0.75))


def _rules_at(reading: Reading, key: yaml.Node, node: yaml.Node, patterns: tuple[paths.Segments, ...]) -> list[Rule]:
    before = len(reading.findings)
    rule = RULE.read(reading, node)
    if rule is None or len(reading.findings) > before:
        return []
    at = reading.source.place(key)
    if rule == Rule(path=(), optional=rule.optional, override=rule.override, at=rule.at):
        hint = "give a style, as `replicate` to keep it whole on every rank"
        reading.add("DTP304", key, "the rule says nothing", hint)
        return []
    return [dataclasses.replace(rule, path=pattern, at=at) for pattern in patterns]


RULES: Kind[tuple[Rule, ...]] = Kind("a mapping from paths to rules", _rules, {"$ref": "#/$defs/rules"})
"""The schema refers to ``RULES_SCHEMA``, which nests in itself."""
RULES_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Paths to rules; `.` is the path itself, a nested mapping continues the path.",
    "additionalProperties": {"anyOf": [RULE.schema, {"$ref": "#/$defs/rules", "minProperties": 1}]},
}
