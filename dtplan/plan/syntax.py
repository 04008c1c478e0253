"""Small readers of YAML nodes: each checks a node, gives a value, and describes itself as JSON Schema.

One description serves both, so that the schema which editors use cannot drift from what is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import yaml

from dtplan._errors import Diagnostic, PlanError, did_you_mean
from dtplan.plan.source import Source

T = TypeVar("T")
Json = dict[str, Any]

MAX_FINDINGS = 200

_YAML = "tag:yaml.org,2002:"
_BOOLEAN, _NULL, _NUMBER, _TEXT = (f"{_YAML}{kind}" for kind in ("bool", "null", "int", "str"))


class Reading:
    """One file being read: its source and the findings so far. Reading goes on after a finding."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.findings: list[Diagnostic] = []
        self.num_paths = 0
        """Paths that the patterns read so far stand for."""

    def add(self, code: str, node: yaml.Node, message: str, hint: str = "") -> None:
        """Note a finding at ``node``.

        Raises:
            PlanError: there are 200 findings already; a file with that many is something else than a plan.
        """
        self.note(self.source.finding(code, node, message, hint))

    def note(self, finding: Diagnostic) -> None:
        """Note a finding, as ``add`` does."""
        self.findings.append(finding)
        if len(self.findings) >= MAX_FINDINGS:
            raise PlanError([*self.findings, and_more(self.source.file)])


def and_more(file: str) -> Diagnostic:
    """The last of too many findings."""
    message, hint = f"{MAX_FINDINGS} findings; the rest is not told", "mend these first"
    return Diagnostic(code="DTP107", file=file, message=message, hint=hint)


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
        quoted = f'"{node.value[:60]}"' if node.style in ("'", '"') else node.value[:60]
        return f"`{quoted}`" if quoted else "nothing"
    what = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
    return f"a {what}" if node.value else f"an empty {what}"


def wrong_kind(reading: Reading, node: yaml.Node, says: str, write: str) -> None:
    """Note that ``node`` is not what ``says``; ``write`` is what to do about it."""
    reading.add("DTP202", node, f"expected {says}, got {shown(node)}", write)


def _text(reading: Reading, node: yaml.Node) -> str | None:
    if isinstance(node, yaml.ScalarNode) and node.tag == _TEXT:
        return str(node.value)
    write = "write plain text"
    if isinstance(node, yaml.ScalarNode) and node.value:
        read_as = {_BOOLEAN: "a boolean", _NULL: "nothing"}.get(node.tag, "a number or a date")
        write = f'YAML reads {shown(node)} as {read_as}: quote it, "{node.value[:60]}"'
    wrong_kind(reading, node, "text", write)
    return None


def _number(reading: Reading, node: yaml.Node) -> int | None:
    # Decimal only: YAML 1.1 takes 010 for eight and 1:30 for ninety.
    if node.tag == _NUMBER and re.fullmatch(r"0|-?[1-9][0-9]{0,8}", node.value):
        return int(node.value)
    quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
    write = "remove the quotes" if quoted else "write a decimal number, such as 1"
    wrong_kind(reading, node, "a whole number", write)
    return None


def _switch(reading: Reading, node: yaml.Node) -> bool | None:
    # Two words only: YAML 1.1 takes on, off, yes, no for booleans, and YAML 1.2 takes them for text.
    if node.tag == _BOOLEAN and node.value in ("true", "false"):
        return bool(node.value == "true")
    wrong_kind(reading, node, "true or false", "write true or false, without quotes")
    return None


TEXT: Kind[str] = Kind("text", _text, {"type": "string"})
NUMBER: Kind[int] = Kind("a whole number", _number, {"type": "integer"})
SWITCH: Kind[bool] = Kind("true or false", _switch, {"type": "boolean"})


def _plain_value(reading: Reading, node: yaml.Node) -> Any:
    if node.tag == _NULL:
        return None
    for tag, kind in ((_BOOLEAN, SWITCH), (_NUMBER, NUMBER), (_TEXT, TEXT)):
        if node.tag == tag:
            return kind.read(reading, node)
    write = "write true, false, null, a whole number or text"
    wrong_kind(reading, node, "a plain value", write)
    return None


VALUE: Kind[Any] = Kind("a plain value", _plain_value, {"type": ["boolean", "integer", "string", "null"]})
"""True, false, null, a whole number or text; null is read as None, as is a value with a finding."""


