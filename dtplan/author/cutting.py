"""How a group is cut: every parameter's dim and parts, the inputs that are cut, the numbers that are a rank's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from dtplan.author.depend import dependences
from dtplan.author.groups import Group
from dtplan.author.local import Bench, Number
from dtplan.author.parts import Lies, Part, columns_of, input_lies, lies
from dtplan.author.trace import Trace
from dtplan.prove.edits import pattern_of

_MOST_COLUMNS = 1024
"""Each is differentiated by itself, all at once: memory goes with their square."""


@dataclass(frozen=True, slots=True, eq=False)
class Cutting:
    """A group with all that was found out about it. Parameters are below the block, inputs are the root's."""

    group: Group
    parameters: Mapping[str, Lies]
    """Those of the root that have to do with the columns, and those behind them (`apart`)."""
    norms: tuple[str, ...]
    """Norms whose features are cut: their sums of squares go over ranks."""
    inputs: Mapping[str, Lies]
    """Those that move columns."""
    numbers: tuple[Number, ...] | None
    """None where no set of them makes ranks compute what the whole does."""
    per_unit: tuple[Number, ...] | None = None
    """Numbers that count for each kv head, where several ranks may have one; None where they may not."""
    kv_units: int = 0
    """Of kv heads, where they are fewer than heads."""
    why_not: str = ""
    """What was seen where no cut fits."""


def cutting_of(block: nn.Module, trace: Trace, group: Group, known: set[int]) -> Cutting:
    """Look at a group's data flow."""
    if why_not := _unfit(group):
        return Cutting(group, parameters={}, norms=(), inputs={}, numbers=(), why_not=why_not)
    found = dependences(block, trace, group)
    owners = {product.parameter.rpartition(".")[0] for product in group.products}
    own = {n: one for n, one in found.parameters.items() if group.root or n.rpartition(".")[0] in owners}
    columns = columns_of(own, found.columns)
    parameters = {name: Lies("idle") if name in found.idle else lies(one, columns, known) for name, one in own.items()}
    inputs = {
        name: input_lies(one, columns, known)
        for name, one in found.inputs.items()
        if one.moves_columns and "[" not in name
    }
    cut = [one for one in parameters.values() if one.kind == "cut"]
    count = _units(cut, found.columns) or columns.components
    for product in group.last:
        parts = (Part(found.columns, count),)
        told = Lies("tangled") if product.dim is None else Lies("cut", product.dim, parts)
        parameters[product.parameter] = told
    parameters = _with_biases(parameters, group.exits)
    cutting = Cutting(
        group=group,
        parameters=parameters,
        norms=tuple(n for n in found.norms if parameters.get(f"{n}.weight", Lies("whole")).kind == "cut"),
        inputs=inputs,
        numbers=(),
        why_not=_why_not(parameters, columns.components, in_order=columns.in_order),
    )
    if cutting.why_not:
        return cutting
    bench = Bench(block, trace, group, _like_experts(parameters), inputs, found.norms, frozenset(known))
    numbers = bench.numbers()
    counts = sorted({part.count for one in parameters.values() for part in one.parts if one.kind == "cut"})
    if numbers is None or len(counts) != 2 or counts[1] % counts[0] or any(len(one.parts) > 1 for one in cut):
        return dataclasses.replace(cutting, numbers=numbers)
    per_unit = bench.numbers_per_unit(counts[0], counts[1] // counts[0], numbers)
    return dataclasses.replace(cutting, numbers=numbers, per_unit=per_unit, kv_units=counts[0])


def _unfit(group: Group) -> str:
    """Why columns cannot be told apart at all."""
    widths = sorted({product.read.shape[product.along] for product in group.last})
    if len(widths) > 1:
        return f"its last products sum over different columns, {' and '.join(map(str, widths))}"
    if widths[0] > _MOST_COLUMNS:
        return f"its last product sums over {widths[0]} columns even in a small model, too many to look at one by one"
    return ""


def _units(cut: list[Lies], columns: int) -> int | None:
    """The most units of any part that also divide the columns: heads rather than kv heads."""
    counts = {part.count for one in cut for part in one.parts if not part.whole}
    return max((count for count in counts if columns % count == 0), default=None)


def _with_biases(parameters: dict[str, Lies], exits: Collection[str]) -> dict[str, Lies]:
    """A bias lies as the rows of its weight do: that of a key moves nothing, since a softmax takes no notice."""
    for name, one in list(parameters.items()):
        weight_name = name.removesuffix("bias") + "weight"
        weight = parameters.get(weight_name)
        is_last = pattern_of(weight_name) in exits
        if name.endswith(".bias") and weight and weight.kind == "cut" and one.kind != "cut" and not is_last:
            parameters[name] = Lies("cut", 0, weight.parts)
    return parameters


def _like_experts(parameters: Mapping[str, Lies]) -> Mapping[str, Lies]:
    """Every expert of a list is cut as the one that was looked at."""
    patterns = {pattern_of(name): one for name, one in parameters.items() if one.kind == "cut"}
    return {name: patterns.get(pattern_of(name), one) for name, one in parameters.items()}


def _why_not(parameters: Mapping[str, Lies], components: int, *, in_order: bool) -> str:
    tangled = [name for name, one in parameters.items() if one.kind == "tangled"]
    if components < 2:
        return "every column that the last product reads hangs together with all others, so no cut keeps them apart"
    if not in_order:
        return f"its columns hang together in {components} sets that do not lie one after another"
    if tangled:
        others = f" and {len(tangled) - 2} more" if len(tangled) > 2 else ""
        names = f"{', '.join(tangled[:2])}{others}"
        seen = next((f": {parameters[n].seen}" for n in tangled if parameters[n].seen), "")
        return f"the rows of {names} do not lie in one order of units, nor in sections of them{seen}"
    return ""
