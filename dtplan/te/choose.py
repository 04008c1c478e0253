"""Which of the plan's fused layers are exact for a model, and why the others are not taken.

Nothing is imported from TransformerEngine here: a choice can be shown on a machine without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from dtplan.plan.spec import R, S
from dtplan.planner.bound import BoundModule, BoundMove, BoundPlan, BoundTe, BoundTensor
from dtplan.te.fused import Choice, Fused, FusedTensor, Kept
from dtplan.te.norm import Norm
from dtplan.te.probe import GATED, mlp_computes, norm_of

_FP8_MULTIPLE = 16


class _Unfit(Exception):
    """Why a layer is kept as it is."""


def choose(model: nn.Module, bound: BoundPlan, *, fp8: bool = False) -> Choice:
    """What is fused of the layers that the plan declares, in the plan's order; a module goes into one layer only.

    ``model`` is not sharded yet, and may be on meta. ``fp8``: also refuse what FP8 kernels cannot compute.
    """
    chooser = _Chooser(model, bound, fp8=fp8)
    fused: list[Fused] = []
    kept: dict[tuple[str, str, str], Kept] = {}
    taken: set[str] = set()
    for layer in bound.te:
        for unit in layer.names:
            parts = {_join(unit, path) for path in layer.parts.values()}
            if parts & taken:
                continue
            try:
                found = chooser.fused(layer, unit)
            except _Unfit as why:
                kept.setdefault(
                    (layer.under, layer.layer, str(why)), Kept(where=str(layer), layer=layer.layer, reason=str(why))
                )
            else:
                pattern = layer.under + found.name.removeprefix(unit)
                fused.append(dataclasses.replace(found, pattern=pattern, unit=unit))
                taken |= parts
    return Choice(fused=tuple(fused), kept=tuple(kept.values()))


class _Chooser:
    def __init__(self, model: nn.Module, bound: BoundPlan, *, fp8: bool) -> None:
        self.model, self.bound, self.fp8 = model, bound, fp8
        self.modules: dict[str, BoundModule] = {name: m for m in bound.modules for name in m.names}
        self.tied = {name for tie in bound.ties for name in tie}

    def fused(self, layer: BoundTe, unit: str) -> Fused:
        """The fused layer below ``unit``; raises ``_Unfit`` with the reason where it would not be exact."""
        part = {role: _join(unit, path) for role, path in layer.parts.items()}
        linears = tuple(path for role, path in part.items() if role.startswith("linears"))
        match layer.layer:
            case "LayerNormLinear":
                return self._norm_and_columns(layer, part["norm"], linears)
            case "Linear":
                return self._row(layer, part["linear"])
            case "LayerNormMLP":
                return self._mlp(layer, part["norm"], part.get("gate"), part["up"], part["down"])
            case "RMSNorm" | "LayerNorm":
                return self._norm(layer, part["norm"])
        return self._attention(layer, part["attention"])

    # --- the four kinds

    def _norm_and_columns(self, layer: BoundTe, norm: str, columns: Sequence[str]) -> Fused:
        region = _parent(columns[0])
        if any(_parent(column) != region for column in columns):
            raise _Unfit("its linear layers lie in different modules")
        moves = self._region_moves(region, columns)
        inside = _done_inside(moves, ("copy", "gather"))
        name = _join(region, "te_" + _joined([column.rpartition(".")[2] for column in columns]))
        return Fused(
            layer="LayerNormLinear",
            name=name,
            rule=layer.rule,
            region=region,
            norm=norm,
            columns=tuple(columns),
            normalization=self._normalization(norm),
            communicates=inside,
            tensors=(*self._norm_tensors(norm, inside=inside), *self._column_tensors(columns, "weight", "bias")),
            inputs=_marked(moves, inside=inside),
            argument=moves[0] if moves else None,
        )

    def _row(self, layer: BoundTe, linear: str) -> Fused:
        module = self._linear(linear, cut=1)
        inside = _done_inside(module.outputs, ("reduce", "scatter"))
        return Fused(
            layer="Linear",
            name=linear,
            rule=layer.rule,
            row=linear,
            communicates=inside,
            tensors=self._row_tensors(linear, "weight", "bias", inside=inside),
            inputs=module.inputs,
            outputs=_marked(module.outputs, inside=inside),
        )

    def _mlp(self, layer: BoundTe, norm: str, gate: str | None, up: str, down: str) -> Fused:
        region, activation = _parent(up), layer.activation or ""
        columns = tuple(name for name in (gate, up) if name is not None)
        if any(_parent(name) != region for name in (*columns, down)):
            raise _Unfit("its linear layers lie in different modules")
        self._same_activation(layer, region, gate, up, down)
        entry, exits = self._region_moves(region, columns), self._linear(down, cut=1).outputs
        inside = _done_inside(entry, ("copy", "gather")) and _done_inside(exits, ("reduce", "scatter"))
        return Fused(
            layer="LayerNormMLP",
            name=region,
            rule=layer.rule,
            region=region,
            norm=norm,
            columns=columns,
            row=down,
            normalization=self._normalization(norm),
            activation=activation,
            communicates=inside,
            tensors=(
                *self._norm_tensors(norm, inside=inside),
                *self._column_tensors(columns, "fc1_weight", "fc1_bias"),
                *self._row_tensors(down, "fc2_weight", "fc2_bias", inside=inside),
            ),
            inputs=_marked(entry, inside=inside),
            outputs=_marked(exits, inside=inside),
            argument=entry[0] if entry else None,
        )

    def _norm(self, layer: BoundTe, norm: str) -> Fused:
        found = self._normalization(norm)
        if found.kind != layer.layer:
            raise _Unfit(f"it computes a {found.kind}")
        module = self.modules[norm]
        tensors = [dataclasses.replace(t, name=t.name) for t in module.tensors]
        return Fused(
            layer=layer.layer,
            name=norm,
            rule=layer.rule,
            normalization=found,
            tensors=tuple(FusedTensor(bound=t, sources=(_join(norm, t.name),)) for t in tensors),
            inputs=module.inputs,
            outputs=module.outputs,
        )

    def _attention(self, layer: BoundTe, name: str) -> Fused:
        config = getattr(self.model.get_submodule(name), "config", None)
        chosen = getattr(config, "_attn_implementation", None)
        if chosen != "sdpa":
            raise _Unfit(f"its config chooses {chosen or 'no'} attention; TransformerEngine's takes the place of sdpa")
        return Fused(layer=layer.layer, name=name, rule=layer.rule)

    # --- what the modules are

    def _normalization(self, name: str) -> Norm:
        if any(tensor.placement != R for tensor in self.modules[name].tensors):
            raise _Unfit(f"{_leaf(name)} is cut over ranks: TransformerEngine norms what one rank holds")
        norm = norm_of(self.model.get_submodule(name))
        if norm is None:
            kind = type(self.model.get_submodule(name)).__name__
            raise _Unfit(f"{kind} computes neither RMSNorm nor LayerNorm as TransformerEngine does")
        if not norm.fusable:
            has = "a" if norm.bias else "no"
            raise _Unfit(f"{_leaf(name)} is a {norm.kind} with {has} bias, unlike TransformerEngine's")
        return norm

    def _same_activation(self, layer: BoundTe, region: str, gate: str | None, up: str, down: str) -> None:
        activation = layer.activation
        if activation is None or (activation in GATED) != (gate is not None):
            raise _Unfit(f"activation {activation} {'needs' if activation in GATED else 'has no'} gate")
        module = self.model.get_submodule(region)
        dropout = [n for n, m in module.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
        if dropout:
            raise _Unfit(f"it has dropout inside ({', '.join(dropout)})")
        leaves: dict[str, Any] = {"up": _leaf(up), "down": _leaf(down), "gate": _leaf(gate) if gate else None}
        if mlp_computes(module, activation, **leaves):
            return
        if GATED.get(activation, activation) == "gelu" and mlp_computes(module, activation, **leaves, erf=True):
            if layer.approximate_gelu:
                return
            raise _Unfit(
                "the model's gelu is the erf form, TransformerEngine's is the tanh form (off by up to 4.7e-4): "
                "`approximate_gelu: true` accepts that"
            )
        raise _Unfit(f"{type(module).__name__} does not compute down(act(up)) with {activation}")

    def _region_moves(self, region: str, columns: Sequence[str]) -> tuple[BoundMove, ...]:
        """How the input of the columns is prepared: by their region, or by the block around, or by each itself."""
        own = [self._linear(column, cut=0).inputs for column in columns]
        module = self.modules.get(region)
        if any(move.op != "keep" for moves in own for move in moves):
            raise _Unfit("its linear layers prepare their inputs one by one: give their region `input: R`")
        return module.inputs if module is not None else ()

    def _linear(self, name: str, *, cut: int) -> BoundModule:
        """A plain linear layer that the plan cuts along ``cut`` (0: columns, 1: rows)."""
        live, module = self.model.get_submodule(name), self.modules.get(name)
        if module is None or type(live) is not nn.Linear:
            raise _Unfit(f"{_leaf(name)} is a {type(live).__name__}, not exactly a Linear")
        weight = next(t for t in module.tensors if t.name == "weight")
        if weight.placement != S(cut):
            raise _Unfit(f"{_leaf(name)} is {weight.placement}, not {S(cut)}")
        if weight.shared:
            raise _Unfit(f"{_leaf(name)} has heads that several ranks keep")
        if weight.sections:
            raise _Unfit(f"{_leaf(name)} is cut in sections")
        if weight.shape[cut] % self.bound.tp:
            raise _Unfit(f"degree {self.bound.tp} does not divide {_leaf(name)}'s dim of {weight.shape[cut]}")
        if any(_join(name, t.name) in self.tied for t in module.tensors):
            raise _Unfit(f"{_leaf(name)} is tied")
        local = [size // self.bound.tp if dim == cut else size for dim, size in enumerate(weight.shape)]
        if self.fp8 and any(size % _FP8_MULTIPLE for size in local):
            raise _Unfit(f"FP8 needs multiples of {_FP8_MULTIPLE}; {_leaf(name)} has {local} on a rank")
        return module

    # --- parameters

    def _norm_tensors(self, norm: str, *, inside: bool) -> Iterator[FusedTensor]:
        """Its gradient is complete only where the layer sums its input's gradient before the norm's backward."""
        for tensor in self.modules[norm].tensors:
            grad = tensor.grad if inside or self.bound.tp == 1 else "sum"
            bound = dataclasses.replace(tensor, name=f"layer_norm_{tensor.name}", grad=grad)
            yield FusedTensor(bound=bound, sources=(_join(norm, tensor.name),))

    def _column_tensors(self, columns: Sequence[str], weight: str, bias: str) -> Iterator[FusedTensor]:
        for own, name in (("weight", weight), ("bias", bias)):
            held = [t for column in columns for t in self.modules[column].tensors if t.name == own]
            if not held:
                continue
            if len(held) != len(columns) or len({(t.dtype, t.trainable) for t in held}) > 1:
                raise _Unfit(f"its {own}s differ in dtype or in what is trained, or some are missing")
            yield FusedTensor(
                bound=_stacked(name, held),
                sources=tuple(_join(column, own) for column in columns),
            )

    def _row_tensors(self, linear: str, weight: str, bias: str, *, inside: bool) -> tuple[FusedTensor, ...]:
        """A layer that reduces adds its bias after the sum: to the rank's own tokens under sequence parallelism."""
        found = []
        for tensor in self._linear(linear, cut=1).tensors:
            bound = dataclasses.replace(tensor, name=weight if tensor.name == "weight" else bias)
            if tensor.name == "bias" and inside:
                bound = dataclasses.replace(bound, once=False, grad="sum" if self.bound.residual != R else "complete")
            found.append(FusedTensor(bound=bound, sources=(_join(linear, tensor.name),)))
        return tuple(found)


