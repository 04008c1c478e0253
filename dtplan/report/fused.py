"""``dtplan show --te``: which modules become fused layers, and why the others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dtplan.planner.bound import BoundPlan
from dtplan.te.choose import choose
from dtplan.te.engine import find
from dtplan.te.fused import Choice, Fused
from dtplan.te.rebind import rebound


def choice_of(model: nn.Module, bound: BoundPlan, *, fp8: bool) -> Choice:
    """What would be fused on a machine with TransformerEngine."""
    return choose(model, bound, fp8=fp8)


def counted(bound: BoundPlan, choice: Choice | None) -> BoundPlan:
    """The bound plan whose collectives are counted: with the fused layers, if there is a choice."""
    return bound if choice is None else rebound(bound, choice.fused)


def as_json(choice: Choice) -> dict[str, Any]:
    """The choice, with what this machine has."""
    fused = [{"module": f.pattern, "layer": f.layer, "parts": list(_parts(f))} for f in _once(choice)]
    kept = [{"where": k.where, "layer": k.layer, "reason": k.reason} for k in choice.kept]
    return {"fused": fused, "kept": kept, "here": here()}


def lines(choice: Choice) -> Iterator[str]:
    """A line a module."""
    counts = Counter(layer.pattern for layer in choice.fused)
    yield f"TransformerEngine: {here()}"
    for layer in _once(choice):
        inside = ", its collectives inside" if layer.communicates else ""
        parts = ", ".join(_parts(layer)) or layer.pattern.rpartition(".")[2]
        yield f"  {layer.pattern} x{counts[layer.pattern]}: {layer.layer} <- {parts}{inside}"
    for kept in choice.kept:
        yield f"  kept: {kept.where}: {kept.reason}"


def here() -> str:
    """What this machine has."""
    engine = find()
    if isinstance(engine, str):
        return f"not on this machine: {engine}"
    if not torch.cuda.is_available():
        return f"{engine.version} is installed; there is no GPU here"
    return f"{engine.version} on {torch.cuda.get_device_name()}"


def _once(choice: Choice) -> list[Fused]:
    """One of all that are alike."""
    return list({layer.pattern: layer for layer in reversed(choice.fused)}.values())[::-1]


def _parts(layer: Fused) -> Iterator[str]:
    """The names of the modules that it takes the place of, below their unit."""
    for part in layer.parts():
        yield part.removeprefix(layer.unit + ".")
