"""Bytes that a rank holds: parameters, gradients, optimizer state. Arithmetic on a bound plan, no tensors.

Exact to the byte for every rank: a tied parameter counts once, uneven vocabularies give ranks different rows, and FSDP2
pads dim 0 of what it stores and of what it reduces to a multiple of the shard degree (torch 2.11 to 2.14:
``FSDPParam._init_sharded_param``, ``foreach_reduce``), while optimizer state has the rows that are there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from dtplan.plan.spec import R
from dtplan.planner.bound import BoundModule, BoundPlan, BoundTensor, dtype_bytes
from dtplan.planner.collectives import chunk_sizes

Optimizer = Literal["adamw", "sgd", "momentum"]
MOMENTS: dict[Optimizer, int] = {"adamw": 2, "sgd": 0, "momentum": 1}
"""State tensors like the parameter that each optimizer of torch keeps."""
ROOT = ""
"""The name of the unit of everything that lies in no FSDP2 unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes by torch's names: of the parameters that are kept, of the computation, and of FSDP2's reductions."""

    parameters: str = "bfloat16"
    compute: str = "bfloat16"
    reduce: str = "bfloat16"

    @classmethod
    def of(cls, dtype: str, mixed: str | None = None) -> Precision:
        """Everything in ``dtype``, or with ``mixed`` parameters and reductions in float32 and computation in it."""
        if mixed is not None:
            return cls(parameters="float32", compute=mixed, reduce="float32")
        return cls(parameters=dtype, compute=dtype, reduce=dtype)

    @property
    def mixed(self) -> bool:
        """Whether FSDP2 hands the layers another dtype than the one that is kept."""
        return self.parameters != self.compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes on one rank between steps."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all of it, gradients included."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Bytes of one FSDP2 unit on a rank, while it is gathered and while it is reduced."""

    name: str
    gathered: int
    """Its parameters in the dtype of the computation, padded: as large as the buffer that they are gathered into."""
    gradients: int
    """Its gradients before they are reduced, in the dtype of the computation."""
    reduced: int
    """The buffer that is reduced and scattered."""
    kept: int
    """Its gradients afterwards, this rank's part."""


def held(bound: BoundPlan, precision: Precision, optimizer: Optimizer = "adamw", at: tuple[int, int] = (0, 0)) -> Held:
    """Bytes of the rank with the numbers ``at`` on the axes tp and shard; rank (0, 0) holds the most."""
    size = dtype_bytes(precision.parameters)
    parameters = gradients = moments = 0
    for tensor, repeats in parameters_of(bound):
        local = local_shape(tensor, bound.tp, at[0])
        stored = math.prod(_padded(local, bound.degrees["shard"])) * size * repeats
        parameters += stored
        if tensor.trainable:
            gradients += stored
            own = math.prod(_own(local, bound.degrees["shard"], at[1])) * size
            moments += (MOMENTS[optimizer] * own + (4 if optimizer == "adamw" else 0)) * repeats  # and a step count
    return Held(parameters=parameters, gradients=gradients, optimizer=moments)


def units_of(bound: BoundPlan, precision: Precision, tp_rank: int = 0) -> dict[str, UnitBytes]:
    """The FSDP2 units by name, and the root's under ``ROOT``."""
    shard, size = bound.degrees["shard"], dtype_bytes(precision.compute)
    gathered: dict[str, int] = dict.fromkeys((*bound.fsdp_units, ROOT), 0)
    trained: dict[str, int] = dict(gathered)
    plain: dict[str, int] = dict(gathered)
    for module in bound.modules:
        names = [unit_of(name, gathered) for name in module.names]
        for tensor in module.tensors:
            if tensor.buffer or tensor.tied_to is not None:
                continue
            local = local_shape(tensor, bound.tp, tp_rank)
            whole, own = math.prod(_padded(local, shard)) * shard, math.prod(local)
            for unit in names:
                gathered[unit] += whole
                if tensor.trainable:
                    trained[unit] += whole
                    plain[unit] += own
    reduce, keep = dtype_bytes(precision.reduce), dtype_bytes(precision.parameters)
    return {
        unit: UnitBytes(
            name=unit,
            gathered=gathered[unit] * size,
            gradients=plain[unit] * size,
            reduced=trained[unit] * reduce,
            kept=trained[unit] // shard * keep,
        )
        for unit in gathered
    }


def unit_of(name: str, units: Collection[str]) -> str:
    """The FSDP2 unit that a module lies in, or ``ROOT``."""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name


def parameters_of(bound: BoundPlan) -> Iterator[tuple[BoundTensor, int]]:
    """Every parameter, a tied one once, and in how many modules there is one like it."""
    for module in bound.modules:
        for tensor in module.tensors:
            if not tensor.buffer and tensor.tied_to is None:
                yield tensor, len(module.names)


def whole_modules(model: nn.Module) -> tuple[BoundModule, ...]:
    """What a bound plan would have of a model without a plan: all of it whole, ties under their first names."""
    first: dict[int, str] = {}
    found = []
    for name, module in model.named_modules():
        tensors = []
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}" if name else leaf
            owner = first.setdefault(id(parameter), full)
            tensors.append(
                BoundTensor(
                    name=leaf,
                    shape=tuple(parameter.shape),
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    placement=R,
                    local_shape=tuple(parameter.shape),
                    trainable=parameter.requires_grad,
                    tied_to=None if owner == full else owner,
                )
            )
        if tensors:
            kind = type(module).__name__
            found.append(
                BoundModule(pattern=name, names=(name,), kind=kind, style=None, rule="none", tensors=tuple(tensors))
            )
    return tuple(found)


def local_shape(tensor: BoundTensor, tp: int, rank: int) -> tuple[int, ...]:
    """The part of tp rank ``rank``."""
    dim = tensor.placement.dim
    if dim is None or tensor.sections:  # sections are divided by the degree, so all ranks have as much
        return tensor.local_shape
    dim %= len(tensor.shape)
    return (*tensor.shape[:dim], chunk_sizes(tensor.shape[dim], tp)[rank], *tensor.shape[dim + 1 :])


def _padded(local: tuple[int, ...], shard: int) -> tuple[int, ...]:
    return (-(-local[0] // shard), *local[1:]) if local else (1,)


def _own(local: tuple[int, ...], shard: int, rank: int) -> tuple[int, ...]:
    return (chunk_sizes(local[0], shard)[rank], *local[1:]) if local else ()
