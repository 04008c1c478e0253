"""Loaded and saved: the same bits on every mesh, files as transformers writes them, and no more read than is kept."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from dtplan.weights import gather
from dtplan.weights.checkpoint import BlockReader
from dtplan.weights.load import LoadReport, load_checkpoint
from dtplan.weights.save import save_checkpoint
from dtplan.weights.slices import local_part
from tests.checkpoints import (
    Row,
    assert_same_bits,
    bits,
    expected,
    llama,
    neox,
    on_meta,
    on_ranks,
    saved,
    shard,
    stored,
)

MODELS = {
    "tied": lambda: llama(tied=True),
    "untied": lambda: llama(tied=False),
    "bf16": lambda: llama(tied=True, dtype=torch.bfloat16),
    "neox": neox,
}
MESHES: list[dict[str, int]] = [
    {"tp": 1},
    {"tp": 2},
    {"tp": 3},
    {"tp": 4},
    {"shard": 2},
    {"shard": 2, "tp": 2},
    {"replicate": 2, "shard": 2, "tp": 2},
]


def round_trip(mesh: DeviceMesh, empty: nn.Module, source: Path, target: Path) -> tuple[LoadReport, dict[str, Any]]:
    model = copy.deepcopy(empty)
    next(model.parameters()).requires_grad_(False)
    shard(model, mesh)
    params = dict(model.named_parameters(remove_duplicate=False))
    report = load_checkpoint(model, source)
    assert all(param is params[name] for name, param in model.named_parameters(remove_duplicate=False))
    assert [param.requires_grad for param in model.parameters()][:2] == [False, True]
    save_checkpoint(model, target, max_shard_bytes=9000)
    return report, {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_round_trip_is_bit_exact(kind, axes, tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "PIECE_BYTES", 700)  # several pieces for each matrix
    reference = MODELS[kind]()
    first = next(reference.parameters()).detach().view(-1)
    first[:2] = torch.tensor([-0.0, float("nan")])
    bits(first[1:2])[0] |= 0x15  # a NaN with a payload must come through
    assert first[1].isnan()
    source, target = saved(reference, tmp_path / "source"), tmp_path / "target"
    results = on_ranks(axes, round_trip, on_meta(reference), source, target)

    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    assert_same_bits(stored(target), stored(source))
    names = {name for name, _ in reference.named_parameters(remove_duplicate=False)}
    buffers = dict(reference.named_buffers())
    for report, computed in results:
        assert set(report.loaded) == names
        assert report.missing == report.unexpected == ()
        assert report.bytes_read == report.bytes_kept > 0
        assert_same_bits(computed, buffers)
    whole = sum(tensor.nbytes for tensor in stored(source).values())
    read = sum(report.bytes_read for report, _ in results) / axes.get("replicate", 1)
    norms = sum(t.nbytes for t in stored(source).values() if t.ndim == 1) * axes.get("tp", 1)
    assert whole <= read <= whole + norms

    back = AutoModelForCausalLM.from_pretrained(target)
    assert type(back) is type(reference)
    assert back.dtype == reference.dtype
    assert_same_bits(
        dict(back.named_parameters(remove_duplicate=False)), {n: reference.get_parameter(n) for n in names}
    )


def test_files_are_those_that_safetensors_writes(tmp_path):
    model = llama(tied=False)
    save_checkpoint(model, tmp_path / "ours")
    theirs = saved(model, tmp_path / "theirs") / "model.safetensors"
    save_file(load_file(theirs), theirs, metadata={"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("kind", ["tied", "untied", "neox"])
def test_transformers_and_dtplan_write_the_same_folder(tmp_path, kind):
    model = MODELS[kind]()
    save_checkpoint(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = ({f.name: f for f in (tmp_path / who).iterdir()} for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name in ("config.json", "generation_config.json"):
        assert json.loads(ours[name].read_text()) == json.loads(theirs[name].read_text())
    assert load_file(ours["model.safetensors"]).keys() == load_file(theirs["model.safetensors"]).keys()


def test_dtypes_are_converted_on_load_and_on_save(tmp_path):
    wide = llama()
    save_checkpoint(wide, tmp_path / "narrow", dtype=torch.bfloat16)
    narrow = {name: param.detach().bfloat16() for name, param in expected(wide).items()}
    assert_same_bits(stored(tmp_path / "narrow"), narrow)
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"

    model = on_meta(wide)
    report = load_checkpoint(model, tmp_path / "narrow")
    assert_same_bits(expected(model), {name: tensor.float() for name, tensor in narrow.items()})
    assert report.bytes_kept == sum(tensor.nbytes for tensor in narrow.values())


def test_ranks_without_a_row_load_step_and_save(tmp_path):
    torch.manual_seed(0)
    source = Row()
    save_checkpoint(source, tmp_path / "source")

    def run(mesh: DeviceMesh) -> int:
        model = copy.deepcopy(source).to("meta")
        for name, param in list(model.head.named_parameters()):
            whole = distribute_tensor(param.data, mesh["tp"], [Replicate()])
            model.head.register_parameter(name, nn.Parameter(whole))
        fully_shard(model, mesh=mesh["shard"])
        load_checkpoint(model, tmp_path / "source")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        save_checkpoint(model, tmp_path / "target")
        return local_part("weight", model.head.weight)[0].numel()

    assert on_ranks({"shard": 2, "tp": 2}, run) == [17, 17, 0, 0]
    step = 0.5 / math.sqrt(18)
    assert torch.allclose(stored(tmp_path / "target")["head.weight"], source.head.weight - step, atol=1e-6)
    assert stored(tmp_path / "target")["steps"] == 3


def test_a_loaded_fsdp_model_trains_and_saves_after_an_evaluation(tmp_path):
    reference = llama(vocab=33)
    source = saved(reference, tmp_path / "source")
    ids = torch.arange(8).view(1, 8)
    empty = on_meta(reference)

    def run(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        model = shard(copy.deepcopy(empty), mesh)
        load_checkpoint(model, source)
        before = model(ids).logits.detach()
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        with torch.no_grad():
            after = model(ids).logits  # leaves the root's parameters whole
        save_checkpoint(model, tmp_path / "target")
        return before, after

    before = reference(ids).logits.detach()
    reference(ids, labels=ids).loss.backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    for ours in on_ranks({"shard": 2}, run):
        assert torch.equal(ours[0], before)
        assert torch.allclose(ours[1], reference(ids).logits, atol=1e-5)  # the order of float32 sums
    for name, tensor in stored(tmp_path / "target").items():
        assert torch.allclose(tensor, reference.get_parameter(name), atol=1e-6), name


class Allocations(TorchDispatchMode):
    """The largest storage that operations make, shards of parameters among them, mapped files aside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for found in tree_leaves(out):
            tensor = found._local_tensor if isinstance(found, DTensor) else found
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.sizes[storage.data_ptr()] = max(storage.nbytes(), self.sizes.get(storage.data_ptr(), 0))
        return out


def test_no_rank_holds_more_than_its_blocks(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    reference = LlamaForCausalLM(config)
    source = saved(reference, tmp_path / "source")
    empty = on_meta(reference)
    mapped: set[int] = set()
    read = BlockReader.read

    def noted(self: BlockReader, name: str, block: tuple[slice, ...]) -> Tensor:
        view = read(self, name, block)
        mapped.add(view.untyped_storage().data_ptr())
        return view

    monkeypatch.setattr(BlockReader, "read", noted)

    def run(mesh: DeviceMesh) -> tuple[int, int, int]:
        model = shard(copy.deepcopy(empty), mesh)
        with Allocations() as allocations:
            report = load_checkpoint(model, source)
        blocks = [param.to_local().nbytes for param in model.parameters()]
        largest = max(size for pointer, size in allocations.sizes.items() if pointer not in mapped)
        assert report.bytes_read == report.bytes_kept == sum(blocks)
        return largest, max(blocks), max(param.nbytes for param in model.parameters())

    for largest, block, whole in on_ranks({"tp": 4}, run):
        assert largest == block == whole // 4
