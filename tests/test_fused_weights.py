"""Fused parameters in and out of checkpoints: sections of one tensor, and one parameter out of several tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dtplan import WeightsError
from dtplan.planner.stored import Part, Stored
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights.blocks import blocks
from dtplan.weights.load import LoadReport, load_checkpoint
from dtplan.weights.save import save_checkpoint


@st.composite
def fused_tensors(draw: Any) -> tuple[Stored, dict[str, Tensor]]:
    """A fused dim, and the tensors that it is put together from."""
    tp, dim = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    parts: list[Part] = []
    lengths: dict[str, int] = {}
    for _ in range(draw(st.integers(1, 4))):
        source = draw(st.sampled_from(["q", "kv"]))
        size = tp * draw(st.integers(1, 3))
        parts.append(Part(source=source, start=lengths.get(source, 0), size=size))
        lengths[source] = lengths.get(source, 0) + size
    shapes = {name: (length, 5) if dim == 0 else (5, length) for name, length in lengths.items()}
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    return Stored(dim=dim, tp=tp, parts=tuple(draw(st.permutations(parts)))), tensors


class Layer(nn.Module):
    """One fused parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def sharded(stored: Stored, shape: torch.Size, shard: int, device: str = "meta") -> nn.Module:
    """The layer as a plan with sections and FSDP2 leave it."""
    mesh = init_device_mesh("cpu", (shard, stored.tp), mesh_dim_names=("shard", "tp"))
    layer = Layer(distribute_tensor(torch.zeros(shape, device=device), mesh["tp"], [Shard(stored.dim)]))
    if shard > 1:
        fully_shard(layer, mesh=mesh["shard"])
    return layer


def on_rank(rank: int, stored: Stored, shape: torch.Size, shard: int, folder: Path) -> tuple[LoadReport, Tensor, int]:
    model = sharded(stored, shape, shard)
    report = load_checkpoint(model, folder / "source", stored={"weight": stored})
    weight: Any = model.weight
    moment: Any = torch.zeros_like(weight.detach())
    found = blocks("weight", moment, stored)
    for block in found:
        block.local.fill_(1)
    assert moment.to_local().eq(1).all(), "the blocks cover the storage, of a moment as well"
    save_checkpoint(model, folder / "target", stored={"weight": stored})
    return report, weight.detach().full_tensor(), len(found)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fused=fused_tensors(), shard=st.integers(1, 3))
def test_a_fused_tensor_is_read_and_written_as_what_it_is_made_of(
    fused: tuple[Stored, dict[str, Tensor]], shard: int, tmp_path: Path
) -> None:
    stored, tensors = fused
    whole = stored.join(tensors)
    (tmp_path / "source").mkdir(exist_ok=True)
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    world = shard * stored.tp
    found = simulated_ranks(world, on_rank, stored, whole.shape, shard, tmp_path)
    for report, here, _ in found:
        assert torch.equal(here, whole)
        assert report.bytes_read == report.bytes_kept
        assert report.loaded == ("weight",)
    assert sum(report.bytes_kept for report, _, _ in found) == whole.nbytes
    source, target = tmp_path / "source" / "model.safetensors", tmp_path / "target" / "model.safetensors"
    assert {name: tensor.tolist() for name, tensor in load_file(target).items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    assert source.read_bytes() == target.read_bytes()


def test_parts_that_lie_together_are_one_block() -> None:
    stored = Stored(dim=0, tp=1, parts=tuple(Part(source="qkv", start=start, size=4) for start in (0, 4, 8)))
    (block,) = blocks("weight", torch.zeros(12, 3), stored)
    assert (block.source, block.shape, block.slices) == ("qkv", (12, 3), (slice(0, 12), slice(0, 3)))
    assert len(blocks("weight", torch.zeros(24, 3), Stored(dim=0, tp=2, parts=stored.parts))) == 6


GATE_UP = Stored(dim=0, tp=1, parts=(Part(source="gate", start=0, size=4), Part(source="up", start=0, size=4)))


def test_parts_that_are_missing_are_named_as_in_checkpoints(tmp_path: Path) -> None:
    save_file({"gate": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="1 of the model are not in the checkpoint: up"):
        load_checkpoint(Layer(torch.zeros(8, 2)), tmp_path, stored={"weight": GATE_UP})
    with pytest.raises(WeightsError, match="left without a value: weight"):
        load_checkpoint(Layer(torch.zeros(8, 2, device="meta")), tmp_path, stored={"weight": GATE_UP}, strict=False)
    model = Layer(torch.zeros(8, 2))
    report = load_checkpoint(model, tmp_path, stored={"weight": GATE_UP}, strict=False)
    assert (report.loaded, report.missing) == ((), ("up",))
    assert model.weight.sum() == math.prod((4, 2)), "the part that is there is loaded"


def test_a_part_of_another_size_is_refused(tmp_path: Path) -> None:
    save_file({"gate": torch.ones(4, 2), "up": torch.ones(5, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"up has shape \(5, 2\), the model's has \(4, 2\)"):
        load_checkpoint(Layer(torch.zeros(8, 2)), tmp_path, stored={"weight": GATE_UP})


def test_a_tie_of_fused_parameters_has_the_parts_of_both_names(tmp_path: Path) -> None:
    first, second = Layer(torch.zeros(8, 2)), Layer(torch.zeros(8, 2))
    second.weight = first.weight
    model = nn.ModuleDict({"a": first, "b": second})
    tied = {
        f"{name}.weight": Stored(
            dim=0, tp=1, parts=tuple(Part(source=f"{name}.{part.source}", start=0, size=4) for part in GATE_UP.parts)
        )
        for name in ("a", "b")
    }
    save_file({"a.gate": torch.ones(4, 2), "b.up": torch.full((4, 2), 2.0)}, tmp_path / "model.safetensors")
    report = load_checkpoint(model, tmp_path, stored=tied)
    assert report.loaded == ("a.weight", "b.weight")
    assert second.weight.sum() == 24
