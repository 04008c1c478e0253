"""Bound plans from their JSON form: what ``BoundPlan.to_json`` wrote, read back and checked."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dtplan._errors import DtplanError
from dtplan.plan.spec import Layout
from dtplan.planner.bound import SCHEMA_VERSION, BoundPlan

BESIDE = ("schema_version", "parameter_bytes", "ledger", "fused")
"""Keys that `dtplan show --json` writes beside those of the bound plan."""


class BoundJsonError(DtplanError, ValueError):
    """Data that is no bound plan, or one of another version."""


def bound_from_json(data: Any, where: str = "the bound plan") -> BoundPlan:
    """The bound plan of ``to_json``'s data; ``where`` names its origin in errors.

    Raises:
        BoundJsonError: another version, a key that is missing or unknown, or a value of the wrong kind; the text gives
            the path to it.
    """
    if not isinstance(data, dict) or "modules" not in data:
        raise BoundJsonError(f"{where}: no bound plan: it has no `modules`; dtplan show --json writes one")
    if (version := data.get("schema_version")) != SCHEMA_VERSION:
        raise BoundJsonError(
            f"{where}: written as version {version!r}, this dtplan reads version {SCHEMA_VERSION}: write it anew"
        )
    own = {key: value for key, value in data.items() if key not in BESIDE}
    bound: BoundPlan = _record(BoundPlan, own, where)
    return bound


def _record(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise BoundJsonError(f"{where}: expected a mapping, got {data!r:.60}")
    hints = get_type_hints(cls)
    known = {field.name: field for field in dataclasses.fields(cls)}
    needed = {
        n for n, f in known.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if wrong := sorted((data.keys() - known.keys()) | (needed - data.keys())):
        what = "unknown key" if wrong[0] in data else "missing key"
        raise BoundJsonError(f"{where}: {what} `{wrong[0]}`: was it written by another version of dtplan?")
    return cls(**{name: _value(hints[name], value, f"{where}, {name}") for name, value in data.items()})


def _value(kind: Any, data: Any, where: str) -> Any:
    """``data`` as the type hint ``kind`` says: of the few kinds that bound plans are made of."""
    origin, args = get_origin(kind), get_args(kind)
    fits = kind is Any or (origin is Literal and data in args) or (isinstance(kind, type) and type(data) is kind)
    if kind is Layout:
        data = _layout(data, where)
    elif dataclasses.is_dataclass(kind):
        data = _record(kind, data, where)
    elif origin is tuple and isinstance(data, list) and (args[-1] is ... or len(args) == len(data)):
        kinds = [args[0]] * len(data) if args[-1] is ... else args
        data = tuple(
            _value(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True))
        )
    elif origin is Mapping and isinstance(data, dict):
        data = {key: _value(args[1], item, f"{where}.{key}") for key, item in data.items()}
    elif origin in (Union, types.UnionType):
        kept = next(arg for arg in args if arg is not type(None))
        data = None if data is None else _value(kept, data, where)
    elif not fits:
        raise BoundJsonError(f"{where}: got {data!r:.60}, which does not belong there")
    return data


def _layout(data: Any, where: str) -> Layout:
    found = re.fullmatch(r"(S)\((-?\d+)\)|(R|P)", data) if isinstance(data, str) else None
    if found is None:
        raise BoundJsonError(f"{where}: got {data!r:.60}, a layout is R, P or S(dim)")
    return Layout("S", int(found[2])) if found[1] else Layout(found[3])
