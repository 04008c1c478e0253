"""Changes of layout on the tp axis as autograd functions over plain tensors.

Each moves a value one way in forward and its gradient the other way in backward, as in Megatron-LM
(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2 for the sequence-parallel pair).

The functional collectives below are private torch operators. They were tried on torch 2.11 to 2.14.1; unlike
their Python wrappers they hand plain tensors out, which kernels outside torch rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of the tp axis as one rank sees them."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Group:
        """The group by the name under which torch's operators find it."""
        return cls(name=group.group_name, size=dist.get_world_size(group), rank=dist.get_rank(group))


def chunk_sizes(length: int, parts: int) -> list[int]:
    """Sizes in which ``torch.chunk`` cuts ``length``, with zeros to make ``parts`` of them."""
    step = -(-length // parts)
    return [max(0, min(step, length - i * step)) for i in range(parts)]


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """The sum (or ``max``) over ranks, as a new plain tensor."""
    if group.size == 1:
        return x
    result: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.name))
    return result


def all_gather(x: Tensor, dim: int, group: Group, length: int | None = None) -> Tensor:
    """The parts of all ranks side by side along ``dim``; ``length`` is the whole size when parts differ in size."""
    if group.size == 1:
        return x
    sizes = None if length is None or length == x.shape[dim] * group.size else chunk_sizes(length, group.size)
    if sizes is not None:
        x = _padded(x, dim, sizes[0])
    flat: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    parts = list(flat.chunk(group.size))
    if sizes is not None:
        parts = [part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)]
    leading = x.shape[:dim].numel() == 1 and sizes is None  # the parts already lie in order
    return _shaped(flat, (*x.shape[:dim], -1, *x.shape[dim + 1 :])) if leading else torch.cat(parts, dim)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part along ``dim`` of the sum over ranks; the parts are those of ``torch.chunk``."""
    if group.size == 1:
        return x
    sizes = chunk_sizes(x.shape[dim], group.size)
    x = _padded(x, dim, sizes[0] * group.size)
    leading = x.shape[:dim].numel() == 1
    stacked = x if leading else torch.cat(x.chunk(group.size, dim))
    shape = torch.Size((*x.shape[:dim], sizes[0], *x.shape[dim + 1 :]))
    flat: Tensor = _ops.wait_tensor(
        _ops.reduce_scatter_tensor(stacked.contiguous().view(group.size * shape.numel()), "sum", group.size, group.name)
    )
    whole = _shaped(flat, shape)
    return whole if sizes[group.rank] == sizes[0] else whole.narrow(dim, 0, sizes[group.rank])


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``x`` in another shape, not marked as a view: FSDP2 warns of units that hand out views."""
    return torch.ops.aten._unsafe_view(x, list(shape))  # type: ignore[no-any-return]


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part along ``dim``, cut as ``torch.chunk`` cuts."""
    if group.size == 1:
        return x
    sizes = chunk_sizes(x.shape[dim], group.size)
    return x.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank]).contiguous()


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)


class _Move(torch.autograd.Function):
    """One pair of functions: what happens to the value, and what happens to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        out = there(x)
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _apply(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Move.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


def _same(x: Tensor) -> Tensor:
    return x


def copy(x: Tensor, group: Group) -> Tensor:
    """R to R where ranks use it for different work: the gradient is summed over ranks."""
    return _apply(x, _same, lambda g: all_reduce(g, group))


def copy_last(x: Tensor, features: int, group: Group) -> Tensor:
    """R to R where ranks use the last ``features`` for different work, and the others alike: a part of `copy`."""

    def back(g: Tensor) -> Tensor:
        return torch.cat([g[..., :-features], all_reduce(g[..., -features:], group)], -1)

    return _apply(x, _same, back)


def reduce(x: Tensor, group: Group) -> Tensor:
    """P to R: the value is summed over ranks, the gradient is the same on all of them."""
    return _apply(x, lambda v: all_reduce(v, group), _same)


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """S(dim) to R where ranks use it for different work: gathered; the gradient is summed and scattered."""
    return _apply(x, lambda v: all_gather(v, dim, group), lambda g: reduce_scatter(g, dim, group))


def scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """P to S(dim): summed and scattered; the gradient is gathered."""
    length = x.shape[dim]
    return _apply(x, lambda v: reduce_scatter(v, dim, group), lambda g: all_gather(g, dim, group, length))


def gather_whole(x: Tensor, dim: int, group: Group, length: int | None = None) -> Tensor:
    """S(dim) to R where every rank does the same with it: gathered; each rank keeps its part of the gradient."""
    return _apply(x, lambda v: all_gather(v, dim, group, length), lambda g: own_part(g, dim, group))


def slice_whole(x: Tensor, dim: int, group: Group) -> Tensor:
    """R to S(dim): each rank keeps its part; the gradient is gathered."""
    length = x.shape[dim]
    return _apply(x, lambda v: own_part(v, dim, group), lambda g: all_gather(g, dim, group, length))


def place(x: Tensor, group: Group) -> Tensor:
    """R to P: rank 0 holds the value and the others zero, so that the sum over ranks is the value."""
    return _apply(x, lambda v: v if group.rank == 0 else torch.zeros_like(v), _same)


def spread(x: Tensor, dim: int, group: Group) -> Tensor:
    """S(dim) to P: each rank holds its part in place and zero elsewhere; nothing is sent either way."""

    def there(v: Tensor) -> Tensor:
        out = v.new_zeros(*v.shape[:dim], v.shape[dim] * group.size, *v.shape[dim + 1 :])
        out.narrow(dim, group.rank * v.shape[dim], v.shape[dim]).copy_(v)
        return out

    return _apply(x, there, lambda g: own_part(g, dim, group))


Span = tuple[int, int, int]
"""``(dim, start, size)`` of a part of a tensor."""


class _SumGrads(torch.autograd.Function):
    """Many parameters at once: the gradients of all of them, or of parts, are summed over ranks in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, group: Group, spans: tuple[tuple[Span, ...], ...], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.spans = group, spans
        ctx.set_materialize_grads(False)
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # What is summed is written back into a copy, since a gradient may be another's view.
        summed = [g if g is None or not spans else g.clone() for g, spans in zip(grads, ctx.spans, strict=True)]
        for dtype in sorted({grad.dtype for grad in grads if grad is not None}, key=str):
            held = [i for i, grad in enumerate(summed) if grad is not None and grad.dtype == dtype]
            parts = [(i, span, part) for i in held for span, part in _parts(summed[i], ctx.spans[i])]
            flat = all_reduce(torch.cat([part.reshape(-1) for _, _, part in parts]), ctx.group)
            sums = flat.split([part.numel() for _, _, part in parts])
            for (i, span, part), total in zip(parts, sums, strict=True):
                if span is None:
                    summed[i] = total.view_as(part)
                else:
                    part.copy_(total.view_as(part))
        return (None, None, *summed)


def _parts(grad: Tensor | None, spans: tuple[Span, ...]) -> list[tuple[Span | None, Tensor]]:
    assert grad is not None
    return [(span, grad.narrow(*span)) for span in spans] if spans else [(None, grad)]


def sum_grads(params: list[Tensor], group: Group, spans: list[tuple[Span, ...]] | None = None) -> list[Tensor]:
    """Local views of parameters whose gradients, or their ``spans``, are partial sums; one all-reduce in backward."""
    parts = tuple(spans or [()] * len(params))
    return list(_SumGrads.apply(group, parts, *params))  # type: ignore[no-untyped-call]
