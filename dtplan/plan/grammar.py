"""The plan language, version 1: which keys there are, what they may hold, what they mean."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import yaml

from dtplan.plan import paths
from dtplan.plan.spec import (
    LOGITS,
    RESIDUAL,
    Fsdp,
    Layout,
    Move,
    P,
    R,
    Rule,
    S,
    Section,
    TeLayer,
    Tie,
    Unit,
    Variant,
)
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
    shown,
    then,
)

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
TE_LAYERS = ("LayerNormLinear", "Linear", "LayerNormMLP", "RMSNorm", "LayerNorm", "DotProductAttention")
DTYPES = ("bfloat16", "float16", "float32", "float64")

_LAYOUT = re.compile(r"S\((-?\d+)\)")
_WORDS = {"R": R, "P": P, "residual": RESIDUAL, "logits": LOGITS}
_LAYOUT_SAYS = "a layout: R, S(dim), P, residual or logits"
_OPERATIONS = {
    "input": {"keep": Move(), "sum": Move(src=R, dst=R), "gather": Move(src=S(-1), dst=R), "slice": Move(src=R, dst=S(-1))},
    "output": {"keep": Move(), "sum": Move(src=P, dst=R), "gather": Move(src=S(-1), dst=R), "scatter": Move(src=P, dst=S(-1))},
}


def _layout(reading: Reading, node: yaml.Node, text: str) -> Layout | None:
    if text in _WORDS:
        return _WORDS[text]
    if found := _LAYOUT.fullmatch(text):
        return S(int(found[1]))
    reading.add("DTP207", node, f"expected {_LAYOUT_SAYS}, got {shown(node)}", "S(1) is the sequence dim of [batch, sequence, hidden]")
    return None


_layout_schema = {"type": "string", "pattern": r"^(R|P|residual|logits|S\(-?\d+\))$"}
LAYOUT: Kind[Layout] = then(TEXT, _layout, _layout_schema)


def _move_kind(side: str) -> Kind[Move]:
    operations = _OPERATIONS[side]

    def word(reading: Reading, node: yaml.Node, text: str) -> Move | None:
        if text in operations:
            return operations[text]
        layout = _layout(reading, node, text)
        return None if layout is None else Move(dst=layout)

    def build(reading: Reading, node: yaml.Node, **values: Any) -> Move | None:
        move: Move | None = values.pop("to", Move())
        if move is None:
            return None
        return Move(
            src=values.get("from", move.src),
            dst=move.dst,
            sum_grad_of_last=values.get("sum_grad_of_last"),
            global_shape=values.get("global_shape", False),
        )

    schema = {"anyOf": [_layout_schema, {"enum": list(operations)}]}
    text = then(TEXT, word, schema)
    arrives = "arrives (default: residual)" if side == "input" else "leaves the computation (default: what the style gives)"
    keys = {
        "from": Key(LAYOUT, f"the layout in which the value {arrives}"),
        "to": Key(text, f"the layout that it is given; or one of {', '.join(operations)}"),
    }
    if side == "output":
        keys["global_shape"] = Key(SWITCH, "hand out a DTensor, so that code outside sees the global shape of a cut value")
        keys["sum_grad_of_last"] = Key(TEXT, "a config field n: sum only the gradient of the last n features over ranks")
    says = f"a layout, one of {', '.join(operations)}, or {{from: layout, to: layout}}"
    return one_of(says, text=text, keys=record(keys, build, f"A change of layout at a module's {side}."))


def _per_value(side: str) -> Kind[tuple[tuple[str | int | None, Move], ...]]:
    """``input`` and ``output``: one move for the first value, or a mapping from name or position to move."""
    move = _move_kind(side)
    default: int | None = 0 if side == "input" else None

    def read_map(reading: Reading, node: yaml.Node) -> tuple[tuple[str | int | None, Move], ...] | None:
        if {key.value for key, _ in entries(reading, node, move.says)} & {"from", "to", "global_shape", "sum_grad_of_last"}:
            single = move.read(reading, node)
            return None if single is None else ((default, single),)
        pairs: list[tuple[str | int | None, Move]] = []
        for key, value in entries(reading, node, move.says):
            position = int(key.value) if key.value.isdecimal() else key.value
            if side == "output" and not isinstance(position, int):
                reading.add("DTP202", key, f"an output is named by its position, got {shown(key)}", "0 is the first of a returned tuple")
            elif (given := move.read(reading, value)) is not None:
                pairs.append((position, given))
        return tuple(pairs)

    def read_text(reading: Reading, node: yaml.Node) -> tuple[tuple[str | int | None, Move], ...] | None:
        single = move.read(reading, node)
        return None if single is None else ((default, single),)

    names = {"type": "object", "additionalProperties": move.schema}
    return one_of(
        f"{move.says}, or a mapping from {'argument' if side == 'input' else 'position'} to one of these",
        text=Kind(move.says, read_text, move.schema),
        keys=Kind(move.says, read_map, names),
    )


def _section(reading: Reading, node: yaml.Node, **values: Any) -> Section:
    return Section(unit=values["unit"], whole=values.get("whole", False), grad=values.get("grad"))


GRAD = choice(("sum", "complete"))
SECTION: Kind[Section] = one_of(
    "a unit or {unit: ..., whole: true, grad: sum}",
    text=then(TEXT, lambda _reading, _node, text: Section(unit=text)),
    keys=record(
        {
            "unit": Key(TEXT, "the unit in which this section is cut", required=True),
            "whole": Key(SWITCH, "every rank keeps the whole section"),
            "grad": Key(choice(("sum",)), "the section's gradient is summed over ranks"),
        },
        _section,
        "One section of a fused dim.",
    ),
)


def _style(reading: Reading, node: yaml.Node, text: str) -> str:
    return STYLE_ALIASES.get(text, text)


STYLE: Kind[str] = then(choice(tuple(STYLES), also=tuple(STYLE_ALIASES)), _style)

RULE_KEYS: dict[str, Key] = {
    "style": Key(STYLE, "the named style: " + "; ".join(f"{name}: {doc}" for name, doc in STYLES.items())),
    "shard": Key(NUMBER, "the dim along which this parameter or buffer is cut"),
    "sections": Key(list_of(SECTION, at_least=1), "the parts of a fused dim, each cut by itself"),
    "unit": Key(TEXT, "the unit in which the dim is cut; the degree must divide the number of units"),
    "grad": Key(
        GRAD,
        "of a whole parameter among cut ones: `sum`, each rank's gradient is a partial sum, so they are summed; "
        "`complete`, every rank has all of it",
    ),
    "input": Key(_per_value("input"), "the layouts that the module needs its inputs in"),
    "output": Key(_per_value("output"), "the layouts that the module hands its outputs out in"),
    "parallel_residual": Key(
        TEXT,
        "the input that the block adds to the unreduced sum of its branches: one forward reduction for the block; "
        "the norms that read it are given the whole value, and share one gradient sum",
    ),
    "localize": Key(list_of(TEXT), "whole-number attributes of the module to divide by the degree"),
    "optional": Key(SWITCH, "the rule may name nothing"),
    "override": Key(SWITCH, "the rule wins where another one names the same path"),
}


def _rules(reading: Reading, node: yaml.Node) -> tuple[Rule, ...] | None:
    return tuple(_flatten(reading, node, ""))


def _flatten(reading: Reading, node: yaml.Node, prefix: str) -> list[Rule]:
    rules: list[Rule] = []
    for key, value in entries(reading, node, "a mapping from paths to rules"):
        path = prefix.rstrip(".") if key.value == "." else prefix + key.value
        if isinstance(value, yaml.MappingNode) and not _is_rule(value):
            rules += _flatten(reading, value, path + ".")
            continue
        try:
            patterns = paths.expand(path)
        except paths.PatternError as error:
            reading.add("DTP206", key, str(error), "write one name, `*` or {a,b} for each segment between dots")
            continue
        rules += [rule for pattern in patterns if (rule := _rule(reading, key, value, pattern)) is not None]
    return rules


def _is_rule(node: yaml.MappingNode) -> bool:
    return not node.value or any(isinstance(key, yaml.ScalarNode) and key.value in RULE_KEYS for key, _ in node.value)


def _rule(reading: Reading, key: yaml.Node, node: yaml.Node, pattern: paths.Segments) -> Rule | None:
    at = reading.source.place(key)
    if isinstance(node, yaml.ScalarNode):
        style = STYLE.read(reading, node)
        return None if style is None else Rule(path=pattern, style=style, at=at)
    found = len(reading.findings)
    values = record(RULE_KEYS, lambda _reading, _node, **given: given, "").read(reading, node)
    if values is None or len(reading.findings) > found:
        return None
    if not values:
        reading.add("DTP304", key, "the rule says nothing", "give a style, or `replicate` to keep it whole on every rank")
        return None
    inputs, outputs = values.pop("input", ()), values.pop("output", ())
    return Rule(path=pattern, at=at, inputs=inputs, outputs=outputs, **values)


def _rules_schema() -> dict[str, Any]:
    rule = record(RULE_KEYS, lambda *_args, **_values: None, "What happens to one path.").schema
    words = {"enum": [*STYLES, *STYLE_ALIASES], "description": RULE_KEYS["style"].doc}
    group = {"$ref": "#/$defs/rules"}
    return {
        "type": "object",
        "description": "Paths to rules; `.` is the path itself, a nested mapping continues the path.",
        "additionalProperties": {"anyOf": [words, rule, group]},
    }


RULES: Kind[tuple[Rule, ...]] = Kind("a mapping from paths to rules", _rules, {"$ref": "#/$defs/rules"})
RULES_DEFINITION = _rules_schema()


def _unit_from_names(reading: Reading, node: yaml.Node, names: tuple[str, ...] | str) -> Unit:
    fields = (names,) if isinstance(names, str) else names
    return Unit(name="", fields=fields, at=reading.source.place(node))


def _unit(reading: Reading, node: yaml.Node, **values: Any) -> Unit:
    fields = values["field"]
    return Unit(name="", fields=fields, indivisible=values.get("indivisible", "error"), at=reading.source.place(node))


_FIELDS: Kind[tuple[str, ...]] = one_of(
    "a config field or a list of them",
    text=then(TEXT, lambda _reading, _node, text: (text,)),
    items=list_of(TEXT, at_least=1),
)
UNIT: Kind[Unit] = one_of(
    "a config field, a list of them (the first that is set counts), or {field: ..., indivisible: ...}",
    text=then(TEXT, _unit_from_names),
    items=then(list_of(TEXT, at_least=1), _unit_from_names),
    keys=record(
        {
            "field": Key(_FIELDS, "the config field that holds the number of units", required=True),
            "indivisible": Key(
                choice(("error", "uneven", "replicate", "replicate_kv")),
                "what to do when the degree does not divide the number: refuse, cut unevenly, keep whole, or give "
                "several ranks the same kv head",
            ),
        },
        _unit,
        "A unit that is never cut through.",
    ),
)


def _residual(reading: Reading, node: yaml.Node, **values: Any) -> Layout:
    otherwise = values.get("otherwise", R)
    if otherwise != R:
        reading.add("DTP207", node, f"`otherwise` is {otherwise}, only R is possible", "write otherwise: R")
    layout: Layout = values["sequence_parallel"]
    if layout.word != "S":
        reading.add("DTP207", node, f"`sequence_parallel` is {layout}, the sequence dim must be cut", "write S(1)")
    return layout


RESIDUAL_LAYOUT: Kind[Layout] = record(
    {
        "sequence_parallel": Key(LAYOUT, "the layout with sequence parallelism, as S(1)", required=True),
        "otherwise": Key(LAYOUT, "the layout without it: R"),
    },
    _residual,
    "The layout of the residual stream, said once.",
)


def _tie(reading: Reading, node: yaml.Node, names: tuple[str, ...]) -> Tie:
    return Tie(names=names, at=reading.source.place(node))


TIES: Kind[tuple[Tie, ...]] = list_of(then(list_of(TEXT), _tie))

def _pattern(reading: Reading, node: yaml.Node, text: str) -> tuple[paths.Segments, ...] | None:
    try:
        return paths.expand(text)
    except paths.PatternError as error:
        reading.add("DTP206", node, str(error))
        return None


_PATH: Kind[tuple[paths.Segments, ...]] = then(TEXT, _pattern)

TE_KEYS: dict[str, Key] = {
    "layer": Key(choice(TE_LAYERS), "the TransformerEngine layer", required=True),
    "norm": Key(TEXT, "the norm that is fused in front"),
    "linears": Key(list_of(TEXT, at_least=1), "the column-parallel layers that become one matrix"),
    "linear": Key(TEXT, "the linear layer that is replaced"),
    "gate": Key(TEXT, "the gate of a gated MLP"),
    "up": Key(TEXT, "the first linear layer of the MLP"),
    "down": Key(TEXT, "the last linear layer of the MLP"),
    "attention": Key(TEXT, "the attention module whose kernel is replaced"),
    "activation": Key(choice(("swiglu", "geglu", "gelu", "relu", "silu", "reglu", "srelu")), "the MLP's activation"),
    "approximate_gelu": Key(SWITCH, "accept the tanh form of gelu where the model has the erf form"),
}


def _te_layer(reading: Reading, node: yaml.Node, **values: Any) -> TeLayer:
    return TeLayer(under=(), at=reading.source.place(node), **values)


TE_LAYER: Kind[TeLayer] = record(TE_KEYS, _te_layer, "One fused layer; paths are below the key.")


def _te(reading: Reading, node: yaml.Node, layers: dict[str, tuple[TeLayer, ...]]) -> tuple[TeLayer, ...]:
    placed: list[TeLayer] = []
    for key, _value in entries(reading, node, "a mapping"):
        try:
            patterns = paths.expand(key.value)
        except paths.PatternError as error:
            reading.add("DTP206", key, str(error))
            continue
        placed += [dataclasses.replace(layer, under=p) for p in patterns for layer in layers.get(key.value, ())]
    return tuple(placed)


TE: Kind[tuple[TeLayer, ...]] = then(map_of(list_of(TE_LAYER, at_least=1)), _te)


def _fsdp(reading: Reading, node: yaml.Node, **values: Any) -> Fsdp:
    units = tuple(pattern for patterns in values.pop("units", ()) for pattern in patterns)
    return Fsdp(units=units, at=reading.source.place(node), **values)


def _reshard(reading: Reading, node: yaml.Node) -> bool | int | None:
    return NUMBER.read(reading, node) if node.tag.endswith(":int") else SWITCH.read(reading, node)


_RESHARD: Kind[bool | int] = Kind("true, false or a whole number", _reshard, {"type": ["boolean", "integer"]})


FSDP: Kind[Fsdp] = record(
    {
        "units": Key(list_of(_PATH), "the modules that are gathered, computed and freed as one"),
        "reshard_after_forward": Key(
            _RESHARD,
            "free a unit's weights after forward; a number keeps them over groups of that many ranks",
        ),
        "param_dtype": Key(choice(DTYPES), "the dtype of computation; parameters are kept in their own"),
        "reduce_dtype": Key(choice(DTYPES), "the dtype in which gradients are reduced"),
    },
    _fsdp,
    "How FSDP2 wraps the model.",
)


def _value(reading: Reading, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return yaml.SafeLoader("").construct_object(node)
    reading.add("DTP202", node, f"expected a plain value, got {shown(node)}")
    return None


def _when(reading: Reading, node: yaml.Node) -> dict[str, Any] | None:
    return {key.value: _value(reading, value) for key, value in entries(reading, node, "a mapping of config fields")}


WHEN: Kind[dict[str, Any]] = Kind("a mapping of config fields to values", _when, {"type": "object", "minProperties": 1})


def _variant(reading: Reading, node: yaml.Node, **values: Any) -> Variant:
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

PLAN_KEYS: dict[str, Key] = {
    "dtplan": Key(NUMBER, "the version of the plan language: 1", required=True),
    "name": Key(TEXT, "the plan's name; default: the file's"),
    "extends": Key(TEXT, "a built-in plan's name, or a path beside this file; its rules hold unless this plan replaces them"),
    "serves": Key(list_of(TEXT), "the model classes that the plan is for"),
    "units": Key(map_of(UNIT), "what may be cut, by name"),
    "residual": Key(RESIDUAL_LAYOUT, "the layout of the residual stream"),
    "rules": Key(RULES, "path -> rule"),
    "variants": Key(list_of(VARIANT), "sections that hold for some configurations"),
    "ties": Key(TIES, "lists of parameters that are one tensor when the model ties them"),
    "names": Key(map_of(list_of(TEXT, at_least=1)), "module path -> its names in other versions and in checkpoints"),
    "te": Key(TE, "path -> TransformerEngine layers"),
    "fsdp": Key(FSDP, "how FSDP2 wraps"),
}
