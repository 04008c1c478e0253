"""One step of a sharded model on meta tensors: what it keeps for backward, how high memory rises, what it computes.

The model's real code runs, with the plan's moves around its modules and the local shapes of one rank, so nothing here
knows what a Llama is. Layers that are alike are run once: of all the units in a model, the first, the last, and one of
each kind between them. What torch would decide on a GPU only, which attention kernel to take, is decided here.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from dtplan._errors import DtplanError
from dtplan.plan.spec import Plan
from dtplan.planner.apply import guard, shard_on_tp
from dtplan.planner.bind import bind
from dtplan.planner.bound import BoundPlan
from dtplan.planner.fsdp import checkpoint_units
from dtplan.planner.loss import KERNELS, Kernels, causal_lm_loss
from dtplan.planner.memory import unit_of
from dtplan.sizing.flow import Flow
from dtplan.sizing.merged import merged
from dtplan.sizing.watch import Segment, Watch, local_tensors, watched_units
from dtplan.te.choose import choose
from dtplan.te.compiled import regions
from dtplan.te.fuse import Fusing
from dtplan.te.imagined import imagined
from dtplan.te.rebind import rebound

_LOSS = "loss"
"""Where the kernels of the loss over cut logits run, which are in no module."""


class TraceError(DtplanError, RuntimeError):
    """A model's step cannot be followed on meta tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One rank's step, segment by segment; a segment ends where the next begins."""

    forward: dict[str, Segment]
    """``before`` the units, units by name, ``after`` them: head and loss."""
    backward: dict[str, Segment]
    """``after``, units by name, ``before``."""
    units: tuple[str, ...]
    """Of every unit of the model, in order, the one that was run in its place."""
    te: bool = False
    """Whether it has layers of TransformerEngine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model with few of its units, and which of them stands for each unit of the whole."""

    model: nn.Module
    stands_for: dict[str, str]


def cut_model(model: nn.Module, bound: BoundPlan) -> Cut:
    """A copy of ``model`` (on meta) with only the first unit, the last, and one of each kind between them."""
    kinds = _kinds(model, bound)
    stands_for: dict[str, str] = {}
    kept: dict[str, list[int]] = {}
    whole: dict[str, nn.ModuleList] = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in bound.fsdp_units):
        names = [name for name in bound.fsdp_units if name.rpartition(".")[0] == parent]
        holder = model.get_submodule(parent)
        if not isinstance(holder, nn.ModuleList) or len(holder) != len(names):
            stands_for |= {name: name for name in names}
            continue
        whole[parent], kept[parent] = holder, _kept([kinds[name] for name in names])
        place = {index: at for at, index in enumerate(kept[parent])}
        for index, name in enumerate(names):
            same = [i for i in kept[parent] if kinds[names[i]] == kinds[name]]
            chosen = index if index in place else next((i for i in same if 0 < i < len(names) - 1), same[0])
            stands_for[name] = f"{parent}.{place[chosen]}"
    try:
        for parent, indices in kept.items():
            _set(model, parent, nn.ModuleList(whole[parent][i] for i in indices))
        copied = copy.deepcopy(model)
    finally:
        for parent, holder in whole.items():
            _set(model, parent, holder)
    for parent, indices in kept.items():
        _cut_layer_types(copied, indices, len(whole[parent]))
    for module in copied.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # type: ignore[union-attr]  # training needs no cache of keys and values
    return Cut(model=copied, stands_for=stands_for)


def _kinds(model: nn.Module, bound: BoundPlan) -> dict[str, tuple[Any, ...]]:
    """Unit -> the bound modules that it has, and what the config says of this layer; equal for units that are alike."""
    types = getattr(getattr(model, "config", None), "layer_types", None) or ()
    kinds: dict[str, list[Any]] = {name: [] for name in bound.fsdp_units}
    for name, found in kinds.items():
        index = name.rpartition(".")[2]
        found.append(types[int(index)] if index.isdecimal() and len(types) == len(kinds) else "")
    for number, module in enumerate(bound.modules):
        for name in module.names:
            if unit := unit_of(name, kinds):
                kinds[unit].append((number, name.removeprefix(unit)))
    return {name: tuple(found) for name, found in kinds.items()}


def _kept(kinds: list[tuple[Any, ...]]) -> list[int]:
    last = len(kinds) - 1
    inner = {kind: index for index, kind in reversed(list(enumerate(kinds))) if 0 < index < last}
    return sorted({0, last, *inner.values()})


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _cut_layer_types(model: nn.Module, kept: list[int], number: int) -> None:
    """What a config says of every layer, of those that are left."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        types = vars(config).get("layer_types") if config is not None else None
        if isinstance(types, list) and len(types) == number:
            config.layer_types = [types[i] for i in kept]


