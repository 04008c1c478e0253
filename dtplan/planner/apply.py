"""Apply a plan to a model: check everything, then shard, then wrap; in the one order that composes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import parallelize_module

from dtplan._errors import ApplyError, DegreesError
from dtplan.plan.spec import Plan
from dtplan.planner.agreement import check_same_inputs, check_same_model, check_same_weights, together
from dtplan.planner.bind import bind
from dtplan.planner.bound import BoundModule, BoundPlan
from dtplan.planner.clip import mark_shared
from dtplan.planner.collectives import Group
from dtplan.planner.degrees import AXES
from dtplan.planner.dropout import add_streams
from dtplan.planner.fsdp import FsdpOptions, checkpoint_units, data_mesh, precision, recomputed, shard_with_fsdp
from dtplan.planner.generation import cache_own_heads, draw_alike
from dtplan.planner.loss import causal_lm_loss
from dtplan.planner.stored import Stored
from dtplan.planner.styles import Scope, Sharded, Tp
from dtplan.te.fuse import Fusing, fuse
from dtplan.te.precision import Recipe

M = TypeVar("M", bound=nn.Module)
_ATTRIBUTE = "_dtplan_applied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What was done to a model: the bound plan, the mesh on which it lies, and whether it is kept on the host."""

    bound: BoundPlan
    planned: BoundPlan
    """As the plan alone says it, before layers were fused."""
    mesh: DeviceMesh
    cpu_offload: bool = False
    stored: Mapping[str, Stored] = field(default_factory=dict)
    """Parameter -> how its fused dim is put together, for those that have one."""


