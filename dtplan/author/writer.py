"""From a draft to YAML as a person would write it: rules aligned, alike ones folded, comments where they belong."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dtplan.author.draft import PlanDraft, RuleDraft

WIDTH = 120
_WIDEST_KEY = 48
_WIDEST_BRACES = 26
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./*]*(\(-?[0-9]+\))?")
_SWITCHES = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def plan_text(draft: PlanDraft, *, schema: str = "plan.schema.json") -> str:
    """The plan as YAML, with a newline at the end.

    ``schema`` is where an editor finds the JSON Schema that ``dtplan schema`` prints: an address or a path beside
    the plan.
    """
    lines = [f"# yaml-language-server: $schema={schema}"]
    todo = [f"{undecided_rules(draft)} `todo`: what was seen and what can be chosen stands above."]
    comments = [*draft.comments[:1], *(todo if draft.undecided else ()), *draft.comments[1:]]
    lines += [one for line in comments for one in _comment(line, "")]
    lines += ["dtplan: 1", f"name: {_scalar(draft.name)}"]
    if draft.serves:
        lines.append(f"serves: {_flow(draft.serves)}")
    if draft.units:
        lines += ["units:", *_units(draft)]
    lines.append(f"residual: {{sequence_parallel: {'S(1)' if draft.cuts_stream else 'R'}, otherwise: R}}")
    if draft.names:
        lines += ["names:", *(f"  {_key(name)}: {_flow(others)}" for name, others in draft.names.items())]
    lines += ["rules:", *_rules(draft.rules, 2)]
    if draft.variants:
        lines.append("variants:")
        for variant in draft.variants:
            lines += [f"  - when: {_flow(variant.when)}", "    rules:", *_rules(variant.rules, 6)]
    if draft.ties:
        lines.append(f"ties: {_flow(draft.ties)}")
    if draft.te:
        lines += ["te:", *_te(draft)]
    if draft.fsdp:
        lines.append(f"fsdp: {{units: {_flow(draft.fsdp)}}}")
    return "\n".join(lines) + "\n"


def undecided_rules(draft: PlanDraft) -> str:
    """`2 rules are`."""
    count = len(draft.undecided)
    return "1 rule is" if count == 1 else f"{count} rules are"


# ------------------------------------------------------------------------------------------------------------ rules


def _rules(rules: Sequence[RuleDraft], indent: int) -> list[str]:
    entries = list(_nested(folded(rules)))
    lengths = [2 * depth + len(_key(key)) for depth, key, _ in entries]
    column = max((length for length in lengths if length <= _WIDEST_KEY), default=0) + 2
    lines: list[str] = []
    for depth, key, rule in entries:
        spaces = " " * (indent + 2 * depth)
        if rule is None:
            lines.append(f"{spaces}{_key(key)}:")
        else:
            lines += _rule(rule, key, spaces, indent + column)
    return lines


def _rule(rule: RuleDraft, key: str, spaces: str, column: int) -> list[str]:
    """The lines of a rule whose text begins at ``column``, comments above it included."""
    start = f"{spaces}{_key(key)}:".ljust(column - 1) + " "
    line, notes = start + _flow(_short(rule.keys)), [one for note in _notes(rule) for one in _comment(note, spaces)]
    if len(line) > WIDTH:
        inner = [f"{spaces}  {_key(str(name))}: {_flow(value)}" for name, value in rule.keys.items()]
        above = [f"{spaces}# {rule.remark}"] if rule.remark else []
        return [*notes, *above, f"{spaces}{_key(key)}:", *inner]
    if rule.remark and len(f"{line}  # {rule.remark}") > WIDTH:
        return [*notes, f"{spaces}# {rule.remark}", line]
    return [*notes, line + (f"  # {rule.remark}" if rule.remark else "")]


def _notes(rule: RuleDraft) -> Iterator[str]:
    yield from rule.notes
    if rule.choices:
        choices = " or ".join(_flow(_short(keys)) for keys in rule.choices)
        yield f"choices: {choices}, with which every rank does all of it, or rules that cut what hangs together"


def _comment(text: str, spaces: str) -> list[str]:
    """As many lines as it takes."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{spaces}# ",
        subsequent_indent=f"{spaces}#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _short(keys: Mapping[str, Any]) -> Any:
    return keys["style"] if list(keys) == ["style"] else keys


