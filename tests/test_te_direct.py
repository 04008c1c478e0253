"""Sums of two tp ranks by copies from one to the other, in place of an all-reduce."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan._errors import ApplyError
from dtplan.prove.oracle import BOUND, errors, outcome
from dtplan.te import direct
from dtplan.te import engine as engines
from tests import te_standin
from tests.families import batch
from tests.test_te import build


class Wires:
    """A lane over gloo. As a GPU's, it has one buffer, which the next exchange fills."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.group, self.size = group, size
        self.buffer = torch.empty(0)
        self.log: list[str] = []

    def fits(self, x: Tensor) -> bool:
        return x.is_contiguous() and x.nbytes <= self.size

    def exchange(self, x: Tensor) -> Callable[[], Tensor]:
        self.log.append("exchange")
        sent, self.buffer = x.clone(), torch.empty_like(x)
        other = dist.get_global_rank(self.group, 1 - dist.get_rank(self.group))
        works: list[Any] = [dist.isend(sent, other, self.group), dist.irecv(self.buffer, other, self.group)]

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return self.buffer

        return arrived

    def read(self) -> None:
        self.log.append("read")


def _sums(rank: int) -> tuple[list[float], list[str]]:
    world: Any = dist.group.WORLD
    wires = Wires(world, 64)
    group = direct.over(world, wires)
    first, second, large, most = (torch.full((n,), rank + 1.0) for n in (8, 4, 32, 8))
    one = dist.all_reduce(first, group=group, async_op=True)
    two = dist.all_reduce(second, group=group, async_op=True)  # the first still needs the buffer
    assert one is not None
    assert two is not None
    for work in (one, two, one):
        work.wait()
    dist.all_reduce(large, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    assert all(len(set(x.tolist())) == 1 for x in (first, second, large, most))
    return [x[0].item() for x in (first, second, large, most)], wires.log


def test_what_fits_goes_through_the_lane_one_after_another(pool):
    """Sums that do not fit, and anything that is no sum, are left to the ranks' own group."""
    for values, log in pool.run(_sums, ranks=2):
        assert values == [3.0, 3.0, 3.0, 2.0]
        assert log == ["exchange", "read"] * 2


def _step(rank: int, name: str, axes: dict[str, int], tokens: int) -> tuple[float, int]:
    """The worst error of a step on the stand-in, and how many sums went through the lane."""
    lanes: list[Wires] = []

    def lane_of(group: dist.ProcessGroup, size: int) -> Wires:
        lanes.append(Wires(group, size))
        return lanes[-1]

    te_standin_only(lane_of)
    model, data = build(name), batch("llama", images=False)
    truth = outcome(copy.deepcopy(model), data)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    sharded = dtplan.parallelize(model, mesh, te="require", overlap_tokens=tokens, loss_parallel=True)
    return max(errors(outcome(sharded, data), truth).values()), lanes[0].log.count("exchange")


def te_standin_only(lane_of: Callable[..., Any]) -> None:
    """In a rank's own process, which ends with the call."""
    engines.find = lambda: te_standin.ENGINE  # type: ignore[assignment]
    direct.lane_of = lane_of


@pytest.mark.parametrize(("name", "axes"), [("llama", {"tp": 2}), ("neox, sequential", {"shard": 2, "tp": 2})], ids=str)
def test_fused_layers_are_exact_over_a_lane(pool, name, axes):
    """Two sums forward and two backward in each of two layers."""
    tokens = batch("llama", images=False)["input_ids"].numel()
    for error, sums in pool.run(_step, name, axes, tokens, ranks=torch.Size(axes.values()).numel()):
        assert error <= BOUND
        assert sums == 8
    for error, sums in pool.run(_step, name, axes, tokens - 1, ranks=torch.Size(axes.values()).numel()):
        assert error <= BOUND
        assert sums == 0  # the batch is larger than what was promised


def test_a_lane_is_between_two_gpus(standin, monkeypatch, simulated):
    """More ranks need sequence parallelism, fewer have no sums, and GPUs that share nothing are told of."""
    model = build("neox, sequential")

    def on_rank(rank: int, ranks: int) -> str:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        with pytest.raises(ApplyError) as caught:
            dtplan.parallelize(copy.deepcopy(model), mesh, overlap_tokens=16)
        return str(caught.value)

    for ranks in (1, 4):
        assert all(
            "over two tp ranks" in said and f"tp is {ranks}" in said for said in simulated(ranks, on_rank, ranks)
        )

    def apart(*_: Any) -> None:
        raise RuntimeError("no access to the peer's memory\nat some line")

    monkeypatch.setattr(direct, "Copies", apart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    [said] = {*simulated(2, on_rank, 2)}
    assert said == (
        "overlap_tokens: the GPUs of ranks [0, 1] do not share memory (no access to the peer's memory); leave it out"
    )
