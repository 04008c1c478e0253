"""FSDP2 around the sharded modules: a unit at a time, then the root; activation checkpointing inside."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from dtplan._errors import ApplyError, DegreesError
from dtplan.planner.bound import BoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpOptions:
    """How FSDP2 is to wrap; None takes what the plan's `fsdp` section says."""

    mixed_precision: MixedPrecisionPolicy | None = None
    reshard_after_forward: bool | int | None = None
    cpu_offload: bool = False


def data_mesh(mesh: DeviceMesh, *, needed: bool) -> DeviceMesh | None:
    """The part of ``mesh`` over which FSDP2 works: (replicate, shard) or shard; None when it has nothing to do.

    A size-1 shard axis is enough for mixed precision and offloading.

    Raises:
        DegreesError: something needs FSDP2 and the mesh has no ``shard`` axis.
    """
    names = mesh.mesh_dim_names or ()
    replicas = "replicate" in names and mesh["replicate"].size() > 1
    if "shard" not in names:
        if needed or replicas:
            what = "replicas" if replicas else "mixed precision and CPU offload"
            raise DegreesError(
                f"the mesh has the axes {', '.join(names)}; {what} need a `shard` axis, of size 1 if nothing is to be "
                "sharded: init_device_mesh(device, (1, 2), mesh_dim_names=('shard', 'tp'))"
            )
        return None
    if replicas:
        return mesh["replicate", "shard"]
    return mesh["shard"] if mesh["shard"].size() > 1 or needed else None


def checkpoint_units(model: nn.Module, bound: BoundPlan, every: int, recomputing: Callable[[Any], Any]) -> None:
    """Recompute every ``every``-th unit's activations in backward; its forward is wrapped in place."""
    for name in bound.fsdp_units[::every]:
        unit = model.get_submodule(name)
        unit.forward = _without_cache(name, unit.forward, recomputing(unit.forward))


def _without_cache(name: str, once: Any, twice: Any) -> Any:
    """``twice`` without transformers' cache of keys and values, or ``once`` with it where no gradients are wanted.

    A cache would keep what recomputation lets go, and the second run would write to it again.
    """
    kind: Any = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())

    def none(value: Any) -> Any:
        if not isinstance(value, kind):
            return value
        if length := value.get_seq_length():
            raise ApplyError(
                f"{name} is recomputed, and was given a cache that holds {length} tokens: call the model without it, "
                "or under torch.no_grad()"
            )
        return None

    @functools.wraps(once)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return once(*args, **kwargs)
        return twice(*(none(value) for value in args), **{key: none(value) for key, value in kwargs.items()})

    return forward


def recomputed(forward: Any) -> Any:
    """``forward``, run again in backward; torch restores its random numbers."""

    def twice(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return twice


def shard_with_fsdp(model: nn.Module, bound: BoundPlan, mesh: DeviceMesh, options: FsdpOptions) -> None:
    """Wrap every unit and the root; parameters become DTensors on the axes of ``mesh`` and tp."""
    policy = options.mixed_precision or _policy_of(bound)
    pinned = mesh.device_type != "cpu"  # pinned memory is an accelerator's
    offload = CPUOffloadPolicy(pin_memory=pinned) if options.cpu_offload else OffloadPolicy()
    reshard = (
        bound.fsdp["reshard_after_forward"] if options.reshard_after_forward is None else options.reshard_after_forward
    )
    for name in bound.fsdp_units:
        unit = model.get_submodule(name)
        fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)


def _policy_of(bound: BoundPlan) -> MixedPrecisionPolicy:
    dtypes = {key: getattr(torch, bound.fsdp[key]) for key in ("param_dtype", "reduce_dtype") if bound.fsdp[key]}
    return MixedPrecisionPolicy(**dtypes)


def precision(name: str | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy | None:
    """``"bf16"`` or ``"fp16"``: compute in it, keep parameters and reduce gradients in float32.

    Raises:
        DegreesError: another word.
    """
    if name is None or isinstance(name, MixedPrecisionPolicy):
        return name
    dtypes = {
        "bf16": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "fp16": torch.float16,
        "float16": torch.float16,
    }
    if name not in dtypes:
        raise DegreesError(f"mixed_precision={name!r}: give 'bf16', 'fp16', a MixedPrecisionPolicy or None")
    return MixedPrecisionPolicy(param_dtype=dtypes[name], reduce_dtype=torch.float32)