def traced_step(
    cut: Cut,
    plan: str | Path | Plan,
    *,
    tp: int,
    rows: int,
    sequence: int,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    loss_parallel: bool = True,
    checkpointing: bool = False,
    by_unit: bool = False,
    te: bool = False,
    fp8: bool = False,
    compiled: bool = False,
) -> Traced:
    """Forward and backward of ``rows`` sequences of ``sequence`` tokens on one of ``tp`` ranks; nothing is computed.

    ``by_unit``: gradients of whole parameters are summed once a unit, as under FSDP2. ``te``: with TransformerEngine's
    layers where the plan names them, ``fp8`` in FP8. ``compiled``: as by `dtplan.compile_model`.

    Raises:
        TraceError: this process has a process group, or the model asks for values that meta tensors do not have.
        BindError: the plan does not fit at ``tp``.
    """
    model = copy.deepcopy(cut.model).to(dtype).train()
    options = {"tp": tp, "sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    bound = bind(model, plan, **options)  # type: ignore[arg-type]
    with _fake_ranks(tp):
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        fusing = fused(model, bound, fp8=fp8, fsdp=by_unit) if te or fp8 else Fusing(bound=bound)
        shard_on_tp(model, fusing, mesh, by_unit=by_unit or checkpointing)
        fusing.seal(model)
        if checkpointing:
            checkpoint_units(model, bound, 1, fusing.recomputing or _recomputed)
        guard(model, bound)
        units = [(name, model.get_submodule(name)) for name in bound.fsdp_units]
        ids = torch.zeros(rows, sequence, dtype=torch.long, device="meta")
        watch = (Flow if compiled else Watch)([ids, *local_tensors([*model.parameters(), *model.buffers()])])
        if isinstance(watch, Flow) and loss_parallel:
            model.loss_function = functools.partial(causal_lm_loss, compiled=_kernels(watch))  # type: ignore[assignment]
        watch.named(model.named_modules())
        try:
            _step(watch, model, units, ids)
        except Exception as error:
            told = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TraceError(
                f"{type(model).__name__}: a step at tp {tp} cannot be followed on tensors without values: {told}; "
                "`dtplan prove` says whether the plan is right, `dtplan show` sizes what is held between steps"
            ) from error
    segments = merged(watch, _compiled(units, fusing)) if isinstance(watch, Flow) else watch.segments
    return _sorted(segments, cut.stands_for, te=te or fp8)


def _kernels(flow: Flow) -> Kernels:
    """Those of the loss, which are compiled one by one."""
    named = KERNELS._asdict().items()
    return Kernels(**{name: flow.within(f"{_LOSS}.{name}", kernel) for name, kernel in named})


def _compiled(units: list[tuple[str, nn.Module]], fusing: Fusing) -> Callable[[str], str]:
    """Of a module, the region that `dtplan.compile_model` compiles and in which it lies; '' for fused layers."""
    found = {f"{_LOSS}.{name}" for name in Kernels._fields}
    for name, unit in units:
        found |= {f"{name}.{region}" for region in regions(unit)} or {name}
    sealed = {layer.name for layer in fusing.choice.fused if layer.layer != "DotProductAttention"}

    @functools.cache
    def region(module: str) -> str:
        within = [".".join(module.split(".")[:depth]) for depth in range(1, module.count(".") + 2)]
        return "" if sealed.intersection(within) else next((name for name in within if name in found), "")

    return region


def fused(model: nn.Module, bound: BoundPlan, *, fp8: bool, fsdp: bool = False) -> Fusing:
    """What TransformerEngine would be given of the model, on layers that only say what they hold."""
    choice = choose(model, bound, fp8=fp8)
    recipe = "fp8" if fp8 else None
    engine = imagined(_recomputed, fsdp=fsdp)
    return Fusing(bound=rebound(bound, choice.fused), choice=choice, engine=engine, recipe=recipe)


def _step(watch: Watch, model: nn.Module, units: list[tuple[str, nn.Module]], ids: Tensor) -> None:
    with watch, gpu_attention(), watched_units(watch, units), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators")  # dropout on meta draws nothing
        watch.begin("forward", "before")
        loss = model(input_ids=ids, labels=ids).loss
        watch.begin("backward", "after")
        loss.backward()
        watch.end()


def _sorted(segments: list[Segment], stands_for: dict[str, str], *, te: bool) -> Traced:
    """The segments by phase, without the moments between two units."""
    last = {(s.phase, s.name): s for s in segments}
    kept = [s for s in segments if last[s.phase, s.name] is s]
    for segment, following in itertools.pairwise(kept):
        segment.end = following.start
    forward, backward = ({s.name: s for s in kept if s.phase == phase} for phase in ("forward", "backward"))
    return Traced(forward=forward, backward=backward, units=tuple(stands_for.values()), te=te)


def _recomputed(forward: Any) -> Any:
    return functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def _fake_ranks(number: int) -> Iterator[None]:
    """A process group whose collectives do nothing. Private torch: its fake backend, tried on torch 2.11 to 2.14.1."""
    if dist.is_initialized():
        raise TraceError("a step is sized in a process without a process group; call this before dtplan.init")
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def gpu_attention() -> Iterator[None]:
    """Takes the kernels that a GPU would take for ``scaled_dot_product_attention``, where a CPU would take others.

    The function itself is another one meanwhile, in all threads: a mode over functions would be off in backward, where
    layers are recomputed.
    """
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Flash attention in half precision without a mask, memory-efficient attention else; features padded to 8."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    flash = attn_mask is None and half and query.shape[-1] == value.shape[-1] <= 256
    if not flash and enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    features = query.shape[-1]
    scale = 1 / math.sqrt(features) if scale is None else scale
    if flash:
        if missing := -features % 8:
            query, key, value = (F.pad(x, (0, missing)) for x in (query, key, value))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return out[..., :features] if missing else out
    bias = None
    if attn_mask is not None:
        bias = attn_mask
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, float("-inf"))
        bias = bias.expand(*query.shape[:3], key.shape[2])
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, compute_log_sumexp=True, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )
    return found[0]
