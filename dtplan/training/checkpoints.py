"""``dtplan.TrainingCheckpoints``: all that a training run needs to go on, saved at one degree and resumed at any."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.optim import Optimizer

from dtplan._errors import WeightsError
from dtplan.planner.apply import applied
from dtplan.training.manifest import Manifest, list_checkpoints, prune, read_json, step_folder, tidy
from dtplan.training.parts import Parts
from dtplan.training.plain import decode
from dtplan.training.planners import BlockLoadPlanner, BlockSavePlanner, state_dict_of
from dtplan.training.ranks import copies, finished, join, match_model
from dtplan.training.spread import Reshard
from dtplan.training.storage import SafetensorsReader, SafetensorsWriter
from dtplan.weights.agree import agreed, gather_objects, meet, rank_and_world
from dtplan.weights.blocks import Block
from dtplan.weights.staging import Staging, writing

__all__ = ["Resumed", "TrainingCheckpoints"]

STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where training goes on."""

    step: int
    extra: Any
    """What was given to ``save``."""
    per_rank: Mapping[str, Any]
    """This data-parallel rank's."""
    differences: tuple[str, ...]
    """What is not as it was, in words: plan, degrees, versions; streams of Python and numpy that differed by rank."""
    folder: Path


class TrainingCheckpoints:
    """The training checkpoints of one run, in ``folder``, which all ranks share; one subfolder a step.

    A checkpoint has the model, the optimizer's state, the scheduler, the step, random streams and what the user adds,
    and nothing that depends on degrees. Tensors go through torch's distributed checkpoint into safetensors files,
    every rank writing and reading its own parts; the rest is JSON. No pickle is written or read. A checkpoint appears
    at once, when it is complete: a save that dies leaves the others as they were.

    Args:
        folder: where the checkpoints are.
        model: parallelized; on the meta device if it is to be resumed.
        optimizer: made of the model's parameters after ``parallelize``.
        scheduler: anything with ``state_dict`` and ``load_state_dict`` of plain values.
        keep: how many checkpoints to keep, the latest; None is all.
        generators: further random streams by name.
        meet_seconds: how long a call waits for ranks that do not make it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        keep: int | None = 2,
        generators: Mapping[str, torch.Generator] | None = None,
        meet_seconds: float = 30.0,
    ) -> None:
        if keep is not None and keep < 1:
            raise WeightsError(f"keep={keep}: at least one checkpoint is kept; None keeps all")
        self._parts = Parts(
            model=model,
            applied=applied(model),
            optimizer=optimizer,
            scheduler=scheduler,
            generators=dict(generators or {}),
        )
        self._folder = Path(os.path.realpath(folder))
        self._keep, self._meet_seconds = keep, meet_seconds
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training checkpoint")
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[Future[None], Staging] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, the latest last."""
        return [step for _, step, _ in list_checkpoints(self._folder)]

    # ------------------------------------------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        *,
        extra: Any = None,
        per_rank: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> Path:
        """Writes the checkpoint of ``step``, then removes those that are not kept; returns its folder.

        Collective over all ranks. ``asynchronous`` copies this rank's blocks to the host and writes them from a
        thread while training goes on; the next ``save`` or ``wait`` waits for it and raises what it raised.

        Args:
            step: steps of the optimizer that are done.
            extra: the same on every rank, the position in the data for example: numbers, text, lists, tuples, dicts,
                small tensors.
            per_rank: by name what every data-parallel rank has of its own, a data loader's state for example.
            asynchronous: return as soon as everything is copied.

        Raises:
            WeightsError: the same on every rank: a rank did not call; ranks differ in what must be the same; a value
                cannot be written without pickle; the folder cannot be written.
        """
        meet("TrainingCheckpoints.save", self._meet_seconds)
        self.wait()
        blocks, plain = agreed(lambda: self._parts.held(step, extra, per_rank or {}))
        state = join(plain, self._parts.place)
        staging = Staging(step_folder(self._folder, step), gather_objects(secrets.token_hex(4))[0], carries=False)
        agreed(lambda: self._open(staging))
        agreed(lambda: self._check_shared(staging))
        if asynchronous:
            blocks = agreed(lambda: {name: copies(held) for name, held in blocks.items()})
        write = partial(self._write, blocks, staging, step, state)
        if asynchronous:
            if self._group is None and rank_and_world()[1] > 1:
                self._group = dist.new_group(backend="gloo")  # the thread's own: training's groups are in use
            self._pending = self._writer.submit(write, self._group), staging
        else:
            finished(write, staging)
        return staging.target

    def wait(self) -> None:
        """Waits until an asynchronous save is done. Collective over all ranks when there is one.

        Raises:
            WeightsError: the same on every rank: it failed; the checkpoints before it are as they were.
        """
        if self._pending is not None:
            (future, staging), self._pending = self._pending, None
            agreed(lambda: finished(future.result, staging))

    def _open(self, staging: Staging) -> None:
        if rank_and_world()[0] == 0:
            with writing(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                tidy(self._folder)
            staging.open()

    def _check_shared(self, staging: Staging) -> None:
        if not staging.path.is_dir():
            raise WeightsError(f"{self._folder}: this rank does not see what rank 0 writes there; all ranks share it")

    def _write(
        self,
        blocks: Mapping[str, Sequence[Block]],
        staging: Staging,
        step: int,
        state: Mapping[str, Any],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Runs in the calling thread, or in that of asynchronous saves on its own ``group``."""

        def done() -> None:
            """On rank 0, when all ranks have written."""
            with writing(staging.path):
                (staging.path / STATE).write_text(json.dumps(state, separators=(",", ":")), encoding="utf-8")
                order = 1 + max((order for order, _, _ in list_checkpoints(self._folder, broken=True)), default=0)
                Manifest.of(self._parts.applied.bound, staging.path, step=step, order=order).write(staging.path)
            staging.commit()
            prune(self._folder, self._keep)

        writer = SafetensorsWriter(staging.path, done)
        state_dict_saver.save(
            state_dict_of(blocks), storage_writer=writer, planner=BlockSavePlanner(), process_group=group
        )

    # ---------------------------------------------------------------------------------------------------- resuming

    def resume(
        self,
        step: int | None = None,
        *,
        leave_out: Sequence[str] = (),
        reshard: Mapping[str, Reshard] | None = None,
    ) -> Resumed | None:
        """Reads the latest checkpoint, or that of ``step``, into model, optimizer, scheduler and random streams.

        Collective over all ranks. None when the folder has no checkpoint. The degrees may be any: parameters and
        moments are those that were saved, bit for bit. What differs between ranks (``per_rank``, random streams that
        were not alike) needs as many ranks as before along the axes on which it differs, or is refused by name.

        Args:
            step: which checkpoint.
            leave_out: what to leave as it is here: "optimizer", "scheduler", "extra", "rng", or names of ``per_rank``
                and of streams.
            reshard: name -> a function of the values of all ranks that had one and this rank's ``Place``, whose
                result is this rank's value.

        Raises:
            WeightsError: the same on every rank: there is no such checkpoint; it is not whole; it is of another model
                or optimizer; it has something that has no place here, or lacks something. After a failure to read,
                values are undefined.
        """
        meet("TrainingCheckpoints.resume", self._meet_seconds)
        self.wait()
        folder = gather_objects(agreed(lambda: self._find(step)))[0]
        if folder is None:
            return None
        out, functions = frozenset(leave_out), dict(reshard or {})
        parts, bound = self._parts, self._parts.applied.bound
        manifest, state = agreed(lambda: self._read(folder))
        agreed(lambda: parts.check(folder, state, out, functions))
        streams, per_rank = agreed(lambda: parts.own(state, out, functions))
        reader = SafetensorsReader(folder)
        sources = agreed(lambda: match_model(parts.model, parts.applied.stored, reader.read_metadata()))
        blocks, optimizer = agreed(lambda: parts.to_fill(folder, sources, None if "optimizer" in out else state))
        finished(
            partial(state_dict_loader.load, state_dict_of(blocks), storage_reader=reader, planner=BlockLoadPlanner())
        )
        agreed(lambda: parts.restore(None if "scheduler" in out else state, optimizer, streams))
        return Resumed(
            step=manifest.step,
            extra=None if "extra" in out else decode(state["extra"]),
            per_rank=per_rank,
            differences=(
                *manifest.differences(bound),
                *(f"{name} is not restored: it {why}" for name, why in parts.unfit(state, functions).items()),
            ),
            folder=folder,
        )

    def _find(self, step: int | None) -> Path | None:
        there = {one: path for _, one, path in list_checkpoints(self._folder)}
        if step is None:
            return list(there.values())[-1] if there else None
        if step not in there:
            steps = ", ".join(map(str, there)) or "none"
            raise WeightsError(f"{self._folder}: has no checkpoint of step {step}; it has {steps}")
        return there[step]

    def _read(self, folder: Path) -> tuple[Manifest, Mapping[str, Any]]:
        """The small files."""
        manifest = Manifest.read(folder, sizes=rank_and_world()[0] == 0)
        ours = self._parts.applied.bound.architecture
        if manifest.architecture != ours:
            raise WeightsError(f"{folder}: is of a {manifest.architecture}, and this model is a {ours}")
        return manifest, read_json(folder / STATE)
