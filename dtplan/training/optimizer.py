"""Optimizer state by the names of parameters in Hugging Face checkpoints, so that it fits any degree and any order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dtplan._errors import WeightsError
from dtplan.planner.stored import Stored
from dtplan.training.plain import decode, encode
from dtplan.weights.blocks import Block, blocks
from dtplan.weights.checkpoint import DTYPE_NAMES, DTYPES
from dtplan.weights.state import state_tensors

__all__ = ["OptimizerState", "moment_name", "optimizer_plain", "optimizer_state", "parameters_by_id", "restore", "some"]

_LIKE = "__like_parameter__"
"""Marks a state tensor that has the shape and placement of its parameter; its value is the dtype."""
_NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A parameter and the tensors in checkpoints that make it up: more than one if it is fused."""

    owner: str
    """Its name in the model."""
    sources: tuple[str, ...]
    stored: Stored | None


def parameters_by_id(model: nn.Module, stored: Mapping[str, Stored]) -> dict[int, Named]:
    """Parameter -> its names; of a tied one those of its first name."""
    found: dict[int, Named] = {}
    for state in state_tensors(model, stored):
        before = found.get(id(state.tensor))
        sources = (*(before.sources if before else ()), state.names[0])
        found[id(state.tensor)] = Named(owner=state.owners[0], sources=sources, stored=state.stored)
    return found


def moment_name(source: str, key: str) -> str:
    """A state tensor's name in the checkpoint, as torch's own state dicts of optimizers are flattened."""
    return f"optim.state.{source}.{key}"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first of ``names``, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --------------------------------------------------------------------------------------------------------- saving


def optimizer_plain(optimizer: Optimizer, names: Mapping[int, Named]) -> tuple[dict[str, Any], dict[str, list[Block]]]:
    """The optimizer as JSON, and this rank's blocks of the tensors that are placed as their parameters.

    The JSON is the same on every rank: options of the groups with the names of their parameters; of every parameter,
    its state by key. Raises WeightsError, with the names, when something is not the model's or cannot be written.
    """
    groups, state = [], {}
    held: dict[str, list[Block]] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        members = [names_of(parameter, names) for parameter in group["params"]]
        groups.append(
            {
                "options": encode(options, f"optimizer.param_groups[{number}]"),
                "parameters": [source for named in members for source in named.sources],
            }
        )
        for parameter, named in zip(group["params"], members, strict=True):
            own = optimizer.state.get(parameter, {})
            record = {key: _record(named.owner, key, value, parameter) for key, value in own.items()}
            state.update(dict.fromkeys(named.sources, record))
            for key, said in record.items():
                if isinstance(said, dict) and _LIKE in said:
                    for block in blocks(named.owner, own[key], named.stored):
                        held.setdefault(moment_name(block.source, key), []).append(block)
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}, held


def names_of(parameter: Tensor, names: Mapping[int, Named]) -> Named:
    """The names of one of the optimizer's parameters. Raises WeightsError when it is none of the model's."""
    if id(parameter) not in names:
        raise WeightsError(
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not the model's: make the "
            "optimizer after dtplan.parallelize, from model.parameters()"
        )
    return names[id(parameter)]


