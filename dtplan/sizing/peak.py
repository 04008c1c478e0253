"""The largest number of bytes that are allocated at once in a step, and what they are.

A traced step of a few units is laid out over all of the model's, on top of what is held between steps, with FSDP2's
buffers in the order in which FSDP2 allocates and frees them (torch 2.11 to 2.13: ``FSDPParamGroup``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtplan.planner.bound import BoundPlan, dtype_bytes
from dtplan.planner.memory import (
    ROOT,
    Held,
    Optimizer,
    Precision,
    UnitBytes,
    held,
    local_shape,
    parameters_of,
    units_of,
)
from dtplan.sizing.traced import Traced

WORKSPACE = 64 << 20
"""What cuBLAS keeps on Hopper: 32 MiB for the thread of forward and for that of backward."""
WORKSPACE_TE = 32 << 20
"""What TransformerEngine adds to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes on one rank at the worst moment of a step."""

    total: int
    held: Held
    activations: int
    """Alive at the end of forward: what backward needs."""
    rest: int
    """Gathered weights, gradients on their way, and temporaries, at the worst moment, less what was freed."""
    where: str
    """When that is."""


class _Meter:
    """Bytes that are alive, and the most that ever were."""

    def __init__(self, live: int) -> None:
        self.live = self.most = live
        self.where = "between steps"

    def change(self, size: int) -> None:
        self.live += size

    def reach(self, above: int, where: str) -> None:
        """``above`` more bytes for a moment."""
        if self.live + above > self.most:
            self.most, self.where = self.live + above, where


def peak(
    traced: Traced, bound: BoundPlan, precision: Precision, optimizer: Optimizer = "adamw", *, times: int = 1
) -> Peak:
    """The peak of a steady step of rank 0: the optimizer's state is there, gradients are freed after each step.

    ``bound`` has the degrees; the traced step is of one of its ranks. ``times``: forward and backward in a step; from
    the second on there are gradients to which others are added.
    """
    state = held(bound, precision, optimizer)
    workspace = WORKSPACE + (WORKSPACE_TE if traced.te else 0)
    meter = _Meter(state.parameters + state.optimizer + workspace + (state.gradients if times > 1 else 0))
    fsdp = _Fsdp(meter, bound, precision, adds=times > 1)
    began = meter.live
    fsdp.gather(ROOT)
    _run(meter, traced, "forward", "before")
    for name, unit in zip(bound.fsdp_units, traced.units, strict=True):
        fsdp.gather(name)
        _run(meter, traced, "forward", unit, name)
        fsdp.free(name)
    _run(meter, traced, "forward", "after")
    fsdp.forward_ends()
    activations = meter.live - began - fsdp.gathered
    fsdp.prefetch(len(bound.fsdp_units) - 1)
    _run(meter, traced, "backward", "after")
    for index in reversed(range(len(bound.fsdp_units))):
        name, unit = bound.fsdp_units[index], traced.units[index]
        fsdp.use(index)
        _run(meter, traced, "backward", unit, name)
        fsdp.reduce(name)
    if "before" in traced.backward:
        _run(meter, traced, "backward", "before")
    fsdp.reduce(ROOT)
    fsdp.backward_ends()
    meter.reach(_optimizer_step(bound, precision, optimizer), "optimizer step")
    rest = meter.most - state.parameters - state.optimizer - activations  # gradients are a part of it
    return Peak(total=meter.most, held=state, activations=activations, rest=rest, where=meter.where)


def _run(meter: _Meter, traced: Traced, phase: str, segment: str, name: str = "") -> None:
    found = getattr(traced, phase)[segment]
    told = {"before": "embedding", "after": "head and loss"}.get(segment, name)
    meter.reach(found.above, f"{phase} of {told}")
    meter.change(found.change)


def _optimizer_step(bound: BoundPlan, precision: Precision, optimizer: Optimizer) -> int:
    """Temporaries of torch's loop over DTensors: two like the largest parameter, one at a time."""
    if optimizer == "sgd":
        return 0
    largest = max(
        (
            math.prod(bound.shard_shape(t))
            for t, _ in parameters_of(bound)
            if t.trainable and local_shape(t, bound.tp, 0)
        ),
        default=0,
    )
    return 2 * largest * dtype_bytes(precision.parameters)


class _Fsdp:
    """FSDP2's buffers. Without data-parallel ranks and with one dtype it is not there, and nothing happens."""

    def __init__(self, meter: _Meter, bound: BoundPlan, precision: Precision, *, adds: bool) -> None:
        self.adds = adds  # gradients are added to those that are there
        self.meter, self.units = meter, units_of(bound, precision)
        self.names = bound.fsdp_units
        shard = bound.degrees["shard"]
        self.on = shard * bound.degrees["replicate"] > 1 or precision.mixed
        self.collects = shard > 1  # a mesh of one copies each parameter into place
        self.frees = bound.fsdp["reshard_after_forward"] is not False
        self.gathered = 0
        self.buffer = 0  # of the last all-gather, freed when the next has been copied out
        self.reducing = 0  # of the last reduce-scatter, freed before the next
        self.ready = 0  # of the all-gather that was begun ahead

    def gather(self, name: str) -> None:
        """Forward: gather into a buffer, copy out; the buffer of the unit before is freed between."""
        if not self.on:
            return
        size = self.units[name].gathered
        before, self.buffer = self.buffer, size if self.collects else 0
        self.meter.change(size + self.buffer)
        self.gathered += size
        self.meter.reach(0, f"gathering {name or 'the root'}")
        self.meter.change(-before)

    def free(self, name: str) -> None:
        """After a unit's forward, and after its backward."""
        if self.on and self.frees and name != ROOT:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self.meter.change(-self.units[name].gathered)
        self.gathered -= self.units[name].gathered

    def forward_ends(self) -> None:
        """The last buffer is freed with the forward of the root."""
        self.meter.change(-self.buffer)
        self.buffer = 0

    def prefetch(self, index: int) -> None:
        """Backward: gather a unit ahead."""
        if self.on and self.frees and self.collects and index >= 0:
            self.ready = self.units[self.names[index]].gathered
            self.meter.change(self.ready)

    def use(self, index: int) -> None:
        """Copy out what was gathered ahead, and gather the next one."""
        if not (self.on and self.frees):
            return
        size = self.units[self.names[index]].gathered
        self.meter.change(size)
        self.gathered += size
        self.meter.reach(0, f"gathering {self.names[index]}")
        self.meter.change(-self.ready)
        self.ready = 0
        self.prefetch(index - 1)

    def reduce(self, name: str) -> None:
        """Free the unit, copy its gradients into a buffer, reduce and scatter."""
        unit: UnitBytes = self.units[name]
        if not self.on:
            self.meter.change(-unit.gradients if self.adds else 0)
            return
        self._drop(name)
        self.meter.change(unit.reduced - self.reducing)
        self.reducing = unit.reduced
        self.meter.reach(0, f"reducing {name or 'the root'}")
        self.meter.change((0 if self.adds else unit.kept) - unit.gradients)

    def backward_ends(self) -> None:
        """The last buffer is freed."""
        self.meter.change(-self.reducing)
        self.reducing = 0