def _stacked(name: str, held: Sequence[BoundTensor]) -> BoundTensor:
    """Several column-cut tensors as one; each is a section of it."""
    first = held[0]
    rows, own = sum(t.shape[0] for t in held), sum(t.local_shape[0] for t in held)
    return dataclasses.replace(
        first,
        name=name,
        shape=(rows, *first.shape[1:]),
        local_shape=(own, *first.local_shape[1:]),
        sections=tuple(t.shape[0] for t in held) if len(held) > 1 else (),
        unit=first.unit if len(held) == 1 else None,
    )


def _done_inside(moves: Sequence[BoundMove], ops: tuple[str, ...]) -> bool:
    if len(moves) != 1 or moves[0].op not in ops or moves[0].global_shape:
        return False
    for layout in (moves[0].src, moves[0].dst):
        if layout.dim not in (None, 0, 1):
            raise _Unfit(f"the plan cuts {layout} before or after it: TransformerEngine cuts tokens, S(0) or S(1)")
    return True


def _marked(moves: Sequence[BoundMove], *, inside: bool) -> tuple[BoundMove, ...]:
    """Moves around a fused layer, whose input is its first argument."""
    return tuple(
        dataclasses.replace(move, inside=inside, value=None if move.value is None else 0, name=None) for move in moves
    )


def _joined(leaves: Sequence[str]) -> str:
    """``q_proj``, ``k_proj``, ``v_proj``: ``qkv_proj``."""
    suffix = leaves[0][leaves[0].find("_") :] if "_" in leaves[0] else ""
    if len(leaves) > 1 and suffix and all(leaf.endswith(suffix) for leaf in leaves):
        return "".join(leaf.removesuffix(suffix) for leaf in leaves) + suffix
    return "_".join(leaves)


def _join(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix else path


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