def _record(owner: str, key: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or (value.dim() == 0 and not isinstance(value, DTensor)):
        return encode(value, f"optimizer state {key} of {owner}")
    alike = isinstance(value, DTensor) == isinstance(parameter, DTensor) and value.shape == parameter.shape
    if alike and isinstance(value, DTensor) and isinstance(parameter, DTensor):
        alike = value.placements == parameter.placements and value.device_mesh == parameter.device_mesh
    if not alike:
        raise WeightsError(
            f"optimizer state {key} of {owner}: {_kind(value)}, where the parameter is {_kind(parameter)}; numbers and "
            "tensors that are placed as the parameter is (torch.zeros_like makes such) can be saved and resharded"
        )
    return {_LIKE: DTYPE_NAMES[value.dtype]}


def _kind(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"a DTensor of shape {list(tensor.shape)} placed as {tensor.placements}"
    return f"a plain tensor of shape {list(tensor.shape)}"


# -------------------------------------------------------------------------------------------------------- resuming


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """A state dict for ``load_state_dict``, and its tensors' blocks, which are still to be filled."""

    state_dict: dict[str, Any]
    blocks: dict[str, list[Block]]


@torch.no_grad()
def optimizer_state(optimizer: Optimizer, names: Mapping[int, Named], saved: Mapping[str, Any]) -> OptimizerState:
    """What ``saved``, made by ``optimizer_plain`` at any degrees, is for this optimizer.

    Raises WeightsError, with the names, when the groups or the parameters differ.
    """
    if saved["class"] != type(optimizer).__name__:
        raise WeightsError(f"the checkpoint's optimizer is {saved['class']}, this one {type(optimizer).__name__}")
    members = [[names_of(parameter, names) for parameter in group["params"]] for group in optimizer.param_groups]
    groups = _matched([[s for named in group for s in named.sources] for group in members], saved)
    held: dict[str, list[Block]] = {}
    state: dict[int, dict[str, Any]] = {}
    param_groups, index = [], 0
    for group, own, theirs in zip(optimizer.param_groups, members, groups, strict=True):
        indices = range(index, index + len(own))
        index += len(own)
        kept = {key: value for key, value in group.items() if key == "param_names"}
        param_groups.append({**decode(theirs["options"]), **kept, "params": list(indices)})
        for number, parameter, named in zip(indices, group["params"], own, strict=True):
            values = _values(parameter, named, saved["state"])
            if values:
                state[number] = {key: value for key, value, _ in values}
            for key, value, like in values:
                if like:
                    for block in blocks(named.owner, value, named.stored):
                        held.setdefault(moment_name(block.source, key), []).append(block)
    return OptimizerState(state_dict={"state": state, "param_groups": param_groups}, blocks=held)


def restore(optimizer: Optimizer, found: OptimizerState) -> None:
    """Gives the optimizer its state, through its own ``load_state_dict``."""
    optimizer.load_state_dict(found.state_dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in found.state_dict["state"].items():
        own = optimizer.state[parameters[number]]
        for key, value in values.items():
            # torch gives moments the dtype of their parameter: here they keep the one that they had.
            if isinstance(value, Tensor) and value.dim() and own[key].dtype != value.dtype:
                own[key] = value


def _matched(groups: list[list[str]], saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The checkpoint's group of each of ``groups``, by the names in it."""
    ours = [source for group in groups for source in group]
    theirs = [source for group in saved["groups"] for source in group["parameters"]]
    missing = [name for name in ours if name not in set(theirs)]
    unexpected = [name for name in theirs if name not in set(ours)]
    if missing or unexpected:
        lines = ["the optimizer and the checkpoint's hold different parameters"]
        if missing:
            lines.append(f"  {len(missing)} have no optimizer state in the checkpoint: {some(missing)}")
        if unexpected:
            lines.append(f"  {len(unexpected)} of the checkpoint are not in this optimizer: {some(unexpected)}")
        hint = "train the same parameters, or begin with a new optimizer: resume(leave_out=['optimizer', 'scheduler'])"
        raise WeightsError("\n".join([*lines, f"  = {hint}"]))
    found = []
    for number, group in enumerate(groups):
        match = [one for one in saved["groups"] if set(one["parameters"]) == set(group)]
        if not match:
            raise WeightsError(
                f"param_groups[{number}] of the optimizer ({some(group, 3)}) is no group of the checkpoint's: "
                "make the groups as they were made when it was saved"
            )
        found.append(match[0])
    return found


def _values(parameter: Tensor, named: Named, saved: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """A parameter's state: key, value, and whether it is a tensor like the parameter, made here and to be filled."""
    records = {source: saved[source] for source in named.sources}
    if len({json.dumps(record, sort_keys=True) for record in records.values()}) > 1:
        raise WeightsError(f"{named.owner} is made up of {some(named.sources)}, whose optimizer states differ")
    return list(_made(parameter, records[named.sources[0]]))


def _made(parameter: Tensor, record: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    for key, said in record.items():
        like = isinstance(said, dict) and _LIKE in said
        yield key, torch.empty_like(parameter, dtype=DTYPES[said[_LIKE]]) if like else decode(said), like
