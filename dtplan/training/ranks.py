"""What the ranks of a save or a resume hold of the model, say to each other, and how they fail together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dtplan._errors import WeightsError
from dtplan.planner.stored import Stored
from dtplan.training.optimizer import some
from dtplan.training.spread import Place, spread
from dtplan.weights.agree import agreed, gather_objects, rank_and_world
from dtplan.weights.blocks import Block
from dtplan.weights.staging import Staging
from dtplan.weights.state import state_tensors

__all__ = ["Plain", "copies", "finished", "join", "match_model", "model_blocks"]

MODEL = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A rank's small state, encoded."""

    same: dict[str, Any]
    """What must be the same on every rank."""
    streams: dict[str, Any]
    per_rank: dict[str, Any]


def model_blocks(
    model: nn.Module, stored: Mapping[str, Stored], sources: Mapping[str, str] | None = None
) -> dict[str, list[Block]]:
    """This rank's blocks of parameters and persistent buffers, by their names in the training checkpoint.

    Of a tied tensor's names the first is taken, or what ``sources`` says. Raises WeightsError for a tensor on meta.
    """
    held = {}
    for state in state_tensors(model, stored):
        if state.tensor.is_meta:
            raise WeightsError(f"{state.names[0]} is on the meta device and has no values: load or initialise first")
        held[MODEL + state.names[0] if sources is None else sources[state.names[0]]] = state.blocks()
    return held


def match_model(model: nn.Module, stored: Mapping[str, Stored], metadata: Metadata) -> dict[str, str]:
    """The first name of each tensor of the model -> its name in the training checkpoint.

    Raises WeightsError, with the names, when tensors are missing or left over, or shapes or dtypes differ.
    """
    there = {name: said for name, said in metadata.state_dict_metadata.items() if name.startswith(MODEL)}
    found, missing, unlike = {}, [], []
    for state in state_tensors(model, stored):
        name = next((MODEL + name for name in state.names if MODEL + name in there), None)
        if name is None:
            missing.append(state.names[0])
            continue
        found[state.names[0]] = name
        said = there[name]
        assert isinstance(said, TensorStorageMetadata)
        if (tuple(said.size), said.properties.dtype) != (state.shape, state.tensor.dtype):
            was, now = f"{said.properties.dtype} {list(said.size)}", f"{state.tensor.dtype} {list(state.shape)}"
            unlike.append(f"{state.names[0]} is {was}, the model's is {now}")
    left = sorted(there.keys() - set(found.values()))
    if missing or left or unlike:
        lines = ["the checkpoint is of another model"]
        if missing:
            lines.append(f"  {len(missing)} of the model are not in the checkpoint: {some(missing)}")
        if left:
            lines.append(f"  {len(left)} of the checkpoint are not in the model: {some(left)}")
        raise WeightsError("\n".join([*lines, *(f"  {one}" for one in unlike[:8])]))
    return found


def copies(held: Sequence[Block]) -> list[Block]:
    """The blocks in memory of the host that training does not touch."""
    return [replace(block, local=block.local.detach().to("cpu", copy=True)) for block in held]


def join(plain: Plain, place: Place) -> dict[str, Any]:
    """The small state of all ranks as one. Collective over the default group.

    Raises WeightsError, the same on every rank: ranks differ in what must be the same.
    """
    everyone = gather_objects((plain, place))
    places = [one for _, one in everyone]

    def joined() -> dict[str, Any]:
        for rank, (one, _) in enumerate(everyone):
            names = [*plain.streams, *plain.per_rank]
            if [*one.streams, *one.per_rank] != names:
                raise WeightsError(f"rank {rank} has {some([*one.streams, *one.per_rank])}, and another {some(names)}")
            if differs := _first_difference(everyone[0][0].same, one.same, ""):
                raise WeightsError(
                    f"{differs[1:]} differs between ranks 0 and {rank}: it must be the same on every rank; what "
                    "differs between data-parallel ranks goes into per_rank"
                )
        streams = {name: spread(name, [one.streams[name] for one, _ in everyone], places) for name in plain.streams}
        per_rank = {
            name: spread(f"per_rank.{name}", [one.per_rank[name] for one, _ in everyone], places, over_data=True)
            for name in plain.per_rank
        }
        return {**plain.same, "rng": streams, "per_rank": per_rank}

    return agreed(joined)


def _first_difference(one: Any, other: Any, path: str) -> str:
    """Where two pieces of JSON begin to differ; empty if they are equal."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((found for key in one if (found := _first_difference(one[key], other[key], f"{path}.{key}"))), "")
    # As text, in which nan is nan and 1 is not 1.0.
    return "" if json.dumps(one) == json.dumps(other) else path


def finished(step: Callable[[], Any], staging: Staging | None = None) -> None:
    """Runs a step of torch's distributed checkpoint, which fails on all ranks when it fails on one.

    Then ``staging`` is removed. Raises WeightsError, the same on every rank.
    """
    try:
        step()
    except BaseException as error:
        if staging is not None and rank_and_world()[0] == 0:
            staging.discard()
        if not isinstance(error, CheckpointException):
            raise
        by_text: dict[str, list[int]] = {}
        for rank, (failure, _) in sorted(error.failures.items()):
            text = str(failure) if isinstance(failure, WeightsError) else f"{type(failure).__name__}: {failure}"
            by_text.setdefault(text, []).append(rank)
        lines = [f"{text} [on rank {', '.join(map(str, ranks))}]" for text, ranks in by_text.items()]
        raise WeightsError("\n".join(lines)) from None
