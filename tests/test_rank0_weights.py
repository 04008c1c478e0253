"""Weights from a state dict, from rank 0 alone, and from the pickles of old checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

import dtplan
from dtplan import WeightsError
from dtplan.prove.oracle import wholes
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights import gather
from dtplan.weights.checkpoint import BlockReader
from dtplan.weights.rank0 import Broadcast
from tests.cases import gap, model_of, t0
from tests.families import CONFIGS, plan_file
from tests.models import llama

PIECE_BYTES = 700


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "PIECE_BYTES", PIECE_BYTES)


def sharded(model: nn.Module, shard: int = 2, tp: int = 2, plan: Any = "auto") -> Any:
    mesh = init_device_mesh("cpu", (shard, tp), mesh_dim_names=("shard", "tp"))
    return dtplan.parallelize(model, mesh, plan)


def assert_holds(model: nn.Module, values: dict[str, Tensor]) -> None:
    held = wholes(model, model.state_dict())
    assert held.keys() == values.keys()
    assert all(torch.equal(held[name], value) for name, value in values.items())


# ----------------------------------------------------------------------------------------------- a state dict


def dict_on_rank(rank: int, values: dict[str, Tensor]) -> None:
    model = sharded(model_of(t0(), meta=True))
    before = {name: (id(value), value.clone()) for name, value in values.items()}
    report = dtplan.load(model, values)
    assert report.bytes_read == report.bytes_kept < sum(value.nbytes for value in values.values())
    assert all(type(value) is Tensor for value in values.values())
    assert all((id(values[name]), True) == (key, torch.equal(values[name], old)) for name, (key, old) in before.items())
    assert_holds(model, values)


def test_b74_a_full_state_dict_is_sliced_to_the_placements_and_left_as_it_is() -> None:
    simulated_ranks(4, dict_on_rank, dict(model_of(t0()).state_dict()))


def test_sharded_and_empty_state_dicts_are_refused() -> None:
    def run(rank: int, values: dict[str, Tensor] | None) -> str:
        model = sharded(model_of(t0(), meta=True))
        with pytest.raises(WeightsError) as caught:
            dtplan.load(model, values if values is not None else dict(model.state_dict()))
        return str(caught.value)

    (text,) = set(simulated_ranks(4, run, None))
    assert text.startswith("the state dict: holds tensors on meta or sharded ones, first ")
    assert all("are not in the checkpoint" in text for text in simulated_ranks(4, run, {"x": torch.ones(1)}))
    with pytest.raises(WeightsError, match="there is nothing to load"):
        dtplan.load(dtplan.parallelize(model_of(t0(), meta=True), one_rank_mesh()))


def one_rank_mesh() -> Any:
    """The mesh of a world of one; its process group is made here and taken down by the fixture."""
    return dtplan.init({}).mesh


@pytest.fixture(autouse=True)
def _no_group() -> Any:
    yield
    dtplan.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ from rank 0


def from_rank0(rank: int, config: Any, plan: Any, source: Any, shard: int, tp: int) -> tuple[int, int, int]:
    model = sharded(model_of(config, meta=True), shard, tp, plan)
    report = dtplan.load(model, source if rank == 0 else None, from_rank0=True)
    truth = model_of(config)
    assert_holds(model, dict(truth.state_dict()))
    assert all(torch.equal(buffer, truth.get_buffer(name)) for name, buffer in model.named_buffers())
    return report.bytes_read, report.bytes_kept, len(report.loaded)


@pytest.mark.parametrize(("shard", "tp"), [(1, 1), (1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["folder", "state dict"])
def test_rank_0_reads_and_every_rank_gets_its_shards(tmp_path: Path, kind: str, shard: int, tp: int) -> None:
    config = llama(vocab_size=33, tie_word_embeddings=True)
    reference = model_of(config)
    reference.save_pretrained(tmp_path)
    source = tmp_path if kind == "folder" else dict(reference.named_parameters())
    total = sum(parameter.nbytes for parameter in reference.parameters())
    found = simulated_ranks(shard * tp, from_rank0, config, "auto", source, shard, tp)
    assert [read for read, _, _ in found] == [total] + [0] * (shard * tp - 1)
    norms = sum(parameter.nbytes for parameter in reference.parameters() if parameter.dim() == 1)
    assert sum(kept for _, kept, _ in found) == total + (tp - 1) * norms


def test_rank_0_gives_fused_tensors(tmp_path: Path) -> None:
    config = CONFIGS["phi3"]()
    values = dict(model_of(config).state_dict())
    simulated_ranks(4, from_rank0, config, plan_file("phi3"), values, 2, 2)


def test_no_rank_holds_more_than_a_piece_beyond_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    receive = Broadcast._receive

    def noted(self: Broadcast, *args: Any) -> Tensor:
        piece = receive(self, *args)
        held.append(self._buffer.untyped_storage().nbytes())
        return piece

    monkeypatch.setattr(Broadcast, "_receive", noted)
    values = dict(model_of(llama()).state_dict())
    simulated_ranks(4, from_rank0, llama(), "auto", values, 1, 4)
    assert max(held) <= PIECE_BYTES < max(value.nbytes for value in values.values())


def failing_on_rank(rank: int, folder: Path) -> str:
    model = sharded(model_of(t0(), meta=True))
    with pytest.raises(WeightsError) as caught:
        dtplan.load(model, folder if rank == 0 else folder / "not-here", from_rank0=True)
    return str(caught.value)


def test_when_rank_0_fails_all_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = set(simulated_ranks(4, lambda rank: failing_on_rank(rank, tmp_path / "none")))
    assert "no such folder" in text
    assert text.endswith("[on rank 0 of 4]")
    model_of(t0()).save_pretrained(tmp_path)
    read, calls = BlockReader.read, 0

    def fail(self: BlockReader, name: str, block: tuple[slice, ...]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise WeightsError("the disk is gone")
        return read(self, name, block)

    monkeypatch.setattr(BlockReader, "read", fail)
    texts = set(simulated_ranks(4, lambda rank: failing_on_rank(rank, tmp_path)))
    assert texts == {"the disk is gone [on rank 0 of 4]"}


def test_ranks_that_see_different_checkpoints_are_refused() -> None:
    values = dict(model_of(t0()).state_dict())

    def run(rank: int) -> str:
        model = sharded(model_of(t0(), meta=True))
        with pytest.raises(WeightsError) as caught:
            dtplan.load(model, values | ({"lm_head.weight": torch.ones(31, 32)} if rank == 2 else {}))
        return str(caught.value)

    (text,) = set(simulated_ranks(4, run))
    assert "lists other tensors on ranks [2] than on rank 0" in text


# ---------------------------------------------------------------------------------- the two-step front door


def transformed(rank: int) -> tuple[dict[str, tuple[bool, float]], str]:
    """With the other ranks' model on meta, and with other values there; then with nothing on rank 0."""
    dtplan.init({"tensor_parallel_degree": 2, "hybrid_shard_degree": 2})
    found = {others: _transformed(rank, others) for others in ("meta", "other values")}
    with pytest.raises(WeightsError) as caught:
        dtplan.transform(model_of(t0(), meta=rank == 0), load_state_dict_from_rank0=True)
    return found, str(caught.value)


