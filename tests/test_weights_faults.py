"""What can go wrong with a checkpoint, made to happen: killed ranks, full disks, broken files, two jobs at once."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dtplan
from dtplan import WeightsError
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights import gather, load, materialise, writer
from dtplan.weights.checkpoint import BlockReader, open_checkpoint
from dtplan.weights.load import load_checkpoint
from dtplan.weights.save import save_checkpoint
from dtplan.weights.writer import ShardWriter
from tests.cases import model_of, t0

SHARD_BYTES = 9000  # several files of T0


def mesh(tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))


def model_with(seed: int) -> Any:
    """T0 with tensors of other values for each seed."""
    return model_of(t0(), seed=seed)


def saved(folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint in several files, and its tensors."""
    save_checkpoint(model_with(seed), folder, max_shard_bytes=SHARD_BYTES)
    return stored(folder)


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def loaded(folder: Path) -> dict[str, Tensor]:
    """What dtplan loads from a folder."""
    model = model_of(t0(), meta=True)
    load_checkpoint(model, folder)
    return {name: param.detach() for name, param in model.named_parameters()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def refusal(fn: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        fn(*args, **options)
    return str(caught.value)


def together(fn: Any, ranks: int = 2) -> str:
    """The one text that all simulated ranks are refused with."""
    (text,) = set(simulated_ranks(ranks, lambda rank: refusal(fn, rank)))
    return text


# ----------------------------------------------------------------------------------------------- kill -9 of a rank


def save_and_be_killed(rank: int, folder: Path, victim: int, moment: float) -> None:
    """Saves once to see how long it takes, and again to be killed from outside at that part of it."""
    gather.PIECE_BYTES = 700
    model = dtplan.parallelize(model_with(2), mesh(2))
    dist.barrier()
    start = time.perf_counter()
    dtplan.save(model, folder.with_name("trial"), max_shard_bytes=SHARD_BYTES)
    delay = moment * (time.perf_counter() - start)
    dist.barrier()
    if rank == victim:
        subprocess.Popen(["sh", "-c", f"sleep {delay:.4f}; kill -9 {os.getpid()}"])  # noqa: S607
    dtplan.save(model, folder, max_shard_bytes=SHARD_BYTES)
    if rank == victim:
        time.sleep(60)


MOMENTS = 20


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    victim: int, pool: GlooPool, tmp_path: Path
) -> None:
    """20 moments in all, at random within as many parts of the save; each rank is the victim of every other one."""
    draw = random.Random(victim)
    folder = tmp_path / "checkpoint"
    new = dict(model_with(2).named_parameters())
    old = saved(folder, 1)
    outcomes = []
    for part in range(victim, MOMENTS, 2):
        ended = pool.run_outcomes(save_and_be_killed, folder, victim, (part + draw.random()) / MOMENTS, ranks=2)
        assert "SIGKILL" in str(ended[victim].error)
        outcomes.append("new" if same(loaded(folder), new) else "old" if same(loaded(folder), old) else "neither")
        assert same(stored(folder), new if outcomes[-1] == "new" else old)  # no file of the other one beside them
        saved(folder, 1)
        shutil.rmtree(folder.with_name("trial"))
        assert beside(folder) == ["checkpoint"], "the next save removes what is left"
    assert set(outcomes) <= {"old", "new"}
    assert outcomes[0] == "old", "no moment was within the save"
