"""Cases under *Fused projections* that load and save: files in, logits equal, the same bytes out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dtplan
from dtplan.planner.apply import applied
from dtplan.prove.oracle import whole
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights.blocks import blocks
from dtplan.weights.save import save_checkpoint
from tests.families import batch, build, on_meta, plan_file
from tests.models import build as build_model
from tests.models import neox
from tests.models import on_meta as on_meta_model

LAYERS = "model.layers.0"


def source(family: str, folder: Path) -> Any:
    """The unsharded model, whose files are in ``folder``."""
    model = (build_model(neox()) if family == "gpt_neox" else build(family)).float()
    save_checkpoint(model, folder, max_shard_bytes=10**9)
    return model


def loaded(family: str, folder: Path, axes: dict[str, int]) -> Any:
    """The model that was built on meta, cut as its plan says, and loaded."""
    model: Any = on_meta_model(neox()) if family == "gpt_neox" else on_meta(family)
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = dtplan.parallelize(model, mesh, "gpt_neox" if family == "gpt_neox" else plan_file(family))
    report = dtplan.load(model, folder)
    assert report.bytes_read == report.bytes_kept
    return model


def ranks_of(axes: dict[str, int]) -> int:
    return functools.reduce(lambda product, size: product * size, axes.values(), 1)


def logits(model: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = whole(model(**data, use_cache=False).logits)
    return found


def there_and_back(family: str, axes: dict[str, int], folder: Path) -> None:
    """Loaded, the logits are those of the unsharded model; saved, the file is the same."""
    reference = source(family, folder / "source")
    data = {"input_ids": batch("phi3", images=False)["input_ids"]}
    truth = logits(reference, data)

    def on_rank(rank: int) -> float:
        model = loaded(family, folder / "source", axes)
        distance = float((logits(model, data) - truth).abs().max())
        dtplan.save(model, folder / "saved")
        return distance

    assert max(simulated_ranks(ranks_of(axes), on_rank)) < 1e-4 * float(truth.abs().max())
    before, after = ((folder / name / "model.safetensors").read_bytes() for name in ("source", "saved"))
    assert before == after


def test_b21_gate_and_up_of_a_file_are_cut_part_by_part(tmp_path: Path) -> None:
    there_and_back("phi3", {"tp": 2}, tmp_path)


def test_b22_a_rank_holds_its_rows_of_q_k_and_v_and_the_file_is_whole(tmp_path: Path) -> None:
    file = source("phi3", tmp_path).state_dict()[f"{LAYERS}.self_attn.qkv_proj.weight"]

    def on_rank(rank: int) -> list[tuple[int, int]]:
        model = loaded("phi3", tmp_path, {"tp": 2})
        name = f"{LAYERS}.self_attn.qkv_proj.weight"
        parameter = model.get_parameter(name)
        held = blocks(name, parameter, applied(model).stored[name])
        assert all(torch.equal(block.local, file[block.slices]) for block in held)
        assert sum(block.local.numel() for block in held) == parameter.to_local().numel()
        return [(block.slices[0].start, block.slices[0].stop) for block in held]

    first, second = simulated_ranks(2, on_rank)
    assert first == [(0, 16), (32, 40), (48, 56)]
    assert second == [(16, 32), (40, 48), (56, 64)]


@pytest.mark.parametrize("axes", [{"shard": 4, "tp": 1}, {"shard": 2, "tp": 2}, {"shard": 4, "tp": 2}], ids=str)
def test_b23_fsdp_cuts_through_kv_groups_and_the_files_are_the_same(tmp_path: Path, axes: dict[str, int]) -> None:
    there_and_back("phi3", axes, tmp_path)


@pytest.mark.parametrize("family", ["gpt_neox", "phi3", "gpt2"])
def test_b24_each_layout_of_qkv_is_what_its_rule_says(tmp_path: Path, family: str) -> None:
    """Head by head, [Q; K; V], and [Q, K, V] along the columns of a Conv1D."""
    there_and_back(family, {"shard": 2, "tp": 2}, tmp_path)


def test_b85_gate_and_up_survive_a_change_of_the_mesh(tmp_path: Path) -> None:
    reference = source("phi3", tmp_path / "source").state_dict()

    def saving(rank: int) -> None:
        dtplan.save(loaded("phi3", tmp_path / "source", {"shard": 4, "tp": 1}), tmp_path / "dp4")

    def reading(rank: int, axes: dict[str, int]) -> None:
        model = loaded("phi3", tmp_path / "dp4", axes)
        again = tmp_path / "-".join(map(str, axes.values()))
        dtplan.save(model, again)
        for name, value in load_file(again / "model.safetensors").items():
            assert torch.equal(value, reference[name]), name

    simulated_ranks(4, saving)
    for axes in ({"shard": 2, "tp": 1}, {"shard": 2, "tp": 2}, {"shard": 1, "tp": 1}):
        simulated_ranks(ranks_of(axes), reading, axes)


def test_a_strided_shard_is_known_block_by_block() -> None:
    """What FSDP2 makes of a dim that tp has cut never leaves this process."""
    value = torch.arange(66.0).view(33, 2)

    def on_rank(rank: int) -> list[tuple[int, int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        placed = [_StridedShard(0, split_factor=2), Shard(0)]
        held = DTensor.from_local(_local(value, rank), mesh, placed, shape=value.shape, stride=(2, 1))
        (block,) = blocks("weight", held)
        assert torch.equal(block.local, value[block.slices])
        return [(block.slices[0].start, block.slices[0].stop)]

    assert simulated_ranks(4, on_rank) == [[(0, 9)], [(17, 25)], [(9, 17)], [(25, 33)]]


def _local(value: torch.Tensor, rank: int) -> torch.Tensor:
    """What tp cut first and FSDP2 then."""
    shard, tp = divmod(rank, 2)
    return value.chunk(2)[tp].chunk(2)[shard]


def test_a_moment_has_the_blocks_of_its_parameter() -> None:
    model = on_meta("gpt2")

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        sharded = dtplan.parallelize(on_meta("gpt2"), mesh, plan_file("gpt2"))
        stored = applied(sharded).stored
        for name, parameter in sharded.named_parameters():
            moment: Any = torch.zeros_like(parameter, device="cpu")
            held = blocks(name, moment, stored.get(name))
            assert sum(block.local.numel() for block in held) == moment.to_local().numel()
            assert {block.shape for block in held} <= {tuple(model.get_parameter(name).shape)}
            assert held

    simulated_ranks(4, on_rank)
