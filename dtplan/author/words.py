"""How a parameter lies in the words of a rule: a unit, or sections; and what there are no words for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtplan.author.cutting import Cutting
from dtplan.author.parts import Lies, Part
from dtplan.author.units import Units


def units_of(units: Units, lies: Lies) -> dict[str, Any]:
    """The keys `unit` or `sections` of a rule; empty where every row is a unit of its own."""
    parts = lies.parts
    if len(parts) == 1:
        unit = units.of(parts[0].count, parts[0].rows)
        return {"unit": unit} if unit else {}
    return {"sections": [_section(units, part, parts) for part in parts]}


def _section(units: Units, part: Part, parts: Sequence[Part]) -> Any:
    if not part.whole:
        unit = units.of(part.count, part.rows)
        assert unit is not None  # `unsaid` told of it
        widths = {other.rows // other.count for other in parts if not other.whole}
        field = units.width(unit, part.rows // part.count) if len(widths) > 1 else None
        return {"unit": unit, "width": field} if field else unit
    width = next((other.rows // other.count for other in parts if not other.whole), part.rows)
    return {"count": max(1, part.rows // width), "whole": True, "grad": "sum"}


def unsaid(cutting: Cutting, units: Units) -> str:
    """What a plan has no words for: inputs of the block itself that are cut, sections that no field counts."""
    if not cutting.group.root and (names := [name for name, one in cutting.inputs.items() if one.kind == "cut"]):
        return f"the block's own input {names[0]} would have to be cut with its columns"
    for name, one in cutting.parameters.items():
        unknown = [part for part in one.parts if not part.whole and units.of(part.count, part.rows) is None]
        if len(one.parts) > 1 and unknown:
            return f"the {unknown[0].rows} rows of a section of {name} lie in a number of units that no field gives"
    return ""
