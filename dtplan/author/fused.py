"""Which TransformerEngine layers a draft names: norms with the columns that read them, rows, gated and plain MLPs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from dtplan.author.compose import Block
from dtplan.author.cutting import Cutting
from dtplan.author.draft import Keys, RuleDraft
from dtplan.author.trace import Call, Product, first_tensor, tensors_in
from dtplan.te.probe import ACTIVATIONS, GATED, mlp_computes, norm_of


def fused_layers(
    model: nn.Module, layers: str, blocks: Sequence[Block], rules: Sequence[RuleDraft]
) -> Mapping[str, tuple[Keys, ...]]:
    """The plan's `te` key: below the path of the blocks, and below that of what comes behind them."""
    if any(rule.undecided for rule in rules):
        return {}
    found: dict[str, tuple[Keys, ...]] = {}
    norms: dict[str, list[Keys]] = {}
    for rule in rules:
        if rule.keys.get("style") == "norm" and "*" not in rule.path:
            owner, _, leaf = rule.path.rpartition(".")
            norm = norm_of(model.get_submodule(rule.path))
            if norm is not None and norm.fusable and owner:
                norms.setdefault(owner, []).append({"layer": norm.kind, "norm": leaf})
    found |= {owner: tuple(each) for owner, each in norms.items()}
    inside = [layer for block in blocks for layer in _of_block(block)]
    if inside:
        unique = [layer for i, layer in enumerate(inside) if layer not in inside[:i]]
        found[f"{layers}.*"] = tuple(unique)
    return found


def _of_block(block: Block) -> Iterator[Keys]:
    own = {g.root for b in block.branches if block.chosen[b.root] in ("own", "parallel") for g in b.groups}
    layers = [
        layer
        for c in block.cuttings
        if c.group.root in own and block.rules_of(c) == ("colwise", "rowwise")
        for layer in _of_group(block, c)
    ]
    fused = {layer["norm"] for layer in layers if "norm" in layer}
    yield from layers
    for call in block.trace.calls.values():
        rule = block.rules.get(call.name)
        if call.name and call.name not in fused and rule is not None and rule.keys.get("style") == "norm":
            norm = norm_of(block.module.get_submodule(call.name))
            if norm is not None and norm.fusable:
                yield {"layer": norm.kind, "norm": call.name}


def _of_group(block: Block, cutting: Cutting) -> Iterator[Keys]:
    """A norm and its columns as one layer, and the row; an MLP as one layer where it computes what one does."""
    first, last = cutting.group.first, cutting.group.last
    columns = [_owner(p) for p in first]
    plain = all(type(block.module.get_submodule(name)) is nn.Linear for name in (*columns, _owner(last[0])))
    if not plain or len(last) != 1 or len(first) + 1 != len(cutting.group.products):
        return
    norm = _norm_before(block, first)
    if norm is None:
        yield {"layer": "Linear", "linear": _owner(last[0])}
        return
    mlp = _mlp(block, cutting, norm, columns, _owner(last[0]))
    if mlp is not None:
        yield mlp
        if mlp["activation"] != "gelu":
            return
    yield {"layer": "LayerNormLinear", "norm": norm, "linears": columns}
    yield {"layer": "Linear", "linear": _owner(last[0])}


def _mlp(block: Block, cutting: Cutting, norm: str, columns: Sequence[str], down: str) -> dict[str, Any] | None:
    """The fused MLP, if the group's module computes one; a gelu may be the erf form, which is told when applied."""
    root = cutting.group.root
    leaves = [name.removeprefix(f"{root}.") for name in (*columns, down)]
    if not root or len(columns) > 2 or any("." in leaf for leaf in leaves):
        return None
    module = block.module.get_submodule(root)
    orders = [(None, columns[0])] if len(columns) == 1 else [(columns[0], columns[1]), (columns[1], columns[0])]
    for gate, up in orders:
        for activation in GATED if gate else ACTIVATIONS:
            names: dict[str, Any] = {"gate": gate and _leaf(gate), "up": _leaf(up), "down": leaves[-1]}
            plain = GATED.get(activation, activation) == "gelu"
            if mlp_computes(module, activation, **names) or (
                plain and mlp_computes(module, activation, erf=True, **names)
            ):
                gated = {"gate": gate} if gate else {}
                return {
                    "layer": "LayerNormMLP",
                    "norm": norm,
                    **gated,
                    "up": up,
                    "down": down,
                    "activation": activation,
                }
    return None


def _norm_before(block: Block, first: Sequence[Product]) -> str | None:
    """The norm whose output all of ``first`` read, and nothing else that is cut."""
    given = {id(p.read) for p in first}
    for call in block.trace.calls.values():
        if call.name and block.rules.get(call.name) and block.rules[call.name].keys.get("style") == "norm":
            out = first_tensor(call.out)
            if out is not None and (given == {id(out)} or _same_memory(first, call)):
                readers = [p for p in block.trace.products if id(p.read) == id(out)]
                norm = norm_of(block.module.get_submodule(call.name))
                if norm is not None and norm.fusable and (not readers or len(readers) == len(first)):
                    return call.name
    return None


def _same_memory(first: Sequence[Product], call: Call) -> bool:
    out = next(iter(tensors_in([call.out])))
    return all(p.read.data_ptr() == out.data_ptr() and p.read.numel() == out.numel() for p in first)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _owner(product: Product) -> str:
    return product.parameter.rpartition(".")[0]
