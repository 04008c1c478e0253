"""What a rule says of a module's own forward: sizes of the whole, what it reads without a call, what norm it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dtplan._errors import did_you_mean
from dtplan.plan.read import config_field
from dtplan.planner.bound import BoundUnit
from dtplan.planner.localize import number_at
from dtplan.planner.placing import PlacingError, module_kind
from dtplan.planner.units import copies_of
from dtplan.te.norm import Norm
from dtplan.te.probe import norm_of


def local_sizes(module: nn.Module, names: tuple[str, ...], tp: int) -> tuple[str, ...]:
    """The numbers that are divided by the degree.

    Raises:
        PlacingError: one is no number of the module, or ``tp`` does not divide it.
    """
    for name in names:
        _check(module, f"localize: {name}", name, tp)
    return names


def sizes_per_unit(
    module: nn.Module, pairs: tuple[tuple[str, str], ...], units: Mapping[str, BoundUnit], tp: int
) -> tuple[tuple[str, int], ...]:
    """The numbers per unit of which several ranks share one, and how many ranks do.

    Raises:
        PlacingError: one is no number of the module, or is not divided by the ranks that share a unit.
    """
    shared = [(name, copies_of(units[unit], tp)) for name, unit in pairs if unit in units]
    for name, ranks in shared:
        if ranks > 1:
            _check(module, f"localize_per: {name}", name, ranks)
    return tuple((name, ranks) for name, ranks in shared if ranks > 1)


def _check(module: nn.Module, says: str, name: str, parts: int) -> None:
    value = number_at(module, name)
    if isinstance(value, bool) or not isinstance(value, int) or value % parts:
        message = f"`{says}` needs a whole number that {parts} divides, it is {value!r}"
        raise PlacingError("DTP412", message, "name an attribute of the module, or `config.field`, that holds one")


def modules_read(module: nn.Module, paths: tuple[str, ...]) -> tuple[str, ...]:
    """The modules below whose parameters the forward reads itself.

    Raises:
        PlacingError: there is none of the name.
    """
    there = dict(module.named_modules())
    for path in paths:
        if path not in there:
            hint = did_you_mean(path, there) or "name modules as named_modules() does, from this one on"
            raise PlacingError("DTP412", f"`reads: {path}` names no module below it", hint)
    return paths


def size_of(config: Any, field: str) -> int:
    """A config field that is a number of features.

    Raises:
        PlacingError: it holds none.
    """
    value = config_field(config, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        message = f"`sum_grad_of_last: {field}` is no number of features: the config has {value!r} there"
        raise PlacingError("DTP412", message, "name the config field that holds the features of the last part")
    return value


def norm_over_a_cut(module: nn.Module, unit: BoundUnit | None, tp: int) -> Norm:
    """The norm that a module computes, of which the ranks take their parts.

    Raises:
        PlacingError: it computes none that is known, or ranks would have parts of unlike size.
    """
    found = norm_of(module)
    if found is None:
        message = f"`sharded_norm` is for an RMSNorm or LayerNorm over its last dim; {module_kind(module)} is neither"
        raise PlacingError("DTP404", message, "keep what it norms whole: `style: replicate` there and here")
    if unit is not None and unit.indivisible == "uneven" and unit.count % tp:
        message = f"`sharded_norm` takes parts of one size; {unit.name} = {unit.count} is `uneven` at degree {tp}"
        raise PlacingError("DTP405", message, "choose a degree that divides it")
    return found
