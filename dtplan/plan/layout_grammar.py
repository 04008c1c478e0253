"""The plan language: layouts, and how a module's inputs and outputs change from one to another."""

from __future__ import annotations

import re
from typing import Any

import yaml

from dtplan._errors import did_you_mean
from dtplan.plan.spec import LOGITS, RESIDUAL, Layout, Move, P, R, S
from dtplan.plan.syntax import SWITCH, TEXT, Key, Kind, Reading, entries, one_of, record, shown, then

_LAYOUT = re.compile(r"S\((-?[0-9]{1,2})\)")
_WORDS = {"R": R, "P": P, "residual": RESIDUAL, "logits": LOGITS}
_LAYOUT_SAYS = "a layout: R, S(dim), P, residual or logits"
_OPERATIONS = {
    "input": {
        "keep": Move(),
        "sum": Move(src=R, dst=R),
        "gather": Move(src=S(-1), dst=R),
        "slice": Move(src=R, dst=S(-1)),
    },
    "output": {
        "keep": Move(),
        "sum": Move(src=P, dst=R),
        "gather": Move(src=S(-1), dst=R),
        "scatter": Move(src=P, dst=S(-1)),
    },
}

Moves = tuple[tuple[str | int | None, Move], ...]


def _layout(reading: Reading, node: yaml.Node, text: str, says: str = _LAYOUT_SAYS) -> Layout | None:
    if text in _WORDS:
        return _WORDS[text]
    if found := _LAYOUT.fullmatch(text):
        return S(int(found[1]))
    hint = did_you_mean(text, [*_WORDS, "S(1)"]) or "S(1) is the sequence dim of [batch, sequence, hidden]"
    reading.add("DTP207", node, f"expected {says}, got {shown(node)}", hint)
    return None


_layout_schema = {"type": "string", "pattern": r"^(R|P|residual|logits|S\(-?[0-9]{1,2}\))$"}
LAYOUT: Kind[Layout] = then(TEXT, _layout, _layout_schema)


def _move_kind(side: str) -> Kind[Move]:
    operations = _OPERATIONS[side]
    words = ", ".join(operations)

    def word(reading: Reading, node: yaml.Node, text: str) -> Move | None:
        if text in operations:
            return operations[text]
        layout = _layout(reading, node, text, f"{_LAYOUT_SAYS}; or one of {words}")
        return None if layout is None else Move(dst=layout)

    def build(_reading: Reading, _node: yaml.Node, **values: Any) -> Move:
        move: Move = values.get("to", Move())
        return Move(
            src=values.get("from", move.src),
            dst=move.dst,
            unit=values.get("unit"),
            sum_grad_of_last=values.get("sum_grad_of_last"),
            global_shape=values.get("global_shape", False),
        )

    text = then(TEXT, word, {"anyOf": [_layout_schema, {"enum": list(operations)}]})
    says = f"a layout, one of {words}, or {{from: layout, to: layout}}"
    keys = record(_move_keys(side, text, words), build, f"A change of layout at a module's {side}.")
    return one_of(says, text=text, keys=keys)


def _move_keys(side: str, to: Kind[Move], words: str) -> dict[str, Key]:
    if side == "input":
        return {
            "from": Key(LAYOUT, "the layout in which the value arrives (default: residual)"),
            "to": Key(to, f"the layout that it is given; or one of {words}"),
            "unit": Key(TEXT, "what is cut where the dim holds groups of these units, as [batch x heads, ...]"),
        }
    return {
        "from": Key(LAYOUT, "the layout in which it is computed (default: what the style gives)"),
        "to": Key(to, f"the layout that it is given; or one of {words}"),
        "global_shape": Key(SWITCH, "hand out a DTensor, so that code outside sees the global shape of a cut value"),
        "sum_grad_of_last": Key(TEXT, "a config field n: sum only the gradient of the last n features over ranks"),
    }


_MOVE_KEYS = ("from", "to", "unit", "global_shape", "sum_grad_of_last")


def per_value(side: str) -> Kind[Moves]:
    """``input`` and ``output``: one move for the first value, or a mapping from name or position to move."""
    move = _move_kind(side)
    first: int | None = 0 if side == "input" else None
    named = "its argument or position" if side == "input" else "its position"

    def read_one(reading: Reading, node: yaml.Node) -> Moves | None:
        single = move.read(reading, node)
        return None if single is None else ((first, single),)

    def read_map(reading: Reading, node: yaml.Node) -> Moves | None:
        if any(key.value in _MOVE_KEYS for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            return read_one(reading, node)
        moves: list[tuple[str | int | None, Move]] = []
        for key, value in entries(reading, node, move.says):
            at = _position(key.value, side)
            if at is None:
                message = f"an {side} is named by {named}, got {shown(key)}"
                reading.add("DTP202", key, message, f"0 is the first {side}")
            if (given := move.read(reading, value)) is not None and at is not None:
                moves.append((at, given))
        return tuple(moves)

    argument = rf"^([0-9]{{1,2}}|(?!({'|'.join(_MOVE_KEYS)})$)[A-Za-z_][A-Za-z0-9_]*)$"
    names = argument if side == "input" else r"^[0-9]{1,2}$"
    by_name = {"type": "object", "patternProperties": {names: move.schema}, "additionalProperties": False}
    says = f"{move.says}, or a mapping from {named} to one of these"
    return one_of(
        says,
        text=Kind(says, read_one, move.schema),
        keys=Kind(says, read_map, {"anyOf": [move.schema, by_name]}),
    )


def _position(text: str, side: str) -> str | int | None:
    if re.fullmatch(r"[0-9]{1,2}", text):
        return int(text)
    return text if side == "input" and text.isascii() and text.isidentifier() else None
