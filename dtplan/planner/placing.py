"""Where each tensor of a module goes: the table of styles, and the checks of dims against units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtplan.plan.spec import RESIDUAL, Layout, P, R, Rule, S
from dtplan.planner.bound import BoundTensor, BoundUnit
from dtplan.planner.collectives import chunk_sizes
from dtplan.planner.match import Alike
from dtplan.planner.sections import SectionsError, section_copies, section_sizes
from dtplan.planner.stored import Stored
from dtplan.planner.units import copies_of

# style -> kind of module -> the dim along which each parameter is cut; None is whole and added once.
CUTS: dict[str, dict[str, dict[str, int | None]]] = {
    "colwise": {
        "Linear": {"weight": 0, "bias": 0},
        "Conv1D": {"weight": 1, "bias": 0},
        "Embedding": {"weight": 1},
    },
    "rowwise": {
        "Linear": {"weight": 1, "bias": None},
        "Conv1D": {"weight": 0, "bias": None},
        "Embedding": {"weight": 0},
    },
    "vocab": {"Embedding": {"weight": 0}},
}


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class PlacingError(ValueError):
    """A rule does not fit a tensor; ``code`` is the diagnostic's, ``hint`` what to do."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.hint = code, hint


def module_kind(module: nn.Module) -> str:
    """The name under which styles know exactly this class; a subclass is a kind of its own."""
    kind = type(module)
    if kind in (nn.Linear, nn.Embedding):
        return kind.__name__
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return "Conv1D" if is_conv1d else f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one tensor is cut: its dim (None: whole), and whether a whole one is added once."""

    dim: int | None = None
    once: bool = False
    rule: Rule | None = None


def cuts_of(alike: Alike, rule: Rule | None, is_whole: Callable[[Rule | None], bool]) -> dict[str, Cut]:
    """How each tensor of the module is cut by its own rule and by those on its parameters.

    ``is_whole`` tells of a rule that cuts whether the degree leaves its tensors whole all the same.

    Raises:
        PlacingError: the style is not for this class of module, or a parameter has two rules.
    """
    module = alike.module
    cuts = {name: Cut() for name, _ in named_tensors(module)}
    whole = is_whole(rule)
    cutting = rule is not None and rule.style in CUTS and not whole
    cutting |= any(own.shard is not None for rules in alike.tensor_rules.values() for own in rules)
    quantised = [f"{alike.pattern}.{name}" for name, tensor in named_tensors(module) if tensor.dtype in FP8]
    if cutting and quantised:
        # a rank's part need not be whole blocks, and the forward would scale it by another rank's
        message = f"{', '.join(quantised)}: FP8 weights are not cut, since the scales of their blocks are not"
        raise PlacingError("DTP404", message, "dequantise it as the model is loaded, or keep it whole: `replicate`")
    if rule is not None and rule.style in CUTS and not whole:
        table = CUTS[rule.style].get(kind_for(module, rule))
        if table is None:
            kinds = ", ".join(CUTS[rule.style])
            message = f"`{rule.style}` is for {kinds} exactly; {alike.pattern} is a {module_kind(module)}"
            raise PlacingError("DTP404", message, _way_out(module, rule.style))
        for name in cuts:
            if name in table:
                cuts[name] = Cut(dim=table[name], once=table[name] is None, rule=rule)
    if rule is not None and rule.style == "sharded_norm" and not whole:
        cuts = {name: Cut(dim=0, rule=rule) for name in cuts}
    for name, rules in alike.tensor_rules.items():
        own = chosen(rules)
        if own is not None and own.style not in (None, "replicate"):
            message = f"`{own.style}` is for modules; {alike.pattern}.{name} is a parameter or buffer"
            raise PlacingError("DTP404", message, "write `shard: DIM` to cut it, `replicate` to keep it whole")
        if own is not None:
            # a rule on a row-parallel bias that speaks of its gradient does not change where it is added
            once = own.once or (own.shard is None and cuts[name].once)
            cuts[name] = Cut(dim=None if is_whole(own) else own.shard, once=once, rule=own)
    return cuts


def kind_for(module: nn.Module, rule: Rule | None) -> str:
    """The module's kind, or the one that the rule says it is like."""
    like = rule.like if rule is not None else None
    return like if like is not None and _is_like(module, like) else module_kind(module)


def _is_like(module: nn.Module, kind: str) -> bool:
    return any(base.__name__ == kind and base.__module__.startswith("torch.nn.") for base in type(module).__mro__)


def _way_out(module: nn.Module, style: str) -> str:
    if style == "vocab" and _is_like(module, "Embedding"):
        return "add `like: Embedding` if its forward does more row by row only, as to scale; else `replicate`"
    if style in ("colwise", "rowwise") and _is_like(module, "Linear"):
        return "add `like: Linear` if its forward computes what a Linear does; else name its parameters, `shard: DIM`"
    return "a subclass may compute something else: name its parameters with `shard: DIM`"


