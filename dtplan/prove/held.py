"""What ranks hold of one tensor, told from the whole one: it, a term of a sum, n times it, another rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtplan.plan.spec import Layout
from dtplan.prove.oracle import BOUND, relative_error

FITS = 1e-9
"""Relative error up to which an explanation fits; what is wrong is off by far more."""
RIGHT, PARTIAL, TIMES, ANOTHER = "right", "partial sum", "counted n times", "another shard"
DISAGREE, SHAPE, MISSING, NO_FIT = "ranks disagree", "wrong shape", "missing", "no sum fits"


@dataclass(frozen=True, slots=True)
class Held:
    """A kind, and the sentence that tells it."""

    kind: str
    says: str = ""


def held(parts: Sequence[Tensor | None], truth: Tensor, layout: Layout | None, blocks: int = 0) -> Held:
    """What ``parts``, one a rank, are of ``truth``.

    ``layout`` None: told from the shapes. ``blocks``: units along the dim that is cut, to look for in another order.
    """
    if absent := [rank for rank, part in enumerate(parts) if part is None]:
        return Held(MISSING, f"there is none on {_spell(absent)}")
    there = [part for part in parts if part is not None]
    if layout is not None and layout.word == "P":
        return Held(RIGHT) if _fits(_sum(there), truth) else _of_whole(there, truth)
    if all(part.shape == truth.shape for part in there):
        return _of_whole(there, truth)
    dim = _cut_dim(there, truth)
    if dim is None:
        shapes = ", ".join(str(list(part.shape)) for part in there)
        return Held(SHAPE, f"the ranks' shapes {shapes} do not make up the whole {list(truth.shape)}")
    return _of_cut(there, truth, dim, blocks)


def _of_whole(parts: Sequence[Tensor], truth: Tensor) -> Held:
    right = [rank for rank, part in enumerate(parts) if relative_error(part, truth) <= BOUND]
    if len(right) == len(parts):
        return Held(RIGHT)
    if len(parts) > 1 and _fits(_sum(parts), truth):
        return Held(PARTIAL, "each rank holds a term of it: the sum over ranks is right")
    if (times := _factor(parts, truth)) is not None:
        return Held(TIMES, f"every rank holds {times} times the true value")
    if right:
        wrong = [rank for rank in range(len(parts)) if rank not in right]
        return Held(DISAGREE, f"it is right on {_spell(right)} and wrong on {_spell(wrong)}")
    same = all(_fits(part, parts[0]) for part in parts)
    return Held(NO_FIT, f"the ranks hold {'one' if same else 'different'} wrong value{'' if same else 's'}, {NO_FIT}")


def _of_cut(parts: Sequence[Tensor], truth: Tensor, dim: int, blocks: int) -> Held:
    found = torch.cat(list(parts), dim)
    if relative_error(found, truth) <= BOUND:
        return Held(RIGHT)
    if (times := _factor([found], truth)) is not None:
        return Held(TIMES, f"every rank holds {times} times its part of the true value")
    for count in dict.fromkeys((blocks, len(parts), 3 * blocks, 2 * blocks)):
        if (order := _order(found, truth, dim, count)) is not None:
            return Held(ANOTHER, f"the parts belong to other ranks: block i of {count} along dim {dim} is {order}[i]")
    wholes = truth.split([part.shape[dim] for part in parts], dim)
    right = [r for r, (part, own) in enumerate(zip(parts, wholes, strict=True)) if relative_error(part, own) <= BOUND]
    if right:
        wrong = [rank for rank in range(len(parts)) if rank not in right]
        return Held(DISAGREE, f"it is right on {_spell(right)} and wrong on {_spell(wrong)}")
    return Held(NO_FIT, "no order of the parts fits, and no multiple")


def _cut_dim(parts: Sequence[Tensor], truth: Tensor) -> int | None:
    """The one dim along which the parts add up to the whole."""
    if any(part.dim() != truth.dim() for part in parts):
        return None
    for dim in range(truth.dim()):
        others = [[*part.shape[:dim], *part.shape[dim + 1 :]] for part in parts]
        rest = [*truth.shape[:dim], *truth.shape[dim + 1 :]]
        if all(other == rest for other in others) and sum(part.shape[dim] for part in parts) == truth.shape[dim]:
            return dim
    return None


def _order(found: Tensor, truth: Tensor, dim: int, count: int) -> list[int] | None:
    """The true position of every block of ``found``, where they are ``truth``'s in another order."""
    if count < 2 or found.shape[dim] % count:
        return None
    blocks, wholes = found.chunk(count, dim), truth.chunk(count, dim)
    order = [next((j for j, whole in enumerate(wholes) if _fits(block, whole)), -1) for block in blocks]
    return order if sorted(order) == list(range(count)) else None


def _factor(parts: Sequence[Tensor], truth: Tensor) -> str | None:
    """n, or 1/n, if every part is the truth times it."""
    scale = (truth * truth).sum().item()
    ratio = (parts[0] * truth).sum().item() / scale if scale else 0.0
    if ratio <= 0:
        return None
    n = round(ratio) if ratio >= 1 else round(1 / ratio)
    factor = float(n) if ratio >= 1 else 1 / n
    if n < 2 or not all(_fits(part, truth * factor) for part in parts):
        return None
    return str(n) if ratio >= 1 else f"1/{n}"


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _fits(found: Tensor, truth: Tensor) -> bool:
    return relative_error(found, truth) <= FITS


def _spell(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
