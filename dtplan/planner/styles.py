"""One torch ``ParallelStyle`` for every bound module: parameters become DTensors, forward runs on local tensors.

At rest every parameter is a DTensor, so optimizers, clipping, FSDP2 and checkpoints see one kind of tensor on
named axes. While a module computes, its parameters are plain local tensors and so are its inputs; what crosses
ranks is only what the bound moves say. Nothing is dispatched through DTensor in between.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from dtplan._errors import ApplyError
from dtplan.planner import collectives as coll
from dtplan.planner.bound import BoundModule, BoundMove, BoundTensor
from dtplan.planner.collectives import Group
from dtplan.planner.localize import divide
from dtplan.planner.norms import norm_over_ranks
from dtplan.planner.stored import Stored

Forward = Callable[..., Any]


Views = dict[str, Tensor]
"""Of one module: its parameters by name, as a scope that is entered read them; empty outside."""


@dataclass(slots=True)
class Scope:
    """Parameters of one stretch of forward whose gradients are summed over ranks, with one all-reduce a group of ranks.

    Entered around the forward of an FSDP unit, or of the model; modules inside take their views from it.
    """

    owners: dict[int, list[tuple[nn.Module, str, Views, tuple[coll.Span, ...]]]] = field(default_factory=dict)
    """By the number of ranks that share them: parameters, and the parts that they share, () for all."""

    @contextmanager
    def entered(self, tp: Tp) -> Iterator[None]:
        """Read all parameters of the scope through one autograd node for each group of ranks."""
        before = [(views, dict(views)) for owners in self.owners.values() for _, _, views, _ in owners]
        for views, _ in before:
            views.clear()
        for shared, owners in self.owners.items():
            held = [views[name] if name in views else tp.local(module, name) for module, name, views, _ in owners]
            read = coll.sum_grads(held, tp.groups[shared], [spans for *_, spans in owners])
            for (_, name, views, _), view in zip(owners, read, strict=True):
                views[name] = view
        try:
            yield
        finally:
            for views, then in reversed(before):
                views.clear()
                views.update(then)


@dataclass(slots=True)
class BlockInput:
    """What a parallel-residual block made of its input, for the norms that read it."""

    partial: Tensor | None = None
    whole: Tensor | None = None


@dataclass(slots=True)
class Tp:
    """The tp axis of one sharded model, and what its modules share."""

    mesh: DeviceMesh
    group: Group
    groups: dict[int, Group] = field(default_factory=dict)
    """A number of neighbouring ranks that share parameters -> those among which this rank is."""
    bound: dict[str, BoundModule] = field(default_factory=dict)
    """Full module name -> what is bound for it."""
    names: dict[int, str] = field(default_factory=dict)
    """Module -> full name, for messages."""
    made: dict[str, nn.Parameter] = field(default_factory=dict)
    """Full name -> its new parameter, for the other names of a tied one."""
    blocks: dict[str, BlockInput] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)
    """Full name of a parameter with a fused dim -> how that dim is put together."""
    views: dict[str, Views] = field(default_factory=dict)
    """Full module name -> what an entered scope read for it."""

    def local(self, module: nn.Module, name: str) -> Tensor:
        """The rank's own part of a parameter as a plain tensor through which gradients flow.

        Raises:
            ApplyError: FSDP2 has not gathered the parameter, because its unit's forward was bypassed.
        """
        tensor = module._parameters[name] if name in module._parameters else module._buffers[name]
        if not isinstance(tensor, DTensor):
            assert tensor is not None
            return tensor
        if len(tensor.placements) > 1:
            raise ApplyError(
                f"{self.names[id(module)]} was called while FSDP2 held its parameters cut: the forward of its unit "
                "or of the model was bypassed; call the model, or register the method that calls it with "
                "torch.distributed.fsdp.register_fsdp_forward_method(model, 'name')"
            )
        return tensor.to_local()


class Sharded(ParallelStyle):
    """Applies one bound module to the live module ``name``; made afresh for each."""

    def __init__(self, bound: BoundModule, name: str, tp: Tp) -> None:
        super().__init__()
        self.bound, self.name, self.tp = bound, name, tp

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for tensor in self.bound.tensors:
            self._distribute(module, tensor)
        divide(module, self.bound.localize, self.tp.group.size)
        for name, shared in self.bound.per_unit:
            divide(module, (name,), shared)
        wrap(module, self.bound, self.name, self.tp)
        return module

    def _distribute(self, module: nn.Module, bound: BoundTensor) -> None:
        if bound.buffer:
            buffer = module._buffers[bound.name]
            if bound.placement.dim is not None and buffer is not None:
                module._buffers[bound.name] = self._own(buffer, bound, bound.name)
            return
        full_name = f"{self.name}.{bound.name}" if self.name else bound.name
        made = self.tp.made.get(bound.tied_to) if bound.tied_to else None
        if made is None:
            old = module._parameters[bound.name]
            assert old is not None
            if isinstance(old, DTensor):  # a fused layer's, put together from those of the modules that it replaces
                return
            made = nn.Parameter(self._cut(old.data, bound, full_name), requires_grad=old.requires_grad)
        module._parameters[bound.name] = self.tp.made[full_name] = made

    def _cut(self, whole: Tensor, bound: BoundTensor, full_name: str) -> DTensor:
        """The DTensor of what the rank keeps; every rank cuts what it has, that ranks agree was checked before."""
        if not bound.sections:
            return distribute_tensor(whole, self.tp.mesh, [torch_placement(bound)], src_data_rank=None)
        self.tp.stored[full_name] = bound.stored(full_name, self.tp.group.size)
        own = self._own(whole, bound, full_name)
        return DTensor.from_local(own, self.tp.mesh, [torch_placement(bound)], run_check=False)

    def _own(self, whole: Tensor, bound: BoundTensor, full_name: str) -> Tensor:
        """The rank's own part of what is cut."""
        if bound.sections:
            return bound.stored(full_name, self.tp.group.size).own(whole, self.tp.group.rank)
        return coll.own_part(whole, bound.placement.dim or 0, self.tp.group)