def parallelize(
    model: M,
    mesh: DeviceMesh,
    plan: str | Path | Plan = "auto",
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    mixed_precision: Literal["bf16", "fp16"] | MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    cpu_offload: bool = False,
    activation_checkpointing: bool | int = False,
    te: Literal["auto", "require", "off"] = "auto",
    fp8: Recipe | Any | None = None,
    overlap_tokens: int | None = None,
) -> M:
    """Shard ``model`` in place over ``mesh`` as ``plan`` says, and return it.

    Collective over all ranks. The model may be live (the same weights on every rank) or on the meta device.
    Afterwards every parameter is a DTensor and keeps its name, its ties and its ``requires_grad``.

    Args:
        model: an unmodified model whose class the plan serves.
        mesh: axes named ``replicate``, ``shard`` and ``tp``, in this order, those that are needed; a lone ``tp``
            is enough. FSDP2 wraps over ``replicate`` and ``shard``.
        plan: ``"auto"`` (the built-in plan for the model's class), a built-in's name, a YAML file, or a Plan.
        sequence_parallel: cut the residual stream along the sequence between the blocks; the sequence length
            must be a multiple of the tp degree.
        loss_parallel: keep the logits cut along the vocabulary (a DTensor); the model's own loss and
            ``dtplan.cross_entropy``, ``log_probs`` and ``entropy`` work on the parts.
        mixed_precision: ``"bf16"`` computes in bfloat16 with float32 parameters and reductions.
        reshard_after_forward: free a unit's gathered weights after forward; None is what the plan says.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        activation_checkpointing: recompute the plan's units in backward; k recomputes every k-th of them.
        te: ``"auto"`` puts TransformerEngine's fused layers where the plan names them and they compute the same;
            ``"require"`` refuses if one of them cannot be used; ``"off"`` uses none.
        fp8: ``"current"``, ``"delayed"`` or ``"block"`` (or a recipe of TransformerEngine): fused layers multiply
            in FP8. Needs fused layers.
        overlap_tokens: the tokens of every batch of a tp group (rows x sequence): fused layers then do their
            collectives beside their matrix products. Needs GPUs of one host. With sequence_parallel, by
            TransformerEngine's userbuffers: every batch must have exactly so many tokens; set UB_SKIPMC=1 where
            NVLink multicast is not to be used. Without, for two tp ranks, as copies from GPU to GPU: batches may be
            smaller; leave CUDA_DEVICE_MAX_CONNECTIONS unset.

    Raises:
        PlanError, BindError: the plan is wrong or does not fit; nothing was changed.
        DegreesError: the mesh lacks an axis.
        ApplyError: a second call on one model, or ranks that hold different weights; nothing was changed.
    """
    options = FsdpOptions(
        mixed_precision=precision(mixed_precision),
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
    )

    def prepare() -> tuple[BoundPlan, Fusing, DeviceMesh | None]:
        _refuse_second_call(model)
        sizes = _axis_sizes(mesh)
        found = bind(model, plan, **sizes, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
        fusing = fuse(
            model,
            found,
            te=te,
            fp8=fp8,
            device=mesh.device_type,
            dtype=_computes_in(model, found, options),
            overlap_tokens=overlap_tokens,
        )
        bound = fusing.bound
        if every < 0 or (every and not bound.fsdp_units):
            units = f"{len(bound.fsdp_units)} units (`fsdp: {{units: [...]}}`)"
            raise ApplyError(
                f"activation_checkpointing={activation_checkpointing!r} recomputes units; {bound.plan} has {units}"
            )
        needed = options.mixed_precision is not None or cpu_offload or bound.fsdp["param_dtype"] is not None
        return found, fusing, data_mesh(mesh, needed=needed)

    every = int(activation_checkpointing)
    planned, fusing, data = together(prepare)
    bound = fusing.bound
    check_same_model(model, bound.json_text())
    check_same_weights(model, mesh)
    stored: Mapping[str, Stored] = {}
    if "tp" in (mesh.mesh_dim_names or ()):
        tp = shard_on_tp(model, fusing, mesh["tp"], by_unit=data is not None or every > 0)
        model.forward = _checking_first_batch(model.forward, tp)
        add_streams(model, bound, tp)
        draw_alike(model, mesh["tp"])
        cache_own_heads(model, mesh["tp"])
        fusing.seal(model)
        stored = tp.stored
    if every:
        checkpoint_units(model, bound, every, fusing.recomputing or recomputed)
    if data is not None:
        shard_with_fsdp(model, bound, data, options)
    _mark_shared(model, stored, mesh)
    guard(model, bound)
    done = Applied(bound=bound, planned=planned, mesh=mesh, cpu_offload=cpu_offload, stored=stored)
    setattr(model, _ATTRIBUTE, done)
    return model


def applied(model: nn.Module) -> Applied:
    """What `parallelize` did to ``model``.

    Raises:
        ApplyError: the model was not parallelized.
    """
    found = getattr(model, _ATTRIBUTE, None)
    if not isinstance(found, Applied):
        raise ApplyError(f"{type(model).__name__} is not parallelized: call dtplan.parallelize(model, mesh) first")
    return found


def stored_parameters(model: nn.Module) -> Mapping[str, Stored]:
    """Parameters of a sharded model whose fused dim is put together rank by rank; none for any other model."""
    found = getattr(model, _ATTRIBUTE, None)
    return found.stored if isinstance(found, Applied) else {}


def _axis_sizes(mesh: DeviceMesh) -> dict[str, int]:
    names = mesh.mesh_dim_names
    if not names:
        raise DegreesError("the mesh has no axis names; make it with mesh_dim_names=('tp',), or ('shard', 'tp')")
    unknown = [name for name in names if name not in AXES]
    in_order = [name for name in AXES if name in names]
    if unknown or list(names) != in_order:
        raise DegreesError(f"the mesh has the axes {', '.join(names)}; the axes are {', '.join(AXES)}, in this order")
    return {name: mesh[name].size() for name in names}


def _refuse_second_call(model: nn.Module) -> None:
    if hasattr(model, _ATTRIBUTE):
        raise ApplyError(f"{type(model).__name__} is parallelized already; build the model anew to shard it otherwise")


def _computes_in(model: nn.Module, bound: BoundPlan, options: FsdpOptions) -> torch.dtype:
    """The dtype in which the layers' weights reach their kernels."""
    asked = options.mixed_precision.param_dtype if options.mixed_precision else None
    planned = bound.fsdp["param_dtype"]
    if asked is None and planned and options.mixed_precision is None:
        asked = getattr(torch, planned)
    return asked or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def shard_on_tp(model: nn.Module, fusing: Fusing, mesh: DeviceMesh, *, by_unit: bool) -> Tp:
    """Put the fused layers in, cut parameters and put the moves around modules; nothing is sent between ranks.

    ``by_unit``: gradients of whole parameters are summed once a unit (FSDP2 frees them after it) and not once a model.
    """
    bound = fusing.bound
    tp = Tp(mesh=mesh, group=Group.of(mesh.get_group()))
    tp.groups = _groups(bound, tp)
    fusing.install(model, tp)
    tp.bound = {name: module for module, name in _entries(bound)}
    styles = {name: Sharded(module, name, tp) for name, module in tp.bound.items()}
    tp.names = {id(model.get_submodule(name)): name for name in styles}
    root = styles.pop("", None)
    parallelize_module(model, mesh, dict(styles))
    if root is not None:
        parallelize_module(model, mesh, root)
    _add_scopes(model, bound, bound.fsdp_units if by_unit else (), tp)
    tp.made.clear()  # the wrapped forwards keep tp, and FSDP2 replaces the parameters: these would stay beside them
    return tp


def _groups(bound: BoundPlan, tp: Tp) -> dict[int, Group]:
    """For each number of ranks that share parameters, the neighbours among which this rank is."""
    numbers = {n for module in bound.modules for tensor in module.tensors for n in tensor.summed(tp.group.size)}
    ranks = tp.mesh.mesh.flatten().tolist()
    groups = {tp.group.size: tp.group}
    for number in sorted(numbers - groups.keys()):
        first = tp.group.rank // number * number
        neighbours = ranks[first : first + number]
        groups[number] = Group.of(dist.new_group(neighbours, use_local_synchronization=True))
    return groups


def _entries(bound: BoundPlan) -> Iterator[tuple[BoundModule, str]]:
    for module in bound.modules:
        for name in module.names:
            yield module, name


def _add_scopes(model: nn.Module, bound: BoundPlan, units: tuple[str, ...], tp: Tp) -> None:
    """Sum the gradients of whole parameters once a unit (FSDP2 frees them after it), or once for the model.

    Those of parts of matrices once a unit of the plan in any case: they are large.
    """
    scopes: dict[str, Scope] = {}
    for module, name in _entries(bound):
        owner = model.get_submodule(name)
        for tensor in module.tensors:
            for shared, spans in tensor.summed(tp.group.size).items():
                among = bound.fsdp_units if spans else units
                unit = next((unit for unit in among if name == unit or name.startswith(unit + ".")), "")
                owners = scopes.setdefault(unit, Scope()).owners.setdefault(shared, [])
                owners.append((owner, tensor.name, tp.views[name], spans))
    for unit, scope in scopes.items():
        target = model.get_submodule(unit)
        target.forward = _in_scope(target.forward, scope, tp)


def _in_scope(forward: Callable[..., Any], scope: Scope, tp: Tp) -> Callable[..., Any]:
    @functools.wraps(forward)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with scope.entered(tp):
            return forward(*args, **kwargs)

    return scoped


def _checking_first_batch(forward: Callable[..., Any], tp: Tp) -> Callable[..., Any]:
    checked = False

    @functools.wraps(forward)
    def first_checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if not checked:
            checked = True
            check_same_inputs([*args, *(kwargs[key] for key in sorted(kwargs))], tp.mesh)
        return forward(*args, **kwargs)

    return first_checked


def _mark_shared(model: nn.Module, stored: Mapping[str, Stored], mesh: DeviceMesh) -> None:
    """Tell clipping of rows that several tp ranks keep; FSDP2 cuts dim 0 of what each of them has, as torch.chunk."""
    shards = mesh["shard"].size() if "shard" in (mesh.mesh_dim_names or ()) else 1
    number = mesh.get_local_rank("shard") if shards > 1 else 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        one = stored.get(name)
        if one is None or not one.shared:
            continue
        step = -(-one.rows // shards) if one.dim == 0 else one.rows
        first = step * number if one.dim == 0 else 0
        inside = [(max(a, first), min(a + b, first + step), copies) for a, b, copies in one.spans()]
        mark_shared(parameter, [(one.dim, a - first, b - a, copies) for a, b, copies in inside if a < b])


def guard(model: nn.Module, bound: BoundPlan) -> None:
    """The model's own loss reads logits that are cut; what cannot work on a sharded model says so."""
    if bound.loss_parallel and hasattr(type(model), "loss_function"):
        model.loss_function = causal_lm_loss  # type: ignore[assignment]
    instead = {
        "save_pretrained": "call dtplan.save(model, folder) on every rank",
        "resize_token_embeddings": "resize before dtplan.parallelize",
    }
    if bound.sequence_parallel or bound.loss_parallel:
        instead["generate"] = (
            "tokens come one by one, from whole logits: parallelize without sequence_parallel and loss_parallel"
        )
    for method, advice in instead.items():
        if hasattr(model, method):
            setattr(model, method, functools.partial(_refuse, method, advice))


def _refuse(method: str, advice: str, *_args: object, **_kwargs: object) -> NoReturn:
    raise ApplyError(f"{method} does not work on a sharded model: {advice}")
