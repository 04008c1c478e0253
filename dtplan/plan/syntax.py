"""Small readers of YAML nodes: each checks a node, gives a value, and describes itself as JSON Schema.

One description serves both, so that the schema which editors use cannot drift from what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import yaml

from dtplan._errors import Diagnostic, did_you_mean
from dtplan.plan.source import Source

T = TypeVar("T")
Json = dict[str, Any]


class Reading:
    """One file being read: its source and the findings so far. Reading goes on after a finding."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.findings: list[Diagnostic] = []

    def add(self, code: str, node: yaml.Node, message: str, hint: str = "") -> None:
        """Note a finding at ``node``."""
        self.findings.append(self.source.finding(code, node, message, hint))


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A reader with its schema; ``read`` returns None after noting a finding."""

    says: str
    """What is allowed, for messages: 'a number', 'one of colwise, rowwise'."""
    read: Callable[[Reading, yaml.Node], T | None]
    schema: Json


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a mapping: its kind, what it means, and whether it must be there."""

    kind: Kind[Any]
    doc: str
    required: bool = False


def shown(node: yaml.Node) -> str:
    """A node as a reader would quote it."""
    if isinstance(node, yaml.ScalarNode):
        return f"`{node.value[:60]}`" if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _scalar(says: str, tag: str, convert: Callable[[str], T | None], schema: Json) -> Kind[T]:
    def read(reading: Reading, node: yaml.Node) -> T | None:
        is_scalar = isinstance(node, yaml.ScalarNode) and node.tag == f"tag:yaml.org,2002:{tag}"
        value = convert(node.value) if is_scalar else None
        if value is None:
            hint = ""
            if node.tag == "tag:yaml.org,2002:bool" and tag == "str":
                hint = f"YAML reads {shown(node)} as a boolean: quote it"
            reading.add("DTP202", node, f"expected {says}, got {shown(node)}", hint)
        return value

    return Kind(says, read, schema)


TEXT: Kind[str] = _scalar("text", "str", str, {"type": "string"})
NUMBER: Kind[int] = _scalar("a whole number", "int", lambda text: int(text, 0), {"type": "integer"})
SWITCH: Kind[bool] = _scalar(
    "true or false", "bool", {"true": True, "false": False}.get, {"type": "boolean"}
)


def choice(words: Sequence[str], code: str = "DTP205", also: Sequence[str] = ()) -> Kind[str]:
    """One of ``words``; the spellings in ``also`` are read too but not advertised."""
    says = "one of " + ", ".join(words)

    def read(reading: Reading, node: yaml.Node) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.value in (*words, *also):
            return str(node.value)
        given = node.value if isinstance(node, yaml.ScalarNode) else ""
        hint = did_you_mean(given, [*words, *also]) or f"allowed: {', '.join(words)}"
        reading.add(code, node, f"expected {says}, got {shown(node)}", hint)
        return None

    return Kind(says, read, {"enum": [*words, *also]})


def one_of(says: str, *, text: Kind[T] | None = None, items: Kind[T] | None = None, keys: Kind[T] | None = None) -> Kind[T]:
    """A kind chosen by the node's shape: a scalar, a list or a mapping."""
    options = {yaml.ScalarNode: text, yaml.SequenceNode: items, yaml.MappingNode: keys}

    def read(reading: Reading, node: yaml.Node) -> T | None:
        kind = options[type(node)]
        if kind is None:
            reading.add("DTP202", node, f"expected {says}, got {shown(node)}")
            return None
        return kind.read(reading, node)

    return Kind(says, read, {"anyOf": [kind.schema for kind in options.values() if kind is not None]})


def then(kind: Kind[Any], convert: Callable[[Reading, yaml.Node, Any], T | None], schema: Json | None = None) -> Kind[T]:
    """``kind`` followed by a conversion that may note findings of its own."""

    def read(reading: Reading, node: yaml.Node) -> T | None:
        value = kind.read(reading, node)
        return None if value is None else convert(reading, node, value)

    return Kind(kind.says, read, kind.schema if schema is None else schema)


def list_of(kind: Kind[T], *, at_least: int = 0) -> Kind[tuple[T, ...]]:
    """A list whose items are all of ``kind``."""
    says = f"a list of {kind.says}"

    def read(reading: Reading, node: yaml.Node) -> tuple[T, ...] | None:
        if not isinstance(node, yaml.SequenceNode):
            reading.add("DTP202", node, f"expected {says}, got {shown(node)}", f"write [{shown(node).strip('`')}]")
            return None
        if len(node.value) < at_least:
            reading.add("DTP202", node, f"expected at least {at_least} items, got {len(node.value)}")
        values = [kind.read(reading, item) for item in node.value]
        return tuple(value for value in values if value is not None)

    return Kind(says, read, {"type": "array", "items": kind.schema} | ({"minItems": at_least} if at_least else {}))


def map_of(kind: Kind[T]) -> Kind[dict[str, T]]:
    """A mapping with free keys and values of ``kind``."""
    says = f"a mapping to {kind.says}"

    def read(reading: Reading, node: yaml.Node) -> dict[str, T] | None:
        pairs = [(key.value, kind.read(reading, value)) for key, value in entries(reading, node, says)]
        return {key: value for key, value in pairs if value is not None}

    return Kind(says, read, {"type": "object", "additionalProperties": kind.schema})


def record(keys: Mapping[str, Key], build: Callable[..., T | None], doc: str) -> Kind[T]:
    """A mapping with exactly the keys of a table; ``build(reading, node, **values)`` makes the value."""
    says = f"a mapping with the keys {', '.join(keys)}"

    def read(reading: Reading, node: yaml.Node) -> T | None:
        if not isinstance(node, yaml.MappingNode):
            reading.add("DTP202", node, f"expected {says}, got {shown(node)}")
            return None
        values: dict[str, Any] = {}
        for key, value in entries(reading, node, says):
            if key.value not in keys:
                hint = did_you_mean(key.value, keys) or f"allowed keys: {', '.join(keys)}"
                reading.add("DTP201", key, f"unknown key `{key.value}`", hint)
            elif (given := keys[key.value].kind.read(reading, value)) is not None:
                values[key.value] = given
        present = {key.value for key, _ in node.value}
        missing = [name for name, key in keys.items() if key.required and name not in present]
        for name in missing:
            reading.add("DTP203", node, f"the key `{name}` is missing", keys[name].doc)
        if any(key.required and name not in values for name, key in keys.items()):
            return None
        return build(reading, node, **values)

    required = [name for name, key in keys.items() if key.required]
    schema: Json = {
        "type": "object",
        "description": doc,
        "properties": {name: key.kind.schema | {"description": key.doc} for name, key in keys.items()},
        "additionalProperties": False,
    }
    return Kind(says, read, schema | ({"required": required} if required else {}))


def entries(reading: Reading, node: yaml.Node, says: str) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """The pairs of a mapping node whose keys are scalars; anything else is noted as a finding."""
    if not isinstance(node, yaml.MappingNode):
        reading.add("DTP202", node, f"expected {says}, got {shown(node)}")
        return
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            yield key, value
        else:
            reading.add("DTP202", key, f"a key must be plain text, got {shown(key)}", "quote a key that has braces in front")
