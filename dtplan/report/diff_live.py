"""A plan beside a model that `parallelize` sharded: what was applied, and what the model's parameters are now."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dtplan._errors import ApplyError
from dtplan.plan.spec import Plan, R
from dtplan.planner.apply import Applied, applied
from dtplan.planner.bind import bind
from dtplan.planner.bound import BoundPlan, BoundTensor
from dtplan.report.diff import Diff, Difference
from dtplan.report.diff_bound import diff_bound
from dtplan.report.words import spelled

_BIND_FIRST = (
    "bind the plan to the model as it was before parallelize, and compare that: "
    "dtplan.diff(dtplan.bind(model, plan, tp=...), sharded_model)"
)


def diff_live(
    plan: str | Path | Plan | BoundPlan | nn.Module, model: nn.Module, *, batch: int, sequence: int, dtype: str
) -> Diff:
    """The differences between ``plan`` and what ``model`` is; another sharded model may stand for the plan.

    Raises:
        ApplyError: the model was not parallelized, or cannot be built anew to bind the plan to it.
        PlanError, BindError: the plan is wrong or does not fit the model.
    """
    done = applied(model)
    wanted = _wanted(plan, model, done.planned)
    found = diff_bound(wanted, done.planned, batch=batch, sequence=sequence, dtype=dtype)
    now = tuple(_drifted(model, done))
    fused = sorted({m.kind.removeprefix("te.") for m in done.bound.modules if m.kind.startswith("te.")})
    notes = (f"layers of TransformerEngine stand in for modules: {', '.join(fused)}",) if fused else ()
    return Diff(
        before=found.before,
        after=f"live {found.after.removeprefix('plan ')}",
        differences=found.differences + now,
        totals=found.totals,
        notes=found.notes + notes,
    )


def _wanted(plan: str | Path | Plan | BoundPlan | nn.Module, model: nn.Module, have: BoundPlan) -> BoundPlan:
    if isinstance(plan, BoundPlan):
        return plan
    if isinstance(plan, nn.Module):
        return applied(plan).planned
    anew = _built_anew(model, have)
    return bind(
        anew,
        plan,
        **have.degrees,
        sequence_parallel=have.sequence_parallel,
        loss_parallel=have.loss_parallel,
    )


def _built_anew(model: nn.Module, have: BoundPlan) -> nn.Module:
    """The model before anything was done to it, on the meta device, from its class and config.

    A plan says nothing of dtypes and of what is frozen, so these are the model's.
    """
    config = getattr(model, "config", None)
    cls = next((c for c in type(model).__mro__ if c.__name__ == have.architecture), None)
    if config is None or cls is None:
        raise ApplyError(f"a {have.architecture} cannot be built anew from a config: {_BIND_FIRST}")
    with torch.device("meta"):
        anew: nn.Module = cls(config)
    names = dict(anew.named_modules())
    if missing := next((name for m in have.modules for name in m.names if name not in names), None):
        message = f"a {have.architecture} built anew from its config has no {missing}"
        raise ApplyError(f"{message}, which this model has: {_BIND_FIRST}")
    tensors = dict((*anew.named_parameters(remove_duplicate=False), *anew.named_buffers(remove_duplicate=False)))
    for _, name, tensor in have.tensors():
        if (own := tensors.get(name)) is not None:
            own.data = own.data.to(getattr(torch, tensor.dtype))
            own.requires_grad_(tensor.trainable and not tensor.buffer)
    return anew


def _drifted(model: nn.Module, done: Applied) -> Iterator[Difference]:
    """Parameters that are not, or no longer, as they were applied; those that only differ in a number together."""
    live = dict(model.named_parameters(remove_duplicate=False))
    planned = {name: tensor for _, name, tensor in done.bound.tensors() if not tensor.buffer}
    groups: dict[tuple[str, str, str | None, str | None], list[str]] = {}
    for name, what, before, after in _each(live, planned, done):
        groups.setdefault((re.sub(r"\b\d+\b", "*", name), what, before, after), []).append(name)
    for (_, what, before, after), names in groups.items():
        yield Difference(path=spelled(names), what=what, before=before, after=after)


def _each(
    live: Mapping[str, nn.Parameter], planned: Mapping[str, BoundTensor], done: Applied
) -> Iterator[tuple[str, str, str | None, str | None]]:
    for name in dict.fromkeys([*planned, *live]):
        tensor, parameter = planned.get(name), live.get(name)
        if parameter is None:
            yield name, "parameter", "applied", None
        elif tensor is None:
            yield name, "parameter", None, f"{list(parameter.shape)} {_placement(parameter)}, under no rule"
        else:
            due, have = (_facts(one) for one in (tensor, parameter))
            for what in due:
                if (done.bound.tp > 1 or what != "placement") and due[what] != have[what]:
                    yield name, what, due[what], have[what]


def _facts(tensor: BoundTensor | nn.Parameter) -> dict[str, str]:
    if isinstance(tensor, BoundTensor):
        dim = tensor.placement.dim
        placement = str(R) if dim is None else f"S({dim % len(tensor.shape)})"
        shape, trainable = list(tensor.shape), tensor.trainable
    else:
        placement, shape, trainable = _placement(tensor), list(tensor.shape), tensor.requires_grad
    return {"placement": placement, "shape": str(shape), "trainable": "yes" if trainable else "no"}


def _placement(parameter: nn.Parameter) -> str:
    """The placement on tp of a live parameter, in the plan's letters."""
    if not isinstance(parameter, DTensor):
        return "no DTensor"
    names = parameter.device_mesh.mesh_dim_names or ()
    if "tp" not in names:
        return "not on tp"
    placement = parameter.placements[names.index("tp")]
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "P" if placement.is_partial() else "R"