def chosen(rules: tuple[Rule, ...]) -> Rule | None:
    """The one rule of several on one path: the one with `override`, else the only one.

    Raises:
        PlacingError: two rules and none, or more than one, is marked.
    """
    if len(rules) > 1:
        winners = [rule for rule in rules if rule.override]
        if len(winners) == 1:
            return winners[0]
        lines = " and ".join(str(rule.at) for rule in rules)
        raise PlacingError(
            "DTP402", f"rules at {lines} both fall on it", "mark the one that wins with `override: true`"
        )
    return rules[0] if rules else None


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that the module itself owns."""
    both = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in both if tensor is not None]


def place(
    name: str,
    tensor: Tensor,
    cut: Cut,
    *,
    units: Mapping[str, BoundUnit],
    config: Any,
    tp: int,
    grad_sum: bool,
    buffer: bool,
) -> BoundTensor:
    """The tensor's placement and local shape.

    Raises:
        PlacingError: the dim is not there, or is not a whole number of units, or is not divided by the degree.
    """
    shape = tuple(tensor.shape)
    placement, unit_name = R, cut.rule.unit if cut.rule else None
    sections: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    local = shape
    if cut.dim is not None:
        dim = cut.dim + len(shape) if cut.dim < 0 else cut.dim
        if not 0 <= dim < len(shape):
            raise PlacingError("DTP408", f"`{name}` has {len(shape)} dims {list(shape)}, there is no dim {cut.dim}")
        if cut.rule is not None and cut.rule.sections:
            try:
                sections = section_sizes(shape[dim], cut.rule.sections, units, config)
                copies = section_copies(cut.rule.sections, units, tp) if sections else ()
            except SectionsError as error:
                message = f"`{name}` {list(shape)}: dim {dim} of size {shape[dim]} {error}"
                raise PlacingError("DTP408", message, error.hint) from error
        else:
            unit = units.get(unit_name or "")
            _check_units(name, shape, dim, unit, tp)
            if unit is not None and (shared := copies_of(unit, tp)) > 1:
                _check_terms(name, cut.rule, unit, shared)
                sections, copies = (shape[dim],), (shared,)
        placement = S(dim)
        rows = Stored.of(name, sections, dim, tp, copies).rows if sections else chunk_sizes(shape[dim], tp)[0]
        local = (*shape[:dim], rows, *shape[dim + 1 :])
    whole = placement == R and not cut.once
    return BoundTensor(
        name=name,
        shape=shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        placement=placement,
        local_shape=local,
        sections=sections,
        copies=copies,
        unit=unit_name if placement != R else None,
        grad="sum" if not buffer and (_shared_in_part(cut, copies) or (grad_sum and whole)) else "complete",
        once=cut.once,
        trainable=tensor.requires_grad,
        buffer=buffer,
    )


def _check_terms(name: str, rule: Rule | None, unit: BoundUnit, shared: int) -> None:
    if rule is not None and rule.style in ("rowwise", "vocab"):
        message = (
            f"`{name}` is {rule.style} in {unit.name}, of which {shared} ranks keep one: sums would count it so often"
        )
        raise PlacingError("DTP405", message, "give it the unit in which its input is cut over all ranks: `unit: head`")


def _shared_in_part(cut: Cut, copies: tuple[int, ...]) -> bool:
    """Whether ranks that keep the same rows of what is cut each see a part of the work; those of one kv head do."""
    kept = [section for section in cut.rule.sections if section.whole] if cut.rule else []
    return bool(copies) and all(section.grad == "sum" for section in kept)


def _check_units(name: str, shape: tuple[int, ...], dim: int, unit: BoundUnit | None, tp: int) -> None:
    size = shape[dim]
    if unit is None:
        if size % tp:
            message = f"`{name}` {list(shape)}: dim {dim} of size {size} is not divided by degree {tp}"
            raise PlacingError("DTP408", message, "give the rule a `unit`, so that the limit has a name")
    elif size % unit.count:
        message = (
            f"`{name}` {list(shape)}: dim {dim} of size {size} is not a whole number of {unit.count} {unit.name} units"
        )
        raise PlacingError("DTP408", message, f"{unit.name} is counted by `{unit.field}`: is it the unit of this dim?")


def default_output(style: str | None, *, whole: bool) -> Layout:
    """The layout in which a module of this style computes its output.

    A module without a style is a region of cut work: its ranks hold terms of a sum.
    """
    if whole or style == "replicate":
        return R
    return {"colwise": S(-1), "norm": RESIDUAL}.get(style or "", P)
