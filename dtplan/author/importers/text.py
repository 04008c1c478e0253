"""An imported plan as YAML: rules in the model's order, grouped by layer, alike ones in braces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtplan.author.importers.assemble import Imported

_WIDE = 100


def written(plan: Imported) -> str:
    """The text of a plan file."""
    lines = [
        f"# Imported from {plan.source} for {plan.serves}. What the source does not name stays whole.",
        "# The source has no sequence parallelism: with this plan, that switch changes nothing.",
        *(f"# The source's rule `{path}` names nothing in this model." for path in plan.dead),
        "dtplan: 1",
        f"serves: [{plan.serves}]",
    ]
    if plan.units:
        lines.append("units: {" + ", ".join(f"{name}: {flow(said)}" for name, said in plan.units.items()) + "}")
    lines += ["rules:", *_rules(plan.rules, plan.undecided)]
    if plan.ties:
        lines.append("ties: " + flow([list(tie) for tie in plan.ties]))
    if plan.fsdp_units:
        lines.append("fsdp: " + flow({"units": list(plan.fsdp_units)}))
    return "\n".join(lines) + "\n"


def flow(value: Any) -> str:
    """A value in YAML's flow form."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return f'"{text}"' if text[:1] in "*{[&!%@`" else text


def _rules(rules: Mapping[str, dict[str, Any]], undecided: Mapping[str, str]) -> Iterator[str]:
    merged = _merged(rules)
    heads = dict.fromkeys(_head(path) for path in merged)
    for head in heads:
        inside = {path: rule for path, rule in merged.items() if _head(path) == head}
        if head is None:
            yield from _lines(inside, "  ", undecided)
        else:
            yield f"  {_key(head)}:"
            below = {("." if path == head else path.removeprefix(head + ".")): rule for path, rule in inside.items()}
            why = {path.removeprefix(head + "."): text for path, text in undecided.items()}
            yield from _lines(below, "    ", why)


def _head(path: str) -> str | None:
    """The layer that a path lies in: up to its first ``*``."""
    before, star, _after = path.partition(".*")
    return before + star if star else None


def _lines(rules: Mapping[str, dict[str, Any]], indent: str, undecided: Mapping[str, str]) -> Iterator[str]:
    width = max((len(_key(path)) for path in rules), default=0) + 2
    for path, rule in rules.items():
        said = rule["style"] if list(rule) == ["style"] else flow(rule)
        if path in undecided:
            yield f"{indent}# no words for this: {undecided[path]}"
        yield f"{indent}{_key(path) + ':':<{min(width, 40)}}{said}" if len(path) < 40 else f"{indent}{_key(path)}: {said}"


def _key(path: str) -> str:
    return f'"{path}"' if path[:1] in "*{" else path


def _merged(rules: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Siblings under the same rule as one path with braces."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, rule in rules.items():
        parent, _, last = path.rpartition(".")
        groups.setdefault((parent, flow(rule)), []).append(last)
    merged = {}
    for (parent, _), names in groups.items():
        last = names[0] if len(names) == 1 else _braces(names)
        first = f"{parent}.{names[0]}" if parent else names[0]
        merged[f"{parent}.{last}" if parent else last] = rules[first]
    return merged


def _braces(names: list[str]) -> str:
    """``{q,k,v}_proj`` for names with a common end, else all of them in braces."""
    end = ""
    while all(len(name) > len(end) + 1 and name.endswith(names[0][len(names[0]) - len(end) - 1 :]) for name in names):
        end = names[0][len(names[0]) - len(end) - 1 :]
    cut = end.find("_")
    end = end[cut:] if cut >= 0 else ""
    return "{" + ",".join(name.removesuffix(end) for name in names) + "}" + end
