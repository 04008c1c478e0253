"""The plan language, version 1: the keys of a plan, what they may hold, what they mean."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import yaml

from dtplan.plan import paths
from dtplan.plan.layout_grammar import LAYOUT
from dtplan.plan.rule_grammar import RULES, expanded
from dtplan.plan.spec import VERSION, Fsdp, Layout, R, TeLayer, Tie, Unit, Variant
from dtplan.plan.syntax import (
    NUMBER,
    SWITCH,
    TEXT,
    VALUE,
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
    wrong_kind,
)

TE_LAYERS = ("LayerNormLinear", "Linear", "LayerNormMLP", "RMSNorm", "LayerNorm", "DotProductAttention")
ACTIVATIONS = ("swiglu", "geglu", "gelu", "relu", "silu", "reglu", "srelu")
DTYPES = ("bfloat16", "float16", "float32", "float64")


def _version(reading: Reading, node: yaml.Node) -> int | None:
    if not node.tag.endswith(":int"):
        wrong_kind(reading, node, f"the version {VERSION}", f"write dtplan: {VERSION}")
        return None
    if node.value != str(VERSION):
        hint = f"this dtplan reads version {VERSION}; see CHANGELOG.md for how to bring a plan over"
        reading.add("DTP204", node, f"the plan is written for version {node.value[:20]}", hint)
        return None
    return VERSION


VERSION_NUMBER: Kind[int] = Kind(f"the version {VERSION}", _version, {"const": VERSION})

_NAME = r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*"


def _module(reading: Reading, node: yaml.Node, text: str) -> str | None:
    if text == "." or re.fullmatch(_NAME, text):
        return text
    message = f"expected the name of one module or parameter, got `{text[:60]}`"
    reading.add("DTP206", node, message, "write names between dots, without `*` and braces")
    return None


NAME: Kind[str] = then(TEXT, _module, {"type": "string", "pattern": rf"^(\.|{_NAME})$"})


def _names(reading: Reading, node: yaml.Node, names: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    for key, _ in entries(reading, node, "a mapping"):
        _module(reading, key, key.value)
    return names


NAMES: Kind[dict[str, tuple[str, ...]]] = then(map_of(list_of(NAME, at_least=1)), _names)


def _unit_from_fields(reading: Reading, node: yaml.Node, fields: tuple[str, ...] | str) -> Unit:
    return Unit(name="", fields=(fields,) if isinstance(fields, str) else fields, at=reading.source.place(node))


def _unit(reading: Reading, node: yaml.Node, **values: Any) -> Unit:
    indivisible = values.get("indivisible", "error")
    return Unit(name="", fields=values["field"], indivisible=indivisible, at=reading.source.place(node))


_FIELDS: Kind[tuple[str, ...]] = one_of(
    "a config field or a list of them",
    text=then(TEXT, lambda _reading, _node, text: (text,)),
    items=list_of(TEXT, at_least=1),
)
UNIT: Kind[Unit] = one_of(
    "a config field, a list of them (the first that is set counts), or {field: ..., indivisible: ...}",
    text=then(TEXT, _unit_from_fields),
    items=then(list_of(TEXT, at_least=1), _unit_from_fields),
    keys=record(
        {
            "field": Key(_FIELDS, "the config field that holds the number of units", required=True),
            "indivisible": Key(
                choice(("error", "uneven", "replicate", "replicate_kv")),
                "what to do when the degree does not divide the number: refuse, cut unevenly, keep whole, or "
                "give several ranks the same kv head",
            ),
        },
        _unit,
        "A unit that is never cut through.",
    ),
)


def _units(reading: Reading, node: yaml.Node) -> dict[str, Unit]:
    """Every unit by its name; one with a finding is kept too, so that rules which use it get none."""
    units = {}
    for key, value in entries(reading, node, "a mapping from names to units"):
        at = reading.source.place(key)
        unit = UNIT.read(reading, value) or Unit(name="", fields=(), at=at)
        units[key.value] = dataclasses.replace(unit, name=key.value, at=at)
    return units


UNITS: Kind[dict[str, Unit]] = Kind("a mapping from names to units", _units, map_of(UNIT).schema)


def _residual(reading: Reading, node: yaml.Node, **values: Any) -> Layout:
    otherwise = values.get("otherwise", R)
    if otherwise != R:
        message = f"`otherwise` is {otherwise}, only R is possible"
        reading.add("DTP207", node, message, "write otherwise: R")
    layout: Layout = values["sequence_parallel"]
    if layout.word not in ("S", "R"):
        message = f"`sequence_parallel` is {layout}, the sequence dim must be cut"
        reading.add("DTP207", node, message, "write sequence_parallel: S(1), or R where the stream cannot be cut")
    return layout


RESIDUAL_LAYOUT: Kind[Layout] = record(
    {
        "sequence_parallel": Key(
            LAYOUT, "the layout with sequence parallelism, as S(1); R: it is refused", required=True
        ),
        "otherwise": Key(LAYOUT, "the layout without it: R"),
    },
    _residual,
    "The layout of the residual stream, said once.",
)


def _tie(reading: Reading, node: yaml.Node, names: tuple[str, ...]) -> Tie:
    return Tie(names=names, at=reading.source.place(node))


TIES: Kind[tuple[Tie, ...]] = list_of(then(list_of(NAME), _tie))

TE_KEYS: dict[str, Key] = {
    "layer": Key(choice(TE_LAYERS), "the TransformerEngine layer", required=True),
    "norm": Key(NAME, "the norm that is fused in front"),
    "linears": Key(list_of(NAME, at_least=1), "the column-parallel layers that become one matrix"),
    "linear": Key(NAME, "the linear layer that is replaced"),
    "gate": Key(NAME, "the gate of a gated MLP"),
    "up": Key(NAME, "the first linear layer of the MLP"),
    "down": Key(NAME, "the last linear layer of the MLP"),
    "attention": Key(NAME, "the attention module whose kernel is replaced"),
    "activation": Key(choice(ACTIVATIONS), "the MLP's activation"),
    "approximate_gelu": Key(SWITCH, "accept the tanh form of gelu where the model has the erf form"),
}


def _te_layer(reading: Reading, node: yaml.Node, **values: Any) -> TeLayer:
    return TeLayer(under=(), at=reading.source.place(node), **values)


TE_LAYER: Kind[TeLayer] = record(TE_KEYS, _te_layer, "One fused layer; paths are below the key.")


def _te(reading: Reading, node: yaml.Node, layers: dict[str, tuple[TeLayer, ...]]) -> tuple[TeLayer, ...]:
    placed: list[TeLayer] = []
    for key, _value in entries(reading, node, "a mapping"):
        for pattern in expanded(reading, key, key.value):
            placed += [dataclasses.replace(layer, under=pattern) for layer in layers.get(key.value, ())]
    return tuple(placed)


TE: Kind[tuple[TeLayer, ...]] = then(map_of(list_of(TE_LAYER, at_least=1)), _te)


def _reshard(reading: Reading, node: yaml.Node) -> bool | int | None:
    if not node.tag.endswith(":int"):
        return SWITCH.read(reading, node)
    ranks = NUMBER.read(reading, node)
    if ranks is not None and ranks < 2:
        wrong_kind(reading, node, "two ranks or more", "write true to free the weights, false to keep them")
    return ranks


RESHARD: Kind[bool | int] = Kind(
    "true, false or a number of ranks",
    _reshard,
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 2}]},
)
PATTERN: Kind[tuple[paths.Segments, ...]] = then(TEXT, expanded)


def _fsdp(reading: Reading, node: yaml.Node, **values: Any) -> Fsdp:
    units = tuple(pattern for patterns in values.pop("units", ()) for pattern in patterns)
    return Fsdp(units=units, at=reading.source.place(node), **values)


FSDP: Kind[Fsdp] = record(
    {
        "units": Key(list_of(PATTERN), "the modules that are gathered, computed and freed as one"),
        "reshard_after_forward": Key(
            RESHARD,
            "free a unit's weights after forward; a number keeps them over groups of that many ranks",
        ),
        "param_dtype": Key(choice(DTYPES), "the dtype of computation; parameters are kept in their own"),
        "reduce_dtype": Key(choice(DTYPES), "the dtype in which gradients are reduced"),
    },
    _fsdp,
    "How FSDP2 wraps the model.",
)


def _when(reading: Reading, node: yaml.Node) -> dict[str, Any] | None:
    says = "a mapping from config fields to values"
    pairs = {key.value: VALUE.read(reading, value) for key, value in entries(reading, node, says)}
    if isinstance(node, yaml.MappingNode) and not node.value:
        wrong_kind(reading, node, says, "name a config field; what always holds stands under the plan's `rules`")
    return pairs


WHEN: Kind[dict[str, Any]] = Kind(
    "a mapping from config fields to values",
    _when,
    {"type": "object", "additionalProperties": VALUE.schema, "minProperties": 1},
)


def _variant(reading: Reading, node: yaml.Node, **values: Any) -> Variant:
    if len(values) == 1:
        reading.add("DTP304", node, "the variant says nothing", "give it `rules`, `te` or `ties`")
    return Variant(at=reading.source.place(node), **values)


VARIANT: Kind[Variant] = record(
    {
        "when": Key(WHEN, "config fields and the values that they must have", required=True),
        "rules": Key(RULES, "rules that hold then"),
        "te": Key(TE, "fused layers that hold then"),
        "ties": Key(TIES, "ties that hold then"),
    },
    _variant,
    "What differs by configuration.",
)

EXTENDS: Kind[tuple[str, yaml.Node]] = then(TEXT, lambda _reading, node, text: (text, node))

PLAN_KEYS: dict[str, Key] = {
    "dtplan": Key(VERSION_NUMBER, "the version of the plan language, 1", required=True),
    "name": Key(TEXT, "the plan's name; default: the file's"),
    "extends": Key(
        EXTENDS,
        "a built-in plan's name, or a path beside this file; its rules hold unless this plan replaces them",
    ),
    "serves": Key(list_of(TEXT), "the model classes that the plan is for"),
    "units": Key(UNITS, "what may be cut, by name"),
    "residual": Key(RESIDUAL_LAYOUT, "the layout of the residual stream"),
    "rules": Key(RULES, "path -> rule"),
    "variants": Key(list_of(VARIANT), "sections that hold for some configurations"),
    "ties": Key(TIES, "lists of parameters that are one tensor when the model ties them"),
    "names": Key(NAMES, "module path -> its names in other versions and in checkpoints"),
    "te": Key(TE, "path -> TransformerEngine layers"),
    "fsdp": Key(FSDP, "how FSDP2 wraps"),
}


def _values(_reading: Reading, _node: yaml.Node, **values: Any) -> dict[str, Any]:
    return values


PLAN: Kind[dict[str, Any]] = record(PLAN_KEYS, _values, "A dtplan sharding plan.")
