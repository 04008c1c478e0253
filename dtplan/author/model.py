"""A whole model's draft: its list of blocks, what lies around them, ties, FSDP units."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtplan.author.compose import ON_STREAM, Block, Form
from dtplan.author.draft import PlanDraft, RuleDraft
from dtplan.author.fused import fused_layers
from dtplan.author.order import below
from dtplan.author.owned import buffers_of, parameters_of, tensors_of
from dtplan.author.sample import Sample, sample
from dtplan.author.trace import first_tensor, trace_block
from dtplan.author.units import Units
from dtplan.planner.placing import module_kind
from dtplan.prove.edits import pattern_of
from dtplan.prove.oracle import float64_casts, logits_of
from dtplan.prove.shrink import CannotProveError

_IDLE = "takes no part on tokens alone"
_GLOBAL = {"to": "residual", "global_shape": True}


@dataclass(frozen=True, slots=True)
class _Called:
    """The first call of a module: the order, what went in and out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


def draft_plan(real: nn.Module) -> PlanDraft:
    """A draft for ``real`` (on the meta device or live), from the data flow of a small model of its class.

    Raises:
        CannotProveError: no small model of the class runs on tokens alone, or it has no list of blocks.
    """
    small = sample(real)
    calls = _walk(small)
    layers = _layers(small, calls)
    config: Any = real.config
    units = Units(small, config.get_text_config(decoder=True))
    blocks = _blocks(small, calls, layers, units)
    rules = [*_around(small, calls, layers, units, before=True)]
    rules += below(_merged(blocks), f"{layers}.*")
    rules += _around(small, calls, layers, units, before=False)
    rules = list({rule.path: rule for rule in rules}.values())  # one path for all items of a list around the blocks
    name, used = type(real).__name__, set(_words([rule.keys for rule in rules]))
    return PlanDraft(
        name=str(getattr(config, "model_type", name)),
        serves=(name,),
        units={name: fields for name, fields in units.in_order().items() if name in used},
        unit_notes=units.notes,
        rules=tuple(rules),
        ties=_ties(real, {rule.path for rule in rules}),
        te=fused_layers(small.model, layers, blocks, rules),
        fsdp=(f"{layers}.*",),
    )