def torch_placement(bound: BoundTensor) -> Placement:
    """The placement on tp as torch spells it."""
    return Replicate() if bound.placement.dim is None else Shard(bound.placement.dim)


def wrap(module: nn.Module, bound: BoundModule, name: str, tp: Tp) -> None:
    """Put the moves around the module's forward, and local parameters inside."""
    before = forward = module.forward
    if bound.kind == "Embedding" and bound.tensors and bound.tensors[0].placement.dim == 0:
        forward = vocab_forward(module, forward, tp.group)
    if bound.norm is not None and tp.group.size > 1:
        width = bound.tensors[0].local_shape[0] * tp.group.size
        forward = norm_over_ranks(module, bound.norm, tp.group, width)
    if any(not tensor.buffer for tensor in bound.tensors):
        forward = with_local_parameters(module, forward, bound, tp, tp.views.setdefault(name, {}))
    for path in bound.reads:
        below = f"{name}.{path}" if name else path
        views = tp.views.setdefault(below, {})
        forward = with_local_parameters(module.get_submodule(path), forward, tp.bound[below], tp, views)
    if bound.block is not None:
        depth = bound.block.count(".") + 1
        block = tp.blocks.setdefault(".".join(name.split(".")[:depth]), BlockInput())
        forward = reading_block_input(forward, block, name)
    if bound.shared is not None:
        forward = with_block_input(forward, bound, tp.blocks.setdefault(name, BlockInput()), tp)
    elif around(bound.inputs):
        forward = with_inputs(forward, bound, tp)
    if any(move.op != "keep" or move.global_shape for move in around(bound.outputs)):
        forward = with_outputs(forward, bound, tp)
    if forward is not before:
        module.forward = functools.wraps(before)(forward)


