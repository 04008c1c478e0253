"""The two-step front door that users of SageMaker's model parallel library know: ``init``, then ``transform``."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtplan._errors import ApplyError, DegreesError
from dtplan.planner.agreement import together
from dtplan.planner.apply import parallelize
from dtplan.planner.degrees import AXES, Degrees, read_degrees

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class State:
    """What ``init`` set up: the degrees, and the mesh with the axes ``replicate``, ``shard`` and ``tp``."""

    degrees: Degrees
    mesh: DeviceMesh

    @property
    def rank(self) -> int:
        """This process among all."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.mesh.size()

    @property
    def tp_size(self) -> int:
        """Ranks that share every layer."""
        return self.mesh["tp"].size()

    @property
    def tp_rank(self) -> int:
        """This process among those that share its layers."""
        return self.mesh.get_local_rank("tp")

    @property
    def dp_size(self) -> int:
        """Ranks that read different data: the number by which a batch is divided."""
        return self.world_size // self.tp_size

    @property
    def dp_rank(self) -> int:
        """Which part of the data this process reads; the ranks of one tp group read the same."""
        return self.rank // self.tp_size

    @property
    def tensor_parallel_degree(self) -> int:
        """As ``tp_size``."""
        return self.tp_size

    @property
    def hybrid_shard_degree(self) -> int:
        """Ranks that share parameters, gradients and optimizer state; never 0 here."""
        return self.mesh["shard"].size()

    @property
    def tp_process_group(self) -> dist.ProcessGroup:
        """The ranks that share every layer."""
        return self.mesh.get_group("tp")

    @property
    def rep_rank_process_group(self) -> dist.ProcessGroup:
        """The ranks that hold replicas of the same shards."""
        return self.mesh.get_group("replicate")

    @property
    def world_process_group(self) -> dist.ProcessGroup:
        """All ranks."""
        group = dist.group.WORLD
        assert group is not None
        return group


class _Session:
    """The one thing that outlives a call: what the last ``init`` returned."""

    state: State | None = None


def init(
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    tensor_parallel_degree: int | None = None,
    hybrid_shard_degree: int | None = None,
    random_seed: int | None = None,
) -> State:
    """Set up ranks, degrees, mesh and seed, after or instead of ``init_process_group``. Collective.

    Under ``torchrun`` every process calls it; without, it sets up a world of one. Uses CUDA and nccl where
    there is a GPU, else gloo.

    Args:
        config: a dict or the path of a JSON file with the keys of this function; keywords win.
        tensor_parallel_degree: ranks that share every layer; default 1.
        hybrid_shard_degree: ranks that share parameters and optimizer state; 0, the default, is as many as
            there are, 1 is none: the remaining ranks hold replicas.
        random_seed: seeds every rank alike, so that a model built afterwards is the same on each.

    Raises:
        DegreesError: a ValueError, the same on every rank: an unknown key, a value out of range, or degrees
            that do not divide the number of ranks.
    """
    if not dist.is_initialized():
        _init_process_group()
        atexit.register(_end_process_group)
    degrees: Degrees = together(
        lambda: read_degrees(
            config,
            tensor_parallel_degree=tensor_parallel_degree,
            hybrid_shard_degree=hybrid_shard_degree,
            random_seed=random_seed,
        )
    )
    shape = degrees.mesh_shape(dist.get_world_size())
    mesh = init_device_mesh(_device_type(), shape, mesh_dim_names=AXES)
    if degrees.random_seed is not None:
        torch.manual_seed(degrees.random_seed)
    _Session.state = State(degrees=degrees, mesh=mesh)
    return _Session.state


def transform(model: M, *, load_state_dict_from_rank0: bool = False, **options: Any) -> M:
    """Shard ``model`` over the mesh that ``init`` made; ``options`` are those of ``parallelize``.

    With ``load_state_dict_from_rank0`` the weights are those that the model has on rank 0; on other ranks it may be
    on the meta device, and its values do not count. Each rank gets its part tensor by tensor.

    Raises:
        ApplyError: ``init`` was not called.
        BindError: no plan serves the model's class, or the plan does not fit.
        WeightsError: rank 0 has no weights to give.
    """
    mesh = get_state().mesh
    if not load_state_dict_from_rank0:
        return parallelize(model, mesh, **options)
    from dtplan.weights.api import load
    from dtplan.weights.rank0 import take_from_rank0

    held = take_from_rank0(model)
    model = parallelize(model, mesh, **options)
    load(model, held, from_rank0=True)
    return model


def get_state() -> State:
    """What ``init`` returned.

    Raises:
        ApplyError: ``init`` was not called.
    """
    if _Session.state is None:
        raise ApplyError("call dtplan.init({'tensor_parallel_degree': ...}) first")
    return _Session.state


def is_initialized() -> bool:
    """Whether ``init`` was called."""
    return _Session.state is not None


def reset() -> None:
    """Forget what ``init`` set up; the process group stays."""
    _Session.state = None


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _end_process_group() -> None:
    """What ``init`` began ends with the process; left to the interpreter, a backend's threads may abort it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _init_process_group() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    cuda = _device_type() == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if len(missing) == 4:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    elif missing:
        raise DegreesError(f"the environment lacks {', '.join(missing)}: start with torchrun, which sets all of them")
    else:
        dist.init_process_group(backend)