def choice(words: Sequence[str], code: str = "DTP205", also: Sequence[str] = ()) -> Kind[str]:
    """One of ``words``; the spellings in ``also`` are read too but not advertised."""
    says = "one of " + ", ".join(words)

    def read(reading: Reading, node: yaml.Node) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            wrong_kind(reading, node, says, "write one of these words")
            return None
        if node.value in (*words, *also):
            return str(node.value)
        hint = did_you_mean(node.value, [*words, *also]) or "write one of these words"
        reading.add(code, node, f"expected {says}, got {shown(node)}", hint)
        return None

    return Kind(says, read, {"enum": [*words, *also]})


def one_of(
    says: str, *, text: Kind[T] | None = None, items: Kind[T] | None = None, keys: Kind[T] | None = None
) -> Kind[T]:
    """A kind chosen by the node's shape: a scalar, a list or a mapping."""
    options = {yaml.ScalarNode: text, yaml.SequenceNode: items, yaml.MappingNode: keys}

    def read(reading: Reading, node: yaml.Node) -> T | None:
        kind = options[type(node)]
        if kind is None:
            wrong_kind(reading, node, says, "write one of these")
            return None
        return kind.read(reading, node)

    return Kind(says, read, {"anyOf": [kind.schema for kind in options.values() if kind is not None]})


def then(
    kind: Kind[Any], convert: Callable[[Reading, yaml.Node, Any], T | None], schema: Json | None = None
) -> Kind[T]:
    """``kind`` followed by a conversion that may note findings of its own."""

    def read(reading: Reading, node: yaml.Node) -> T | None:
        value = kind.read(reading, node)
        return None if value is None else convert(reading, node, value)

    return Kind(kind.says, read, kind.schema if schema is None else schema)


def list_of(kind: Kind[T], *, at_least: int = 0) -> Kind[tuple[T, ...]]:
    """A list whose items are all of ``kind``."""
    says = f"a list of {kind.says}" + (f", {at_least} or more" if at_least else "")

    def read(reading: Reading, node: yaml.Node) -> tuple[T, ...] | None:
        if not isinstance(node, yaml.SequenceNode):
            one = isinstance(node, yaml.ScalarNode) and node.value
            wrong_kind(reading, node, says, f"write [{shown(node).strip('`')}]" if one else "write [a, b]")
            return None
        if len(node.value) < at_least:
            message = f"expected {says}, got {len(node.value)}"
            reading.add("DTP202", node, message, "name them, or remove the key")
            return None
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


def record(keys: Mapping[str, Key], build: Callable[..., T | None], doc: str, *, unknown: str = "") -> Kind[T]:
    """A mapping with exactly the keys of a table; ``build(reading, node, **values)`` makes the value.

    ``unknown`` is what to do about a key that is not there and is no misspelling of one that is.
    """
    says = f"a mapping with the keys {', '.join(keys)}"

    def read(reading: Reading, node: yaml.Node) -> T | None:
        if not isinstance(node, yaml.MappingNode):
            wrong_kind(reading, node, says, "write {" + next(iter(keys)) + ": ...}")
            return None
        values: dict[str, Any] = {}
        present: set[str] = set()
        for key, value in entries(reading, node, says):
            present.add(key.value)
            if key.value not in keys:
                hint = did_you_mean(key.value, keys) or unknown or f"allowed keys: {', '.join(keys)}"
                reading.add("DTP201", key, f"unknown key `{key.value[:60]}`", hint)
            elif (given := keys[key.value].kind.read(reading, value)) is not None:
                values[key.value] = given
        for name in required:
            if name not in present and not any(did_you_mean(key, [name]) for key in present - keys.keys()):
                reading.add("DTP203", node, f"the key `{name}` is missing", f"add `{name}`: {keys[name].doc}")
        if not values.keys() >= set(required):
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
    """The pairs of a mapping node whose keys are text or numbers; anything else is noted as a finding."""
    if not isinstance(node, yaml.MappingNode):
        wrong_kind(reading, node, says, "write {key: value}")
        return
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            message = f"a key must be plain text, got {shown(key)}"
            reading.add("DTP202", key, message, "quote a key that begins with `{` or `[`")
        elif key.tag not in (_TEXT, _NUMBER):
            message = f"a key must be plain text, got {shown(key)}"
            read_as = {_BOOLEAN: "a boolean", _NULL: "nothing"}.get(key.tag, "something else")
            reading.add("DTP202", key, message, f'YAML reads it as {read_as}: quote it, "{key.value[:60]}"')
        else:
            yield key, value
