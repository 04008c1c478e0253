"""Each family's files, as transformers writes them: onto a 2-D mesh and back, names and bytes alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan.prove.oracle import wholes
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights.checkpoint import open_checkpoint
from dtplan.weights.compare import differences
from tests.families import CONFIGS, build, on_meta, plan_file


def there_and_back(name: str, source: Path, target: Path) -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        model = dtplan.parallelize(on_meta(name), mesh, plan_file(name))
        report = dtplan.load(model, source)
        assert report.bytes_read == report.bytes_kept
        assert report.missing == report.unexpected == ()
        dtplan.save(model, target)

    simulated_ranks(4, on_rank)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_s_files_come_back_the_same(name: str, tmp_path: Path) -> None:
    model: Any = build(name).float()
    model.save_pretrained(tmp_path / "source")
    there_and_back(name, tmp_path / "source", tmp_path / "saved")
    assert [*differences(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "saved"), {})] == []


def test_experts_are_one_by_one_in_files_and_load_joined_as_well(tmp_path: Path) -> None:
    model: Any = build("mixtral").float()
    model.save_pretrained(tmp_path / "apart")
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    names = {which: [*load_file(tmp_path / which / "model.safetensors")] for which in ("apart", "joined")}
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names["apart"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names["joined"]
    there_and_back("mixtral", tmp_path / "joined", tmp_path / "saved")
    assert [*differences(open_checkpoint(tmp_path / "apart"), open_checkpoint(tmp_path / "saved"), {})] == []


def test_an_expert_that_is_missing_is_named_as_in_the_file(tmp_path: Path) -> None:
    model: Any = build("mixtral").float()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    def on_rank(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded: nn.Module = dtplan.parallelize(on_meta("mixtral"), mesh, plan_file("mixtral"))
        with pytest.raises(dtplan.WeightsError) as caught:
            dtplan.load(sharded, tmp_path)
        return str(caught.value)

    (text,) = set(simulated_ranks(2, on_rank))
    assert f"1 of the model are not in the checkpoint: {lost}" in text


def test_experts_come_from_rank_0_alone(tmp_path: Path) -> None:
    model: Any = build("mixtral").float()
    model.save_pretrained(tmp_path)
    truth = dict(model.named_parameters())

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        sharded = dtplan.parallelize(on_meta("mixtral"), mesh, plan_file("mixtral"))
        dtplan.load(sharded, tmp_path if rank == 0 else None, from_rank0=True)
        held = wholes(sharded, {name: p.detach() for name, p in sharded.named_parameters()})
        assert all(held[name].equal(value) for name, value in truth.items())

    simulated_ranks(4, on_rank)