def _words(value: Any) -> Iterator[str]:
    """All strings in the keys of rules, units among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (word for one in value.values() for word in _words(one))
    elif isinstance(value, Sequence):
        yield from (word for one in value for word in _words(one))


def _walk(small: Sample) -> dict[str, _Called]:
    """Every module's first call, in the order in which they began."""
    calls: dict[str, _Called] = {}
    handles = []
    for name, module in small.model.named_modules():

        def hook(_m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, name: str = name) -> None:
            if calls[name].out is None:
                calls[name] = _Called(args, kwargs, out)

        def began(_m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            calls.setdefault(name, _Called(args, kwargs, None))

        handles.append(module.register_forward_pre_hook(began, with_kwargs=True))
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        with float64_casts(), torch.no_grad():
            logits_of(small.model, small.batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _layers(small: Sample, calls: dict[str, _Called]) -> str:
    """The list of blocks: of those whose items all ran, the one with the most parameters."""
    lists = {
        name: module
        for name, module in small.model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(f"{name}.{i}" in calls for i in range(len(module)))
    }
    outermost = {n: m for n, m in lists.items() if not any(n.startswith(f"{other}.") for other in lists)}
    if not outermost:
        raise CannotProveError(f"{type(small.model).__name__} has no list of blocks that run one after another")
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in outermost.items()}
    return str(max(sizes, key=lambda name: sizes[name]))


def _blocks(small: Sample, calls: dict[str, _Called], layers: str, units: Units) -> list[Block]:
    """One block of each kind; where kinds ask for different forms in one place, all take the region's."""
    kinds: dict[tuple[Any, ...], str] = {}
    for name, module in small.model.get_submodule(layers).named_children():
        kinds.setdefault(_kind(module), f"{layers}.{name}")
    forms: dict[str, Form] = {}
    while True:
        blocks = [_block(small, calls[name], name, units, forms) for name in kinds.values()]
        chosen: dict[str, set[Form]] = {}
        for block in blocks:
            for root, form in block.chosen.items():
                chosen.setdefault(root, set()).add(form)
        mixed: dict[str, Form] = {root: "region" for root, found in chosen.items() if len(found) > 1}
        if not mixed:
            return blocks
        forms |= mixed


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return tuple((n, type(m).__name__, *tensors_of(m)) for n, m in module.named_modules())


def _block(small: Sample, call: _Called, name: str, units: Units, forms: dict[str, Form]) -> Block:
    module = small.model.get_submodule(name)
    with float64_casts(), torch.no_grad():
        trace = trace_block(module, call.args, call.kwargs)
    block = Block(module, trace, units, forms)
    block.compose()
    return block


def _merged(blocks: Sequence[Block]) -> list[RuleDraft]:
    """The rules of all kinds; where two say different things of a path, the second is told in a comment."""
    merged: dict[str, RuleDraft] = {}
    for block in blocks:
        for rule in block.ordered():
            have = merged.setdefault(rule.path, rule)
            if have.keys != rule.keys and not have.undecided:
                notes = (f"kinds of layers ask for different rules: {dict(have.keys)} and {dict(rule.keys)}",)
                merged[rule.path] = dataclasses.replace(have, keys={"style": "todo"}, notes=notes)
    return list(merged.values())


# ---------------------------------------------------------------------------------------------- around the blocks


def _around(
    small: Sample, calls: dict[str, _Called], layers: str, units: Units, *, before: bool
) -> Iterator[RuleDraft]:
    """Rules of the modules that own something outside of the blocks, those that run before or after them."""
    model = small.model
    embedding, head = _input(model), _output(model)
    order = list(calls)
    first_block = order.index(f"{layers}.0")
    idle = _idle(model, calls)
    if not before:
        yield from (RuleDraft(path=name, keys={"style": "replicate", "below": True}, remark=_IDLE) for name in idle)
    for name, module in _in_order(model, order):
        if any(f"{name}.".startswith(f"{one}.") for one in idle):
            continue
        if not tensors_of(module) or name.startswith(f"{layers}."):
            continue
        runs_before = name not in calls or order.index(name) < first_block
        if runs_before != before:
            continue
        if f"{layers}.".startswith(f"{name}."):
            yield from (_loose(f"{name}.{leaf}", module) for leaf in tensors_of(module))
        elif module is head and module is not embedding:
            yield _head(name, module, units)
        elif module is embedding:
            yield _embedding(name, module, units)
        else:
            yield _other(name, module, calls.get(name), small)


def _idle(model: nn.Module, calls: dict[str, _Called]) -> list[str]:
    """The outermost modules with several below, none of which ran: a tower for images."""
    found: list[str] = []
    for name, module in model.named_modules():
        below = [f"{name}.{other}" for other, _ in module.named_modules() if other]
        ran = any(one in calls for one in (name, *below))
        in_another = any(name.startswith(f"{other}.") for other in found)
        if name and len(below) > 1 and not ran and not in_another and list(module.parameters()):
            found.append(name)
    return found


def _in_order(model: nn.Module, order: list[str]) -> list[tuple[str, nn.Module]]:
    place = {name: i for i, name in enumerate(order)}
    return sorted(model.named_modules(), key=lambda item: place.get(item[0], len(order)))


def _input(model: nn.Module) -> nn.Module | None:
    found: nn.Module | None = getattr(model, "get_input_embeddings", lambda: None)()
    return found


def _output(model: nn.Module) -> nn.Module | None:
    found: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return found


def _embedding(name: str, module: nn.Module, units: Units) -> RuleDraft:
    keys: dict[str, Any] = {"style": "vocab", "unit": units.vocabulary(), "output": _GLOBAL}
    remark = ""
    if module_kind(module) != "Embedding":
        keys = {"style": "vocab", "like": "Embedding", **{k: v for k, v in keys.items() if k != "style"}}
        remark = f"{type(module).__name__} is an Embedding that does more, row by row"
    return RuleDraft(path=pattern_of(name), keys=keys, remark=remark)


def _head(name: str, module: nn.Module, units: Units) -> RuleDraft:
    if module_kind(module) in ("Linear", "Conv1D"):
        return RuleDraft(path=name, keys={"style": "colwise", "unit": units.vocabulary(), "output": "logits"})
    note = f"{type(module).__name__} is no plain Linear (`shard` cuts single parameters)"
    whole = {"style": "replicate", "below": True, "input": "R"}
    return RuleDraft(path=name, keys={"style": "todo"}, notes=(note,), choices=(whole,))


def _loose(path: str, module: nn.Module) -> RuleDraft:
    """A parameter or buffer of a module around the blocks."""
    if path.rpartition(".")[2] in buffers_of(module):
        return RuleDraft(path=path, keys={"style": "replicate"})
    return RuleDraft(path=path, keys={"style": "todo"}, notes=("a parameter of the module around the blocks",))


def _other(name: str, module: nn.Module, call: _Called | None, small: Sample) -> RuleDraft:
    """Norms and position embeddings on the stream, tables; and what has to be decided."""
    path, keys = pattern_of(name), {"style": "replicate"}
    parameters = parameters_of(module).values()
    if not parameters:
        return RuleDraft(path=path, keys=keys)
    if call is None:
        return RuleDraft(path=path, keys=keys, remark=_IDLE)
    out = first_tensor(call.out)
    given = [t for t in (first_tensor(a) for a in (*call.args, *call.kwargs.values())) if t is not None]
    if out is None or out.shape[-1] != _width(small):
        return _undecided(path, module, "what it gives is no part of the residual stream")
    if isinstance(module, nn.Embedding):
        return RuleDraft(path=path, keys={"style": "replicate", "output": _GLOBAL})
    if given and given[0].shape == out.shape and all(p.dim() == 1 for p in parameters):
        return RuleDraft(path=path, keys={"style": "norm", "output": _GLOBAL})
    return _undecided(path, module, "it works on the residual stream and is neither a norm nor an embedding")


def _undecided(path: str, module: nn.Module, seen: str) -> RuleDraft:
    names = ", ".join(parameters_of(module))
    notes = (f"{type(module).__name__} with {names}: {seen}",)
    return RuleDraft(path=path, keys={"style": "todo"}, notes=notes, choices=ON_STREAM)


def _width(small: Sample) -> int:
    return int(small.text.hidden_size)


def _ties(real: nn.Module, paths: set[str]) -> tuple[tuple[str, ...], ...]:
    """What is tied here, or may be tied in the class."""
    names: dict[int, list[str]] = {}
    for name, parameter in real.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = [tuple(tied) for tied in names.values() if len(tied) > 1]
    keys = getattr(real, "_tied_weights_keys", None)
    for one, other in keys.items() if isinstance(keys, dict) else ():
        found.append((str(other), str(one)))
    ruled = [tie for tie in found if all(name.rpartition(".")[0] in paths for name in tie)]
    return tuple(dict.fromkeys(tuple(tie) for tie in ruled))
