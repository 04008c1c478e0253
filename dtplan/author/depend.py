"""Which indices of which parameters decide which columns that a group's last products sum over.

Told by derivatives of a run in float64: whatever the code does between (reshapes, splits, rotations, repeated kv
heads, activations), two indices hang together if and only if one of them moves the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dtplan.author.groups import Group
from dtplan.author.owned import parameters_of
from dtplan.author.trace import Call, Product, Trace, first_tensor, tensors_in, trace_block
from dtplan.prove.edits import pattern_of
from dtplan.prove.oracle import float64_casts

_ZERO = 1e-13
"""A derivative this much smaller than the largest of its kind is rounding about zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Dependence:
    """Of one parameter or input: for each of its dims, which index [n] moves which column [n, columns]."""

    name: str
    dims: tuple[Tensor, ...]

    @property
    def moves_columns(self) -> bool:
        """Whether any index moves any column."""
        return any(bool(dim.any()) for dim in self.dims)


@dataclass(frozen=True, slots=True, eq=False)
class Dependences:
    """All of a group."""

    columns: int
    parameters: Mapping[str, Dependence]
    """By name below the block."""
    inputs: Mapping[str, Dependence]
    """Of the root's own tensors of floats, by argument; those that are nested go by their argument and position."""
    norms: tuple[str, ...]
    """Norms over what products gave, taken as multiplications by their weights."""
    idle: frozenset[str]
    """Parameters that have no gradient: they only choose, as the weights of an index do."""


def dependences(block: nn.Module, trace: Trace, group: Group) -> Dependences:
    """Run the group's root again on what it was given, and differentiate every column that its last products read."""
    call = trace.calls[group.root]
    root = block.get_submodule(group.root)
    args, kwargs, inputs = fresh_inputs(root, call)
    norms = norms_between(block, trace, group)
    with float64_casts(), _leaking(), see_through(block, norms), torch.enable_grad():
        again = trace_block(root, args, kwargs)
    prefix = f"{group.root}." if group.root else ""
    reads = [p for p in again.products if pattern_of(prefix + p.parameter) in group.exits]
    own = {prefix + name: p for name, p in root.named_parameters() if p.is_floating_point()}
    columns = reads[0].read.shape[reads[0].along]
    idle = frozenset(_unmoving(first_tensor(again.calls[""].out), own))
    found = _derivatives(reads, columns, {**own, **{f"<{k}>": t for k, t in inputs.items()}})
    return Dependences(
        columns=columns,
        parameters={name: Dependence(name, found[name]) for name in own},
        inputs={name: Dependence(name, found[f"<{name}>"]) for name in inputs},
        norms=tuple(norms),
        idle=idle,
    )


def fresh_inputs(root: nn.Module, call: Call) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
    """The call's arguments with floats as leaves of their own, and those leaves by argument."""
    names = list(inspect.signature(root.forward).parameters)
    leaves: dict[str, Tensor] = {}

    def fresh(value: Any, name: str) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            leaves[name] = value.detach().clone().requires_grad_()
            return leaves[name]
        if isinstance(value, list | tuple):
            return type(value)(fresh(item, f"{name}[{i}]") for i, item in enumerate(value))
        return value

    args = tuple(fresh(v, names[i] if i < len(names) else f"[{i}]") for i, v in enumerate(call.args))
    kwargs = {name: fresh(value, name) for name, value in call.kwargs.items()}
    return args, kwargs, leaves


def _unmoving(out: Tensor | None, own: Mapping[str, Tensor]) -> Iterator[str]:
    """Parameters without a path to the output that a gradient takes."""
    if out is not None:
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            out.sum(), list(own.values()), allow_unused=True, retain_graph=True
        )
        yield from (name for name, grad in zip(own, grads, strict=True) if grad is None)


def _derivatives(
    reads: Sequence[Product], columns: int, sources: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, ...]]:
    """For each source and dim, which index moves which column [n, columns]; all columns in one batched backward."""
    generator = torch.Generator().manual_seed(0)
    seeds = []
    for product in reads:
        weights = torch.randn(product.read.shape, generator=generator, dtype=product.read.dtype).movedim(
            product.along, -1
        )
        one_by_one = torch.diag_embed(weights).movedim(-1, 0)  # [columns, ..., columns]
        seeds.append(one_by_one.movedim(-1, product.along + 1 if product.along >= 0 else product.along))
    tensors = [product.read for product in reads]
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(
        tensors, list(sources.values()), grad_outputs=seeds, is_grads_batched=True, allow_unused=True
    )
    found = {}
    for (name, tensor), grad in zip(sources.items(), grads, strict=True):
        size = torch.zeros(columns, *tensor.shape) if grad is None else grad.abs()
        found[name] = tuple(_nonzero(_largest(size, dim)) for dim in range(1, size.dim()))
    return found


def _largest(sizes: Tensor, dim: int) -> Tensor:
    """[n, columns] of [columns, ..., n, ...]."""
    others = [d for d in range(1, sizes.dim()) if d != dim]
    return (sizes.amax(others) if others else sizes).T


def _nonzero(sizes: Tensor) -> Tensor:
    return sizes > _ZERO * sizes.max().clamp(min=1e-300)


def norms_between(block: nn.Module, trace: Trace, group: Group) -> list[str]:
    """Modules that scale each feature of what a product gave and mix them: taken for norms over features."""
    found = []
    for call in trace.calls.values():
        module = block.get_submodule(call.name)
        weight = parameters_of(module).get("weight")
        given = [t for t in tensors_in([call.args, call.kwargs]) if t.is_floating_point()]
        out = first_tensor(call.out)
        if weight is None or weight.dim() != 1 or len(given) != 1 or out is None or list(module.children()):
            continue
        in_group = bool({n for n in call.last if n > 0} & {p.number for p in group.products})
        if (
            in_group
            and call.name.startswith(group.root)
            and given[0].shape == out.shape
            and given[0].shape[-1:] == weight.shape
        ):
            found.append(call.name)
    return found


class _leaking(TorchFunctionMode):  # noqa: N801 - used as a context
    """Inside, a relu lets a tenth through: a feature that is zero for every token of a small batch still tells."""

    _RELUS = (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return F.leaky_relu(args[0], 0.1) if func in self._RELUS else func(*args, **(kwargs or {}))


@contextmanager
def see_through(block: nn.Module, norms: list[str]) -> Iterator[None]:
    """Inside, ``norms`` multiply by their weights only, so that features which they mix stay apart."""
    changed = [block.get_submodule(name) for name in norms]
    for module in changed:
        module.forward = _scaling(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _scaling(module: nn.Module) -> Any:
    def forward(x: Tensor) -> Tensor:
        own = parameters_of(module)
        weight, bias = own["weight"], own.get("bias")
        return x * weight if bias is None else x * weight + bias

    return forward
