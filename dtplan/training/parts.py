"""What a training run is made of: read out for a save, and put back by a resume at whatever degrees."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dtplan._errors import WeightsError, did_you_mean
from dtplan.planner.apply import Applied
from dtplan.training.optimizer import OptimizerState, optimizer_plain, optimizer_state, parameters_by_id, restore, some
from dtplan.training.plain import decode, encode
from dtplan.training.ranks import Plain, model_blocks
from dtplan.training.spread import Place, Reshard, misfit, own_value
from dtplan.training.streams import UNSHARED, check_streams, read_streams, set_stream
from dtplan.weights.blocks import Block
from dtplan.weights.materialise import materialise
from dtplan.weights.state import current_device, state_tensors

__all__ = ["Parts"]

NAMES = ("optimizer", "scheduler", "extra", "rng")
"""What ``leave_out`` may say besides the names of streams and of ``per_rank``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What ``TrainingCheckpoints`` was given."""

    model: nn.Module
    applied: Applied
    optimizer: Optimizer | None
    scheduler: Any
    generators: Mapping[str, torch.Generator]

    @property
    def place(self) -> Place:
        """Where this rank stands."""
        return Place.of(self.applied.mesh)

    @property
    def device(self) -> torch.device:
        """The device whose random stream counts."""
        return current_device(self.applied.mesh.device_type)

    # ------------------------------------------------------------------------------------------------------ saving

    @torch.no_grad()
    def held(self, step: Any, extra: Any, per_rank: Mapping[str, Any]) -> tuple[dict[str, Sequence[Block]], Plain]:
        """This rank's blocks, and what is small."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise WeightsError(f"step={step!r}: give the number of steps that are done")
        blocks: dict[str, Sequence[Block]] = dict(model_blocks(self.model, self.applied.stored))
        same: dict[str, Any] = {"step": step, "extra": encode(extra, "extra")}
        if self.optimizer is not None:
            names = parameters_by_id(self.model, self.applied.stored)
            same["optimizer"], moments = optimizer_plain(self.optimizer, names)
            blocks |= moments
        if self.scheduler is not None:
            same["scheduler"] = encode(self.scheduler.state_dict(), "scheduler")
        streams = read_streams(self.device, self.generators)
        plain = Plain(
            same=same,
            streams={name: encode(state, name) for name, state in streams.items()},
            per_rank={name: encode(value, f"per_rank.{name}") for name, value in per_rank.items()},
        )
        return blocks, plain

    # ---------------------------------------------------------------------------------------------------- resuming

    def check(
        self, folder: Path, state: Mapping[str, Any], out: Collection[str], functions: Mapping[str, Reshard]
    ) -> None:
        """What the checkpoint in ``folder`` has, is here, or is left ``out``. Raises WeightsError."""
        for part, here in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            if part not in out and (part in state) != (here is not None):
                has, lacks = ("checkpoint", "call") if part in state else ("call", "checkpoint")
                raise WeightsError(
                    f"{folder}: the {has} has {part} and the {lacks} has not; give TrainingCheckpoints what was saved, "
                    f"or resume(leave_out=[{part!r}])"
                )
        known = {*NAMES, *state["rng"], *state["per_rank"]}
        for name in [*out, *functions]:
            if name not in known:
                hint = did_you_mean(name, known) or f"it has {', '.join(sorted(known))}"
                raise WeightsError(f"{folder}: has no {name!r} to leave out or reshard; {hint}")

    def own(
        self, state: Mapping[str, Any], out: frozenset[str], functions: Mapping[str, Reshard]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's random streams and ``per_rank`` values."""

        def own(records: Mapping[str, Any], left: Collection[str]) -> dict[str, Any]:
            taken = {name: record for name, record in records.items() if name not in left}
            return {name: own_value(name, record, self.place, functions) for name, record in taken.items()}

        streams = own(state["rng"], state["rng"].keys() if "rng" in out else out | self.unfit(state, functions).keys())
        check_streams(streams, state["rng"], out, self.device, self.generators)
        return streams, own(state["per_rank"], out)

    def unfit(self, state: Mapping[str, Any], functions: Mapping[str, Reshard]) -> dict[str, str]:
        """Streams of Python and numpy that cannot be given back here, and why."""
        records = {name: state["rng"][name] for name in UNSHARED if name in state["rng"] and name not in functions}
        return {name: problem for name, record in records.items() if (problem := misfit(record, self.place))}

    def to_fill(
        self, folder: Path, sources: Mapping[str, str], state: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], OptimizerState | None]:
        """The blocks that the checkpoint is to fill, in storage that is there afterwards."""
        undefined = materialise(self.model, "cpu" if self.applied.cpu_offload else None)
        tensors = state_tensors(self.model, self.applied.stored)
        if left := sorted(undefined - {owner for tensor in tensors for owner in tensor.owners}):
            raise WeightsError(
                f"{folder}: {len(left)} tensors of the model would be left without a value: {some(left)}; "
                "neither the checkpoint nor the model's `_init_weights` gives them one: build the model on the CPU"
            )
        blocks: dict[str, Any] = model_blocks(self.model, self.applied.stored, sources)
        if self.optimizer is None or state is None:
            return blocks, None
        names = parameters_by_id(self.model, self.applied.stored)
        optimizer = optimizer_state(self.optimizer, names, state["optimizer"])
        return blocks | optimizer.blocks, optimizer

    def restore(
        self, state: Mapping[str, Any] | None, optimizer: OptimizerState | None, streams: Mapping[str, Any]
    ) -> None:
        """Puts back what is no tensor of the model; the optimizer's tensors are filled by now."""
        if self.optimizer is not None and optimizer is not None:
            restore(self.optimizer, optimizer)
        if self.scheduler is not None and state is not None:
            self.scheduler.load_state_dict(decode(state["scheduler"]))
        for name, value in streams.items():
            set_stream(name, value, self.device, self.generators)