def _nested(rules: Iterable[RuleDraft]) -> Iterator[tuple[int, str, RuleDraft | None]]:
    """Depth, key and rule of every line: rules of one list of layers stand below its path."""
    inside = None
    for rule in rules:
        group = _group(rule.path)
        if group is None:
            yield 0, rule.path, rule
        else:
            if group != inside:
                yield 0, group, None
            yield 1, rule.path.removeprefix(group).removeprefix(".") or ".", rule
        inside = group


def _group(path: str) -> str | None:
    """The path up to the first ``*``, where there is one."""
    segments = path.split(".")
    return ".".join(segments[: segments.index("*") + 1]) if "*" in segments else None


def folded(rules: Sequence[RuleDraft]) -> list[RuleDraft]:
    """``rules`` in their order, those of one list of layers together, neighbours that say the same in braces."""
    groups: dict[str, list[RuleDraft]] = {}
    for rule in rules:
        groups.setdefault(_group(rule.path) or rule.path, []).append(rule)
    found: list[RuleDraft] = []
    for members in groups.values():
        alike: list[RuleDraft] = []
        for rule in members:
            if alike and not (_same(alike[-1], rule) and _fits(_braces([r.path for r in (*alike, rule)]))):
                found.append(_as_one(alike))
                alike = []
            alike.append(rule)
        found.append(_as_one(alike))
    return found


def _fits(pattern: str) -> bool:
    return bool(pattern) and pattern.find("}") - pattern.find("{") < _WIDEST_BRACES


def _same(a: RuleDraft, b: RuleDraft) -> bool:
    return dataclasses.replace(a, path="") == dataclasses.replace(b, path="") and not a.undecided


def _as_one(rules: Sequence[RuleDraft]) -> RuleDraft:
    return dataclasses.replace(rules[0], path=_braces([rule.path for rule in rules]))


def _braces(paths: Sequence[str]) -> str:
    """One pattern for ``paths`` that differ in one segment; empty where they differ otherwise."""
    if len(paths) == 1:
        return paths[0]
    split = [path.split(".") for path in paths]
    if len({len(segments) for segments in split}) > 1:
        return ""
    differing = [i for i, same in enumerate(zip(*split, strict=True)) if len(set(same)) > 1]
    if len(differing) != 1:
        return ""
    words = [segments[differing[0]] for segments in split]
    if "*" in words:
        return ""
    first = split[0]
    return ".".join([*first[: differing[0]], _words(words), *first[differing[0] + 1 :]])


def _words(words: Sequence[str]) -> str:
    """``{k,v}_proj`` of k_proj and v_proj, ``ln_{1,2}`` of ln_1 and ln_2."""
    for cut in (_tail, _head):
        rests = {word: cut(word) for word in words}
        if len(set(rests.values())) == 1 and (rest := rests[words[0]]):
            inner = [word.removesuffix(rest) if cut is _tail else word.removeprefix(rest) for word in words]
            if all(inner):
                braces = "{" + ",".join(inner) + "}"
                return braces + rest if cut is _tail else rest + braces
    return "{" + ",".join(words) + "}"


def _tail(word: str) -> str:
    return word[word.rfind("_") :] if "_" in word else ""


def _head(word: str) -> str:
    return word[: word.rfind("_") + 1]


# ----------------------------------------------------------------------------------------------------------- the rest


def _units(draft: PlanDraft) -> Iterator[str]:
    lines = {name: f"  {name}: {_flow(fields)}" for name, fields in draft.units.items()}
    column = max((len(line) for name, line in lines.items() if name in draft.unit_notes), default=0)
    for name, line in lines.items():
        note = draft.unit_notes.get(name)
        behind = f"{line:<{column}}  # {note}" if note else line
        if len(behind) > WIDTH:
            yield f"  # {note}"
            behind = line
        yield behind


def _te(draft: PlanDraft) -> Iterator[str]:
    for under, layers in draft.te.items():
        yield f"  {_key(under)}:"
        yield from (f"    - {_flow(layer)}" for layer in layers)


def _key(text: str) -> str:
    return json.dumps(text) if text.startswith(("*", "{")) else text


def _flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _SWITCHES
        return value if plain else json.dumps(value)
    return json.dumps(value)
