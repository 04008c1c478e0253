"""From a plan's name or file to a ``Plan``: versions, `extends`, and every finding in one run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from dtplan._errors import Diagnostic, PlanError
from dtplan.plan import grammar, library
from dtplan.plan.lint import findings_of
from dtplan.plan.source import Source, compose, compose_text
from dtplan.plan.spec import VERSION, Fsdp, Plan, Rule, S
from dtplan.plan.syntax import Reading, entries, record, shown

_MAX_EXTENDS = 8


def load_plan(plan: str | Path | Plan) -> Plan:
    """Read a built-in plan by its name, or a plan file by its path.

    Raises:
        PlanError: with every finding of the run; the text gives ``file:line:column`` and a caret for each.
    """
    if isinstance(plan, Plan):
        return plan
    path, shown_as = library.locate(plan)
    source, node = compose(path, shown_as)
    return _finish(source, node, path)


def parse_plan(text: str, file: str = "<text>") -> Plan:
    """As ``load_plan``, from text in memory; `extends` finds built-in plans only."""
    source, node = compose_text(text, file)
    return _finish(source, node, None)


def _finish(source: Source, node: yaml.MappingNode, path: Path | None) -> Plan:
    plan = _read(source, node, path, seen=())
    if findings := findings_of(plan):
        raise PlanError(findings)
    return plan


def _read(source: Source, node: yaml.MappingNode, path: Path | None, seen: tuple[str, ...]) -> Plan:
    reading = Reading(source)
    _check_version(reading, node)
    values = record(grammar.PLAN_KEYS, lambda _reading, _node, **given: given, "").read(reading, node)
    if reading.findings or values is None:
        raise PlanError(reading.findings)
    default_name = Path(source.file).stem if path else "plan"
    own = _plan(values, values.pop("name", default_name), source.file)
    base_name = values.get("extends")
    if base_name is None:
        return own
    at = next(value for key, value in node.value if key.value == "extends")
    return _extend(own, _base(reading, at, base_name, path, (*seen, source.file)))


def _check_version(reading: Reading, node: yaml.MappingNode) -> None:
    """A wrong version is the only finding worth giving: the rest would be judged by the wrong grammar."""
    for key, value in entries(reading, node, "a mapping"):
        if key.value == "dtplan" and value.tag.endswith(":int") and value.value != str(VERSION):
            hint = f"this dtplan reads version {VERSION}; see CHANGELOG.md for how to bring a plan over"
            reading.add("DTP204", value, f"the plan is written for version {value.value}", hint)
            raise PlanError(reading.findings)


def _plan(values: dict[str, Any], name: str, file: str) -> Plan:
    units = {key: dataclasses.replace(unit, name=key) for key, unit in values.get("units", {}).items()}
    given = {key: values[key] for key in ("serves", "rules", "variants", "ties", "names", "te", "fsdp") if key in values}
    return Plan(
        name=name,
        units=units,
        rules=given.pop("rules", ()),
        sequence_parallel=values.get("residual", S(1)),
        files=(file,),
        **given,
    )


def _base(reading: Reading, node: yaml.Node, name: str, path: Path | None, seen: tuple[str, ...]) -> Plan:
    def refuse(message: str, hint: str = "") -> PlanError:
        reading.add("DTP303", node, message, hint)
        return PlanError(reading.findings)

    try:
        base_path, base_shown = library.locate(name, beside=path)
    except PlanError as error:
        raise refuse(f"`extends` names {shown(node)}: {error.diagnostics[0].message}", error.diagnostics[0].hint) from None
    if base_shown in seen or len(seen) > _MAX_EXTENDS:
        raise refuse(f"`extends` leads back to {base_shown}", " -> ".join((*seen, base_shown)))
    source, base_node = compose(base_path, base_shown)
    return _read(source, base_node, base_path, seen)


def _extend(own: Plan, base: Plan) -> Plan:
    """``base`` with what ``own`` says on top: rules replace those of the same path, mappings are joined."""
    replaced = {rule.path for rule in own.rules}
    rules = tuple(rule for rule in base.rules if rule.path not in replaced) + own.rules
    variants = tuple(
        dataclasses.replace(variant, rules=tuple(r for r in variant.rules if r.path not in replaced))
        for variant in base.variants
    )
    return Plan(
        name=own.name,
        serves=own.serves or base.serves,
        units={**base.units, **own.units},
        sequence_parallel=own.sequence_parallel if own.sequence_parallel != S(1) else base.sequence_parallel,
        rules=rules,
        variants=variants + own.variants,
        ties=base.ties + own.ties,
        names={**base.names, **own.names},
        te=own.te or base.te,
        fsdp=own.fsdp if own.fsdp != Fsdp() else base.fsdp,
        files=own.files + base.files,
    )


def rules_for(plan: Plan, config: Any) -> tuple[Rule, ...]:  # noqa: ANN401 - a config of any library
    """The rules that hold for ``config``: the plan's own and those of the variants whose ``when`` is met."""
    active = [variant for variant in plan.variants if holds(variant.when, config)]
    return plan.rules + tuple(rule for variant in active for rule in variant.rules)


def holds(when: Any, config: Any) -> bool:  # noqa: ANN401
    """Whether every field has its value in ``config``; a field that is missing counts as None."""
    return all(config_field(config, name) == value for name, value in when.items())


def config_field(config: Any, name: str) -> Any:  # noqa: ANN401
    """The value at the dotted ``name``, or None where a step is missing."""
    for step in name.split("."):
        config = config.get(step) if isinstance(config, dict) else getattr(config, step, None)
    return config


def check(plan: str | Path) -> tuple[Diagnostic, ...]:
    """Every finding about a plan file; empty when there is none."""
    try:
        load_plan(plan)
    except PlanError as error:
        return error.diagnostics
    return ()
