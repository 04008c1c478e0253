"""Which indices of which parameters decide which columns that a group's last products sum over.

Told by derivatives of a run in float64: whatever the code does between (reshapes, splits, rotations, repeated kv
heads, activations), two indices hang together if and only if one of them moves the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtplan.author.groups import Group
from dtplan.author.trace import Call, Trace, first_tensor, tensors_in, trace_block
from dtplan.prove.edits import pattern_of
from dtplan.prove.oracle import float64_casts

_ZERO = 1e-13
"""A derivative this much smaller than the largest of its kind is rounding about zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Dependence:
    """Of one parameter or input: for each of its dims, which index [n] moves which column [n, columns]."""

    name: str
    dims: tuple[Tensor, ...]
    reaches_output: bool
    """Whether the root's output depends on it at all."""

    @property
    def moves_columns(self) -> bool:
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


def dependences(block: nn.Module, trace: Trace, group: Group) -> Dependences:
    """Run the group's root again on what it was given, and differentiate every column that its last products read."""
    call = trace.calls[group.root]
    root = block.get_submodule(group.root)
    args, kwargs, inputs = fresh_inputs(root, call)
    norms = norms_between(block, trace, group)
    with float64_casts(), see_through(block, norms), torch.enable_grad():
        again = trace_block(root, args, kwargs)
    prefix = f"{group.root}." if group.root else ""
    reads = [p for p in again.products if pattern_of(prefix + p.parameter) in group.exits]
    own = {prefix + name: p for name, p in root.named_parameters() if p.is_floating_point()}
    columns = reads[0].read.shape[reads[0].along]
    found = _derivatives(reads, columns, {**own, **{f"<{k}>": t for k, t in inputs.items()}})
    reached = _reached(first_tensor(again.calls[""].out), own)
    parameters = {name: Dependence(name, found[name], reached[name]) for name in own}
    of_inputs = {name: Dependence(name, found[f"<{name}>"], True) for name in inputs}
    return Dependences(columns=columns, parameters=parameters, inputs=of_inputs, norms=tuple(norms))


def fresh_inputs(root: nn.Module, call: Call) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Tensor]]:
    """The call's arguments with floats as leaves of their own, and those leaves by argument."""
    import inspect

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


def _derivatives(reads: list[Any], columns: int, sources: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    moved = [p.read.movedim(p.along, -1) for p in reads]
    weights = [torch.randn(m.shape[:-1], generator=generator, dtype=m.dtype) for m in moved]
    given = list(sources.values())
    sizes: dict[str, list[list[Tensor]]] = {name: [[] for _ in t.shape] for name, t in sources.items()}
    for column in range(columns):
        total = torch.stack([(m[..., column] * w).sum() for m, w in zip(moved, weights, strict=True)]).sum()
        grads = torch.autograd.grad(total, given, retain_graph=True, allow_unused=True)
        for (name, tensor), grad in zip(sources.items(), grads, strict=True):
            size = torch.zeros_like(tensor) if grad is None else grad.abs()
            for dim, kept in enumerate(sizes[name]):
                others = [d for d in range(size.dim()) if d != dim]
                kept.append(size.amax(others) if others else size)
    return {name: tuple(_nonzero(torch.stack(dim, dim=1)) for dim in dims) for name, dims in sizes.items()}


def _nonzero(sizes: Tensor) -> Tensor:
    return sizes > _ZERO * sizes.max().clamp(min=1e-300)


def _reached(out: Tensor | None, own: Mapping[str, Tensor]) -> dict[str, bool]:
    if out is None or not out.requires_grad:
        return dict.fromkeys(own, False)
    grads = torch.autograd.grad(out.square().sum(), list(own.values()), allow_unused=True)
    return {name: grad is not None and bool(grad.any()) for name, grad in zip(own, grads, strict=True)}


def norms_between(block: nn.Module, trace: Trace, group: Group) -> list[str]:
    """Modules that scale each feature of what a product gave and mix them: taken for norms over features."""
    found = []
    for call in trace.calls.values():
        module = block.get_submodule(call.name)
        weight = module._parameters.get("weight")
        given = [t for t in tensors_in([call.args, call.kwargs]) if t.is_floating_point()]
        out = first_tensor(call.out)
        if weight is None or weight.dim() != 1 or len(given) != 1 or out is None or list(module.children()):
            continue
        in_group = bool({n for n in call.last if n > 0} & {p.number for p in group.products})
        if in_group and call.name.startswith(group.root) and given[0].shape == out.shape and given[0].shape[-1:] == weight.shape:
            found.append(call.name)
    return found


@contextmanager
def see_through(block: nn.Module, norms: list[str]) -> Iterator[None]:
    """Inside, ``norms`` multiply by their weights only, so that features which they mix stay apart."""
    changed = [block.get_submodule(name) for name in norms]
    for module in changed:
        module.forward = _scaling(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _scaling(module: nn.Module) -> Any:
    def forward(x: Tensor) -> Tensor:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        return x * weight if bias is None else x * weight + bias

    return forward
