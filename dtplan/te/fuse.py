"""The door to this room: what `parallelize` is to fuse, and how it does so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from dtplan._errors import ApplyError
from dtplan.planner.agreement import together
from dtplan.planner.bound import BoundPlan
from dtplan.planner.styles import Tp
from dtplan.te import direct, overlap
from dtplan.te import engine as engines
from dtplan.te.choose import choose
from dtplan.te.engine import Engine
from dtplan.te.fused import Choice
from dtplan.te.install import install, seal
from dtplan.te.precision import quantise, recipe_of, recomputing, refuse_quantised_parameters
from dtplan.te.rebind import rebound

Te = Literal["auto", "require", "off"]
_NO_OVERLAP = (
    "overlap_tokens={} needs fused layers over two tp ranks, or over more with sequence_parallel: {}; leave it out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusing:
    """A bound plan with its fused layers, and TransformerEngine, if any of them is to be used."""

    bound: BoundPlan
    choice: Choice = field(default_factory=Choice)
    engine: Engine | None = None
    recipe: Any = None
    dtype: torch.dtype = torch.bfloat16
    overlap_tokens: int | None = None

    def install(self, model: nn.Module, tp: Tp) -> None:
        """Put the fused layers into the model."""
        if self.engine is None:
            return
        group, more = tp.mesh.get_group(), {}
        if self.overlap_tokens is not None and self.bound.sequence_parallel:
            fp8, width = self.recipe is not None, self.bound.width
            overlap.prepare(self.engine, tokens=self.overlap_tokens, width=width, ranks=tp.group.size, fp8=fp8)
            more = overlap.options_of(self.choice.fused)
        elif self.overlap_tokens is not None:
            size = self.overlap_tokens * self.bound.width * self.dtype.itemsize
            group = direct.over(group, together(lambda: direct.lane_of(tp.mesh.get_group(), size)))
        install(model, self.choice.fused, tp, self.engine, self.dtype, group, more)
        if self.recipe is not None:
            parts = tp.group.size if self.bound.sequence_parallel else 1
            quantise(model, self.recipe, self.engine, dist.group.WORLD, parts=parts)

    def seal(self, model: nn.Module) -> None:
        """After everything is wrapped around the fused layers."""
        if self.engine is not None:
            seal(model, self.choice.fused)

    @property
    def recomputing(self) -> Callable[[Any], Any] | None:
        """How a unit with FP8 layers is recomputed; None: as any other."""
        if self.engine is None or self.recipe is None:
            return None
        return functools.partial(recomputing, self.engine)


def fuse(
    model: nn.Module,
    bound: BoundPlan,
    *,
    te: Te,
    fp8: Any,
    device: str,
    dtype: torch.dtype,
    overlap_tokens: int | None = None,
) -> Fusing:
    """Decide what is fused; nothing is changed.

    Raises:
        ApplyError: ``te`` is no word that is known; a layer cannot be fused and ``te`` is ``"require"``; or ``fp8``
            or ``overlap_tokens`` is asked for and nothing is fused that could do it.
    """
    if te not in ("auto", "require", "off"):
        raise ApplyError(f"te={te!r}: give 'auto', 'require' or 'off'")
    engine = "te='off'" if te == "off" else usable(device, dtype)
    if isinstance(engine, str):
        if te == "require":
            raise ApplyError(f"te='require': {engine}")
        if fp8 is not None:
            raise ApplyError(f"fp8={fp8!r} needs fused layers: {engine}")
        if overlap_tokens is not None:
            raise ApplyError(_NO_OVERLAP.format(overlap_tokens, engine))
        return Fusing(bound=bound)
    if overlap_tokens is not None and (bound.tp == 1 or (bound.tp > 2 and not bound.sequence_parallel)):
        raise ApplyError(_NO_OVERLAP.format(overlap_tokens, f"tp is {bound.tp}"))
    recipe = None if fp8 is None else recipe_of(fp8, engine)
    refuse_quantised_parameters(model)
    choice = choose(model, bound, fp8=fp8 is not None)
    if te == "require" and (choice.kept or not choice.fused):
        kept = "; ".join(f"{k.where}: {k.reason}" for k in choice.kept) or f"plan {bound.plan} declares none in `te`"
        raise ApplyError(f"te='require': not every layer can be fused: {kept}")
    if fp8 is not None and not choice.fused:
        raise ApplyError(
            f"fp8={fp8!r} needs fused layers, and none can be used: " + "; ".join(k.reason for k in choice.kept)
        )
    if not choice.fused:
        return Fusing(bound=bound, choice=choice)
    if overlap_tokens is not None and not any(layer.communicates for layer in choice.fused):
        raise ApplyError(_NO_OVERLAP.format(overlap_tokens, "none of them sums over ranks"))
    return Fusing(
        bound=rebound(bound, choice.fused),
        choice=choice,
        engine=engine,
        recipe=recipe,
        dtype=dtype,
        overlap_tokens=overlap_tokens,
    )


def usable(device: str, dtype: torch.dtype) -> Engine | str:
    """TransformerEngine for layers on ``device`` that compute in ``dtype``, or why not."""
    engine = engines.find()
    if isinstance(engine, str):
        return engine
    if device not in engine.devices:
        return f"its layers run on {', '.join(sorted(engine.devices))}, the mesh is of {device}"
    if dtype not in engine.dtypes:
        allowed = ", ".join(sorted(str(d).removeprefix("torch.") for d in engine.dtypes))
        return f"its layers compute in {allowed}, the model in {str(dtype).removeprefix('torch.')}"
    return engine