def around(moves: Iterable[BoundMove]) -> list[BoundMove]:
    """The moves that are put around a module; a fused layer does the others itself."""
    return [move for move in moves if not move.inside]


def with_local_parameters(module: nn.Module, inner: Forward, bound: BoundModule, tp: Tp, views: Views) -> Forward:
    """Run ``inner`` while the module's parameters are local tensors; summed ones are in ``views`` inside a scope."""
    names = [t.name for t in bound.tensors if not t.buffer]
    once = {t.name for t in bound.tensors if t.once}
    summed = {t.name: t.summed(tp.group.size) for t in bound.tensors}
    parameters = module._parameters

    def view(name: str) -> Tensor:
        if name in views:
            return views[name]
        local = tp.local(module, name)
        for shared, spans in summed[name].items():
            (local,) = coll.sum_grads([local], tp.groups[shared], [spans])
        return coll.place(local, tp.group) if name in once else local

    def forward(*args: Any, **kwargs: Any) -> Any:
        held = {name: parameters[name] for name in names}
        parameters.update({name: view(name) for name in names})  # type: ignore[misc]
        try:
            return inner(*args, **kwargs)
        finally:
            parameters.update(held)

    return forward


def vocab_forward(module: nn.Module, inner: Forward, group: Group) -> Forward:
    """An embedding's lookup where each rank knows only its own rows: a row of another rank gives zero.

    The zeros come last, so ``inner`` may do more with each row, as a subclass that scales it.
    """
    first = sum(coll.chunk_sizes(module.num_embeddings, group.size)[: group.rank])  # type: ignore[arg-type]
    padding = module.padding_idx

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        weight: Tensor = module.weight  # type: ignore[assignment]
        rows = weight.shape[0]
        if rows == 0:  # fewer rows than ranks: the sum over ranks is the others'
            return weight.new_zeros(*input.shape, weight.shape[1]) + weight.sum()
        index = input - first
        foreign = (index < 0) | (index >= rows)
        own_padding = padding - first if isinstance(padding, int) and 0 <= padding - first < rows else None
        module.padding_idx = own_padding  # type: ignore[assignment]
        try:
            found: Tensor = inner(index.masked_fill(foreign, 0))
        finally:
            module.padding_idx = padding
        return found.masked_fill(foreign.unsqueeze(-1), 0)

    return forward


def with_inputs(inner: Forward, bound: BoundModule, tp: Tp) -> Forward:
    """Change the layouts of inputs before ``inner``."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        for move in around(bound.inputs):
            change = functools.partial(moved_if_there, move=move, tp=tp, where=bound.pattern)
            args, kwargs = replaced(args, kwargs, move, change)
        return inner(*args, **kwargs)

    return forward


def with_outputs(inner: Forward, bound: BoundModule, tp: Tp) -> Forward:
    """Change the layouts of outputs after ``inner``."""
    moves = [move for move in around(bound.outputs) if move.op != "keep" or move.global_shape]

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        for move in moves:
            if isinstance(out, tuple):
                i = move.value or 0
                out = (*out[:i], moved(out[i], move, tp, bound.pattern), *out[i + 1 :])
            else:
                out = moved(out, move, tp, bound.pattern)
        return out

    return forward


def with_block_input(inner: Forward, bound: BoundModule, block: BlockInput, tp: Tp) -> Forward:
    """A block whose input joins the unreduced sum of its branches, with one reduction each way.

    The branches' norms read one whole copy of the input, whose gradient is summed once for all of them; the
    residual is handed in as a term of the sum that one rank holds, so the block's own additions stay right.
    """
    (place,), shared = bound.inputs, bound.shared
    assert shared is not None

    def split(x: Tensor) -> Tensor:
        x = as_local(x, shared, bound.pattern)
        block.whole = moved(x, shared, tp, bound.pattern)
        block.partial = moved(x, place, tp, bound.pattern)
        return block.partial

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = replaced(args, kwargs, place, split)
        try:
            return inner(*args, **kwargs)
        finally:
            block.whole = block.partial = None

    return forward


def reading_block_input(inner: Forward, block: BlockInput, name: str) -> Forward:
    """A norm that reads its block's input: it is given the whole copy in place of the residual's term."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if block.partial is None or not same_tensor(x, block.partial):
            raise ApplyError(
                f"{name} reads something else than its block's input, so the block has no parallel residual: "
                "use `input: residual` on the block and reduce each branch"
            )
        return inner(block.whole, *args, **kwargs)

    return forward