def _transformed(rank: int, others: str) -> tuple[bool, float]:
    config = t0(tie_word_embeddings=True)
    model = model_of(config, seed=rank, meta=rank > 0 and others == "meta")
    assert dtplan.transform(model, load_state_dict_from_rank0=True) is model
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    truth = model_of(config)
    assert_holds(model, dict(truth.state_dict()))
    assert all(torch.equal(buffer, truth.get_buffer(name)) for name, buffer in model.named_buffers())
    ids = torch.arange(8).view(1, 8)
    model(ids, labels=ids).loss.backward()
    truth(ids, labels=ids).loss.backward()
    distance = gap(model.lm_head.weight.grad, truth.lm_head.weight.grad)
    return model.lm_head.weight is model.model.embed_tokens.weight, distance


def test_b29_rank_0_gives_a_tied_model_and_the_tie_gets_its_whole_gradient(pool: GlooPool) -> None:
    for found, refusal in pool.run(transformed):
        assert all(tied and distance < 1e-6 for tied, distance in found.values()), found
        assert "model.embed_tokens.weight is on meta on rank 0" in refusal


# ----------------------------------------------------------------------------------- pickles, and names that differ


def pickled(model: nn.Module, folder: Path, shards: int) -> None:
    """The files that transformers wrote before safetensors."""
    names = [f"pytorch_model-{k}-of-{shards}.bin" for k in range(shards)] if shards > 1 else ["pytorch_model.bin"]
    weight_map = {name: names[k % shards] for k, name in enumerate(model.state_dict())}
    for file in names:
        torch.save({n: value for n, value in model.state_dict().items() if weight_map[n] == file}, folder / file)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def loaded_on_rank(rank: int, config: LlamaConfig, folder: Path) -> None:
    model = sharded(model_of(config, meta=True))
    report = dtplan.load(model, folder)
    assert report.bytes_kept <= report.bytes_read
    assert_holds(model, dict(model_of(config).state_dict()))


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_checkpoints_are_read_as_tensors(tmp_path: Path, shards: int) -> None:
    config = t0(tie_word_embeddings=True)
    pickled(model_of(config), tmp_path, shards)
    simulated_ranks(4, loaded_on_rank, config, tmp_path)


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("this must not run",)


@pytest.mark.parametrize("kind", ["code", "truncated", "old", "list"])
def test_pickles_that_are_not_plain_tensors_are_refused(tmp_path: Path, capsys: Any, kind: str) -> None:
    file = tmp_path / "pytorch_model.bin"
    if kind == "code":
        torch.save({"lm_head.weight": Payload()}, file)
    elif kind == "old":
        torch.save(dict(model_of(t0()).state_dict()), file, _use_new_zipfile_serialization=False)
    elif kind == "list":
        torch.save([torch.ones(1)], file)
    else:
        torch.save(dict(model_of(t0()).state_dict()), file)
        file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin: (is not read|holds a list)"):
        dtplan.load(dtplan.parallelize(model_of(t0(), meta=True), one_rank_mesh()), tmp_path)
    assert "must not run" not in capsys.readouterr().out


def test_names_left_out_are_logged_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(t0())
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["extra.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    mine = dtplan.parallelize(model, one_rank_mesh())
    with pytest.raises(WeightsError, match=r"1 of the model are not in the checkpoint: lm_head\.weight"):
        dtplan.load(mine, tmp_path)
    with caplog.at_level(logging.WARNING, "dtplan"):
        report = dtplan.load(mine, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("lm_head.weight",), ("extra.weight",))
    assert "lm_head.weight" in caplog.text
    assert "extra.weight" in caplog.text
