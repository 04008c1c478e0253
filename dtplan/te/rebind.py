"""The bound plan with fused layers in place of the modules that they replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from dtplan.planner.bound import BoundModule, BoundPlan
from dtplan.te.fused import Fused


def rebound(bound: BoundPlan, fused: Iterable[Fused]) -> BoundPlan:
    """``bound`` as it is applied: entries of replaced modules are gone or empty, fused layers are where these were."""
    entries: dict[str, BoundModule] = {name: module for module in bound.modules for name in module.names}
    places = {name: place for place, name in enumerate(entries)}
    for layer in fused:
        if layer.layer != "DotProductAttention":
            places.setdefault(layer.name, places[next(iter(layer.columns), layer.name)])
            _replace(entries, layer)
    groups: dict[BoundModule, list[str]] = {}
    for name in sorted(entries, key=places.__getitem__):
        groups.setdefault(dataclasses.replace(entries[name], names=()), []).append(name)
    modules = tuple(dataclasses.replace(module, names=tuple(names)) for module, names in groups.items())
    return dataclasses.replace(bound, modules=modules)


def _replace(entries: dict[str, BoundModule], layer: Fused) -> None:
    region = entries.get(layer.region or "")
    for name in (*layer.columns, layer.row or ""):
        entries.pop(name, None)
    if layer.norm is not None:
        entries[layer.norm] = dataclasses.replace(entries[layer.norm], tensors=())
    if layer.region is not None and region is not None:
        # what prepared the region's input is done inside the fused layer, or around it
        entries[layer.region] = dataclasses.replace(region, inputs=())
    entries[layer.name] = BoundModule(
        pattern=layer.pattern,
        names=(),
        kind=f"te.{layer.layer}",
        style="te",
        rule=layer.rule,
        tensors=tuple(tensor.bound for tensor in layer.tensors),
        inputs=layer.inputs,
        outputs=layer.outputs,
    )