def same_tensor(x: Tensor, y: Tensor) -> bool:
    """Whether both are one value; backward hooks on a module hand it another object around the same storage."""
    return x is y or (x.shape == y.shape and x.data_ptr() == y.data_ptr())


def replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], move: BoundMove, change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the one that ``move`` names changed, however it was passed."""
    if move.name in kwargs:
        return args, {**kwargs, move.name: change(kwargs[move.name])}
    if move.value is not None and move.value < len(args):
        return (*args[: move.value], change(args[move.value]), *args[move.value + 1 :]), kwargs
    return args, kwargs


def as_local(x: Tensor, move: BoundMove, where: str) -> Tensor:
    """A plain tensor; a DTensor must have the layout in which the value is expected."""
    if not isinstance(x, DTensor):
        return x
    expected = Replicate() if move.src.dim is None else Shard(move.src.dim % x.dim())
    if x.placements != (expected,):
        raise ApplyError(f"{where}: a DTensor came in as {x.placements}, expected {move.src}")
    return x.to_local()


def moved(x: Tensor, move: BoundMove, tp: Tp, where: str) -> Tensor:
    """``x`` after the operation of ``move``.

    Raises:
        ApplyError: a dim that is to be cut is not divided by the degree (sequence parallelism).
    """
    x = as_local(x, move, where)
    group = tp.group
    cut = move.dst.dim if move.dst.dim is not None else move.src.dim
    dim = 0 if cut is None else cut % x.dim()  # the moves without a cut do not read it
    if move.op in ("scatter", "slice") and x.shape[dim] % group.size:
        what = "give a batch of" if dim == 0 else "pad the sequence to"
        raise ApplyError(
            f"{where}: dim {dim} of length {x.shape[dim]} cannot be cut over {group.size} tp ranks; {what} "
            f"a multiple of {group.size}, or turn sequence_parallel off (for generation it must be off)"
        )
    match move.op if group.size > 1 else "keep":
        case "copy":
            x = coll.copy(x, group) if move.last is None else coll.copy_last(x, move.last, group)
        case "reduce":
            x = coll.reduce(x, group)
        case "gather":
            x = coll.gather(x, dim, group)
        case "scatter":
            x = coll.scatter(x, dim, group)
        case "gather_whole":
            x = coll.gather_whole(x, dim, group, move.length)
        case "slice" if move.units:
            x = coll.slice_whole(x.unflatten(dim, (-1, move.units)), dim + 1, group).flatten(dim, dim + 1)
        case "slice":
            x = coll.slice_whole(x, dim, group)
        case "place":
            x = coll.place(x, group) if move.src.dim is None else coll.spread(x, dim, group)
    return as_global(x, dim, move, tp) if move.global_shape else x


def moved_if_there(x: Tensor | None, move: BoundMove, tp: Tp, where: str) -> Tensor | None:
    """``moved``, of an input that may be None (a bias that only some configs have)."""
    return None if x is None else moved(x, move, tp, where)


def as_global(x: Tensor, dim: int, move: BoundMove, tp: Tp) -> Tensor:
    """A DTensor around a cut value, with the global shape that code outside expects to see."""
    shape = torch.Size((*x.shape[:dim], move.length or x.shape[dim] * tp.group.size, *x.shape[dim + 1 :]))
    stride = tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1]
    return DTensor.from_local(x, tp.mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
