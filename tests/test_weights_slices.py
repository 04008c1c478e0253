"""Which block of a tensor a rank holds."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dtplan.weights.slices import block_slices, local_slices
from tests.checkpoints import on_ranks, refusal


@pytest.mark.parametrize("tp", range(1, 5))
def test_blocks_cover_a_tensor_exactly_once(tp):
    placements = {
        "tp cuts first": [Replicate(), _StridedShard(0, split_factor=tp), Shard(0)],
        "left to right": [Replicate(), Shard(0), Shard(0)],
        "two dims": [Replicate(), Shard(0), Shard(1)],
    }
    for (name, placed), size, parts in product(placements.items(), range(1, 2 * tp + 2), range(1, 4)):
        count = torch.zeros(size, 5, dtype=torch.int)
        for coordinate in product([0], range(parts), range(tp)):
            count[block_slices((size, 5), (2, parts, tp), placed, coordinate)] += 1
        assert count.eq(1).all(), (name, size, parts)


def test_blocks_of_an_uneven_vocabulary():
    blocks = [block_slices((33,), (4,), [Shard(0)], [rank])[0] for rank in range(4)]
    assert [(block.start, block.stop) for block in blocks] == [(0, 9), (9, 18), (18, 27), (27, 33)]


def test_fsdp_cuts_inside_what_tp_cut():
    placed = [_StridedShard(0, split_factor=2), Shard(0)]
    blocks = [block_slices((8,), (2, 2), placed, coordinate)[0] for coordinate in product(range(2), range(2))]
    assert [(block.start, block.stop) for block in blocks] == [(0, 2), (4, 6), (2, 4), (6, 8)]


class Bag(nn.Module):
    """Parameters that count upwards, one per size and width."""

    def __init__(self, sizes: range) -> None:
        super().__init__()
        shapes = [(size,) for size in sizes] + [(size, 3) for size in sizes]
        self.all = nn.ParameterList(torch.arange(float(math.prod(shape))).view(shape) for shape in shapes)


@pytest.mark.parametrize("axes", [{"tp": 3}, {"shard": 3, "tp": 2}, {"replicate": 2, "shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_are_what_dtensor_and_fsdp_hold(axes, dim):
    def run(mesh: DeviceMesh) -> int:
        bag = Bag(range(1, 2 * axes["tp"] + 2))
        whole = [param.detach().clone() for param in bag.all]
        for index, param in enumerate(bag.all):
            bag.all[index] = nn.Parameter(distribute_tensor(param.data, mesh["tp"], [Shard(min(dim, param.ndim - 1))]))
        if "shard" in axes:
            fully_shard(bag, mesh=mesh[tuple(axis for axis in axes if axis != "tp")])
        for full, param in zip(whole, bag.all, strict=True):
            assert torch.equal(full[local_slices(param)], param.to_local()), param.shape
        return len(whole)

    assert set(on_ranks(axes, run)) == {2 * (2 * axes["tp"] + 1)}


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        ([Replicate(), _StridedShard(0, split_factor=2)], "interleaves dim 0"),
        ([_StridedShard(0, split_factor=4), Shard(0)], "interleaves dim 0"),
        ([Replicate(), Partial()], "partial sum"),
    ],
)
def test_other_placements_are_refused(placed: list[Placement], words):
    assert words in refusal(block_slices, (8, 4), (2, 2), placed, (0, 0))
