"""dtplan.weights: streaming load, sharded save, and what both do when something is wrong."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import resource
import shutil
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    initialization,
)

from dtplan._errors import WeightsError
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights import gather, load, staging
from dtplan.weights.agree import agree
from dtplan.weights.checkpoint import BlockReader, open_checkpoint, read_header
from dtplan.weights.layouts import file_layout
from dtplan.weights.load import LoadReport, load_checkpoint
from dtplan.weights.materialise import materialise
from dtplan.weights.save import save_checkpoint
from dtplan.weights.shards import pack
from dtplan.weights.slices import block_slices, local_part, local_slices
from dtplan.weights.writer import FileTensor, ShardWriter

# ----------------------------------------------------------------------------------------------- tiny models


def llama(*, vocab: int = 33, tied: bool = True, layers: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    )
    return cast(LlamaForCausalLM(config), dtype)


def neox(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=33, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return cast(GPTNeoXForCausalLM(config), dtype)


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Parameters in ``dtype``; buffers keep theirs, as when transformers builds a model in a dtype."""
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


def on_meta(model: Any) -> Any:
    """The same model as a user builds it before a load: on meta, in the same dtypes."""
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    return cast(empty, next(model.parameters()).dtype)


ROWWISE = ("o_proj.weight", "down_proj.weight", "attention.dense.weight", "dense_4h_to_h.weight")
COLUMN_BIASES = ("query_key_value.bias", "dense_h_to_4h.bias")


def tp_placement(name: str, param: Tensor) -> Placement:
    if param.ndim == 1 and not name.endswith(COLUMN_BIASES):
        return Replicate()
    return Shard(1 if name.endswith(ROWWISE) else 0)


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """Every parameter a DTensor, as after an apply: cut on tp, then FSDP2 over the other axes; ties kept."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        made: dict[int, nn.Parameter] = {}
        for path, module in model.named_modules():
            for name, param in list(module._parameters.items()):
                if param is None:
                    continue
                if id(param) not in made:
                    local = distribute_tensor(param.data, mesh["tp"], [tp_placement(f"{path}.{name}", param)])
                    made[id(param)] = nn.Parameter(local, requires_grad=param.requires_grad)
                module._parameters[name] = made[id(param)]
    axes = tuple(axis for axis in ("replicate", "shard") if axis in names)
    if axes:
        for module in model.modules():
            if type(module).__name__.endswith(("DecoderLayer", "NeoXLayer")):
                fully_shard(module, mesh=mesh[axes])
        fully_shard(model, mesh=mesh[axes])
    return model


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def on_ranks(axes: dict[str, int], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """``fn(mesh, *args)`` on simulated ranks."""
    return simulated_ranks(math.prod(axes.values()), lambda _: fn(mesh_of(axes), *args))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        assert torch.equal(bits(tensor), bits(right[name])), name


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def expected(model: nn.Module) -> dict[str, Tensor]:
    """What a file of the model holds: each parameter once."""
    return dict(model.named_parameters())


def saved(model: nn.Module, folder: Path) -> Path:
    """The model written by safetensors itself."""
    folder.mkdir(parents=True, exist_ok=True)
    in_files = file_layout(model).renamed
    tensors = {in_files(name): param.detach() for name, param in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def refusal(fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        fn(*args, **options)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------- slices


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


# ------------------------------------------------------------------------------------------------ round trip

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


class Row(nn.Module):
    """A weight of one row, of which some ranks hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(17, 1)
        self.register_buffer("steps", torch.tensor(3))


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


# ---------------------------------------------------------------------------------------------- what is read


class Allocations(TorchDispatchMode):
    """The largest storage that operations make, mapped files aside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
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


# -------------------------------------------------------------------------------------------- broken folders


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A checkpoint of ``llama()`` in two files."""
    folder = tmp_path_factory.mktemp("good") / "checkpoint"
    save_checkpoint(llama(), folder, max_shard_bytes=40_000)
    assert len(list(folder.glob("*.safetensors"))) == 2
    return folder


SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def edit_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda folder: (folder / SECOND).write_bytes(change((folder / SECOND).read_bytes()))


def with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def only(name: str) -> Callable[[Path], None]:
    def strip(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        if name:
            (folder / name).write_bytes(b"")

    return strip


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "empty": (only(""), ["holds nothing"]),
    "other files": (only("notes.txt"), ["notes.txt", "give the folder with the weights"]),
    "pickled weights": (only("pytorch_model.bin"), ["pytorch_model.bin", "save_pretrained"]),
    "no index": (remove(INDEX), [SECOND, "copy the index"]),
    "missing file": (remove(SECOND), [INDEX, SECOND, "download that file"]),
    "index is no JSON": (lambda folder: (folder / INDEX).write_text("{"), [INDEX, "broken JSON"]),
    "index is nested": (lambda folder: (folder / INDEX).write_text("[" * 100_000), [INDEX, "broken JSON"]),
    "index is a list": (lambda folder: (folder / INDEX).write_text("[]"), [INDEX, "weight_map"]),
    "index maps to numbers": (edit_index(lambda names: names.update(x=1)), [INDEX, "weight_map"]),
    "index leaves, absolute": (
        edit_index(lambda names: names.update(x="/etc/passwd")),
        ["/etc/passwd", "not inside"],
    ),
    "index leaves, upwards": (
        edit_index(lambda names: names.update(x="../x.safetensors")),
        ["../x", "not inside"],
    ),
    "index lists too much": (
        edit_index(lambda names: names.update(x=SECOND)),
        [f"x ({SECOND})", "different saves"],
    ),
    "file is empty": (edit_bytes(lambda data: b""), [SECOND, "not a safetensors file"]),
    "file is a pointer": (edit_bytes(lambda data: b"version https://git-lfs"), [SECOND, "git lfs pull"]),
    "header length": (
        edit_bytes(lambda data: b"\xff" * 8 + data[8:]),
        [SECOND, "header length 18446744073709551615"],
    ),
    "header cut off": (edit_bytes(lambda data: data[:100]), [SECOND, "truncated in its header (100 of"]),
    "header is no JSON": (edit_bytes(lambda data: data[:8] + b"!" + data[9:]), [SECOND, "broken JSON"]),
    "header is a list": (edit_bytes(lambda data: with_header(b"[]")), [SECOND, "not a JSON object"]),
    "entry is broken": (
        edit_bytes(lambda data: data.replace(b'"shape":[32,64]', b'"shape":[32,65]')),
        [SECOND, "entry of model.layers.0.mlp.down_proj.weight is broken"],
    ),
    "file cut off": (edit_bytes(lambda data: data[:-5]), [SECOND, "truncated ("]),
    "file too long": (edit_bytes(lambda data: data + b"x"), [SECOND, "longer than its header says"]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_refused_before_the_model_is_touched(kind, good, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    load_checkpoint(on_meta(llama()), folder)
    damage, words = BROKEN[kind]
    damage(folder)
    model = on_meta(llama())
    text = refusal(load_checkpoint, model, folder)
    assert text.startswith(str(folder))
    assert [word for word in words if word not in text] == []
    assert all(param.is_meta for param in model.parameters())


def test_a_path_that_is_no_folder_is_refused(good, tmp_path):
    assert "no such folder; download" in refusal(open_checkpoint, tmp_path / "absent")
    assert "is a file; give the folder" in refusal(open_checkpoint, good / SECOND)


@pytest.fixture(scope="module")
def scratch(good, tmp_path_factory) -> tuple[Path, bytes]:
    return tmp_path_factory.mktemp("scratch") / "x.safetensors", (good / SECOND).read_bytes()


@given(at=st.integers(0, 1500), junk=st.binary(max_size=12), cut=st.integers(0, 20))
@settings(deadline=None)
def test_no_damage_escapes_as_another_error(scratch, at, junk, cut):
    file, whole = scratch
    file.write_bytes(whole[:at] + junk + whole[at + cut :])
    try:
        tensors = read_header(file)
    except WeightsError as error:
        assert str(file) in str(error)  # noqa: PT017 - both ways are right
    else:
        assert sum(math.prod(entry.shape) for entry in tensors.values()) > 0


# ----------------------------------------------------------------------------------------------------- names


def without_prefix(model: Any) -> dict[str, Tensor]:
    base = model.base_model_prefix + "."
    return {name.removeprefix(base): param.detach() for name, param in model.named_parameters()}


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_a_checkpoint_of_the_base_model_fits_the_model_with_a_head(tmp_path):
    source = llama(tied=True)
    model = on_meta(source)
    report = load_checkpoint(model, write(tmp_path, without_prefix(source)))
    assert_same_bits(expected(model), expected(source))
    assert report.unexpected == ()


def test_a_checkpoint_of_the_model_with_a_head_fits_the_base_model(tmp_path):
    source = llama(tied=True)
    with torch.device("meta"):
        base = LlamaModel(source.config)
    load_checkpoint(base, saved(source, tmp_path))
    assert_same_bits(expected(base), expected(source.model))


def test_a_renamed_head_is_found_by_its_alias(tmp_path):
    source = neox()
    tensors = expected(source)
    tensors["output.weight"] = tensors.pop("lm_head.weight")
    folder = write(tmp_path, tensors)
    text = refusal(load_checkpoint, on_meta(source), folder)
    assert "lm_head.weight" in text
    assert "names: " in text
    model = on_meta(source)
    load_checkpoint(model, folder, aliases={"lm_head": ["output"]})
    assert_same_bits(expected(model), expected(source))


@pytest.mark.parametrize("head", ["embed_out", "lm_head"])
def test_a_head_has_the_name_of_the_model_or_that_of_transformers_files(head, tmp_path):
    source = neox()
    tensors = expected(source)
    tensors[f"{head}.weight"] = tensors.pop("lm_head.weight")
    model = on_meta(source)
    load_checkpoint(model, write(tmp_path, tensors))
    assert_same_bits(expected(model), expected(source))
    save_checkpoint(model, tmp_path / "again")
    assert "embed_out.weight" in stored(tmp_path / "again")


class Nested(nn.Module):
    """Of two tensors, one has the name that the other would have without the prefix."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.weight = nn.Parameter(torch.zeros(3))
        self.weight = nn.Parameter(torch.zeros(3))


def test_a_respelled_name_takes_no_other_tensors_key(tmp_path):
    folder = write(tmp_path, {"weight": torch.ones(3)})
    assert "1 of the model are not in the checkpoint: model.weight" in refusal(load_checkpoint, Nested(), folder)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tie_loads_from_either_name(kept, tmp_path):
    source = llama(tied=True)
    tensors = expected(source)
    tensors[kept] = tensors.pop("model.embed_tokens.weight")
    model = on_meta(source)
    load_checkpoint(model, write(tmp_path, tensors))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_bits(expected(model), expected(source))


def test_a_tie_that_is_stored_twice_loads_when_both_are_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "COMPARE_BYTES", 500)  # several bands
    source = llama(tied=True)
    source.lm_head.weight.data[0, 0] = math.nan  # equal in bits, though not in value
    folder = write(tmp_path, expected(source) | {"lm_head.weight": source.lm_head.weight})
    empty = on_meta(source)

    def run(mesh: DeviceMesh) -> None:
        model = shard(copy.deepcopy(empty), mesh)
        report = load_checkpoint(model, folder)
        twice = model.lm_head.weight.to_local().nbytes
        assert report.bytes_read == report.bytes_kept + twice
        assert model.lm_head.weight is model.model.embed_tokens.weight

    on_ranks({"shard": 2, "tp": 2}, run)


def test_a_tie_that_differs_on_one_rank_is_refused_on_all(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "COMPARE_BYTES", 500)
    source = llama(tied=True)
    other = source.lm_head.weight.detach().clone()
    other[32, 31] += 1e-3
    folder = write(tmp_path, expected(source) | {"lm_head.weight": other})
    empty = on_meta(source)
    texts = on_ranks({"tp": 4}, lambda mesh: refusal(load_checkpoint, shard(copy.deepcopy(empty), mesh), folder))
    assert len(set(texts)) == 1
    assert "lm_head.weight" in texts[0]
    assert "model.embed_tokens.weight" in texts[0]
    assert "[on rank 3 of 4]" in texts[0]


def test_missing_and_unexpected_names_are_listed_together(tmp_path):
    source = llama(tied=False, layers=4)
    tensors = expected(source)
    tensors["model.layers.0.self_attn.q_porj.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    for name in [name for name in tensors if "layers.2" in name or "layers.3" in name]:
        del tensors[name]
    text = refusal(load_checkpoint, on_meta(source), write(tmp_path, tensors))
    assert "19 of the model are not in the checkpoint: model.layers.0.self_attn.q_proj.weight, " in text
    assert "and 9 more" in text
    assert "1 of the checkpoint fit nothing in the model: model.layers.0.self_attn.q_porj.weight" in text
    assert "did you mean 'model.layers.0.self_attn.q_porj.weight'?" in text


@pytest.mark.parametrize(
    ("drop", "add", "hint"),
    [
        (["lm_head.weight"], [], "tie_word_embeddings=True"),
        ([], ["extra.weight"], "strict=False"),
        (None, ["h.0.weight"], "is the checkpoint of this architecture?"),
    ],
)
def test_wrong_names_come_with_a_next_step(drop, add, hint, tmp_path):
    source = llama(tied=False)
    kept = {} if drop is None else {k: v for k, v in expected(source).items() if k not in drop}
    folder = write(tmp_path, kept | {name: torch.zeros(1) for name in add})
    assert hint in refusal(load_checkpoint, on_meta(source), folder)


def test_a_loose_load_reports_names_and_keeps_what_a_live_model_has(tmp_path):
    source, model = llama(tied=False), llama(tied=False)
    model.lm_head.weight.data.fill_(7)
    tensors = {name: param for name, param in expected(source).items() if name != "lm_head.weight"}
    report = load_checkpoint(model, write(tmp_path, tensors | {"extra": torch.zeros(1)}), strict=False)
    assert (report.missing, report.unexpected) == (("lm_head.weight",), ("extra",))
    assert "lm_head.weight" not in report.loaded
    assert model.lm_head.weight.eq(7).all()
    assert torch.equal(model.model.norm.weight, source.model.norm.weight)


def test_a_loose_load_leaves_no_tensor_without_a_value(tmp_path):
    source = llama(tied=False)
    tensors = {name: param for name, param in expected(source).items() if name != "lm_head.weight"}
    text = refusal(load_checkpoint, on_meta(source), write(tmp_path, tensors), strict=False)
    assert "1 tensors of the model would be left without a value: lm_head.weight;" in text


@pytest.mark.parametrize(
    "name",
    [
        "gpt_neox.layers.0.attention.bias",
        "gpt_neox.layers.0.attention.masked_bias",
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq",
        "gpt_neox.rotary_emb.inv_freq",
        "gpt_neox.embeddings.position_ids",
    ],
)
def test_buffers_of_old_checkpoints_are_ignored(name, tmp_path):
    source = neox()
    report = load_checkpoint(on_meta(source), write(tmp_path, expected(source) | {name: torch.zeros(2)}))
    assert report.unexpected == ()


def test_other_vocabularies_and_widths_are_refused_with_both_shapes(tmp_path):
    folder = saved(llama(vocab=36, tied=False), tmp_path)
    text = refusal(load_checkpoint, on_meta(llama(vocab=40, tied=False)), folder)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert f"{name} has shape (36, 32), the model's has (40, 32): the vocabularies differ: resize the" in text
    assert "resize the embeddings before parallelize" in text
    wide = on_meta(llama(vocab=36, tied=False))
    wide.model.norm.weight = nn.Parameter(torch.empty(64, device="meta"))
    text = refusal(load_checkpoint, wide, folder)
    assert "model.norm.weight has shape (32,), the model's has (64,): the model's config is not" in text


def test_quantised_weights_are_refused(tmp_path):
    source = llama()
    tensors = expected(source) | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}
    text = refusal(load_checkpoint, on_meta(source), write(tmp_path, tensors))
    assert "model.norm.weight is stored as I8, the model's is torch.float32: dequantise" in text


def test_an_interleaved_parameter_is_refused_by_name(tmp_path):
    source = llama()
    folder = saved(source, tmp_path)

    def run(mesh: DeviceMesh) -> None:
        model = copy.deepcopy(source)
        weight = DTensor.from_local(torch.empty(32, 32), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
        model.model.layers[0].mlp.gate_proj.weight = nn.Parameter(weight)
        for text in (refusal(load_checkpoint, model, folder), refusal(save_checkpoint, model, folder)):
            assert text.startswith("model.layers.0.mlp.gate_proj.weight: ")
            assert "interleaves dim 0" in text

    on_ranks({"tp": 2}, run)


# ----------------------------------------------------------------------------------------------- materialise

FAMILIES: dict[str, dict[str, Any]] = {
    "gptj": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 16},
    "gpt_neo": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "num_heads": 4,
        "max_position_embeddings": 16,
    },
    "gemma3_text": {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    "qwen3": {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_computed_buffers_come_back(family, tmp_path):
    config = AutoConfig.for_model(family, vocab_size=32, hidden_size=32, intermediate_size=64, **FAMILIES[family])
    live = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    buffers = dict(live.named_buffers())
    assert buffers
    load_checkpoint(model, saved(live, tmp_path))
    assert_same_bits(dict(model.named_buffers()), buffers)
    assert_same_bits(expected(model), expected(live))


class Masked(nn.Module):
    """Owns a buffer that no checkpoint holds, and no rule to compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2), persistent=False)


def test_a_buffer_that_nothing_computes_is_named(tmp_path):
    folder = saved(Masked(), tmp_path)
    with torch.device("meta"):
        model = Masked()
    assert "would be left without a value: mask; neither" in refusal(load_checkpoint, model, folder)
    live = Masked()
    live.mask = torch.full((2,), 5.0)
    load_checkpoint(live, folder)
    assert torch.equal(live.mask, torch.full((2,), 5.0))


def test_materialise_keeps_objects_and_what_is_real():
    model = on_meta(llama(tied=True))
    norm = nn.Parameter(torch.full((32,), 3.0))
    model.model.norm.weight = norm
    model.lm_head.weight.mark = "a user's own"
    before = dict(model.named_parameters(remove_duplicate=False))
    undefined = materialise(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is param for name, param in before.items())
    assert model.model.norm.weight is norm
    assert norm.eq(3).all()
    assert undefined == after.keys() - {"model.norm.weight"}
    assert model.lm_head.weight.mark == "a user's own"


class Scaled(nn.Module):
    """A module with a parameter and a computed buffer, whose init would reset the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 5.0))
        self.register_buffer("scale", torch.empty(3, device="meta"), persistent=False)

    def _init_weights(self, module: Any) -> None:
        initialization.zeros_(module.weight)
        initialization.ones_(module.scale)


def test_computing_a_buffer_resets_no_parameter_beside_it():
    model: Any = Scaled()
    assert materialise(model) == set()
    assert torch.equal(model.scale, torch.ones(3))
    assert torch.equal(model.weight, torch.full((3,), 5.0))
    assert not hasattr(model.weight, "_is_hf_initialized")


# ----------------------------------------------------------------------------------------- failures together


def test_every_rank_raises_what_one_rank_met():
    def run(errors: list[Exception | None]) -> list[str]:
        return simulated_ranks(len(errors), lambda rank: refusal(agree, errors[rank]))

    broken, other = WeightsError("broken"), OSError("no space")
    assert set(run([broken, broken])) == {"broken"}
    assert set(run([None, None, broken])) == {"broken [on rank 2 of 3]"}
    assert set(run([broken, other, broken])) == {"broken [on ranks 0, 2 of 3]\nOSError: no space [on rank 1 of 3]"}
    assert simulated_ranks(2, lambda _: agree(None)) == [None, None]
    assert refusal(agree, broken) == "broken"


def test_one_ranks_truncated_file_is_refused_on_all(good, tmp_path):
    bad = tmp_path / "checkpoint"
    shutil.copytree(good, bad)
    with (bad / SECOND).open("rb+") as stream:
        stream.truncate(200)
    empty = on_meta(llama())

    def run(mesh: DeviceMesh) -> str:
        model = shard(copy.deepcopy(empty), mesh)
        text = refusal(load_checkpoint, model, bad if mesh.get_rank() == 1 else good)
        assert all(param.is_meta for param in model.parameters())
        return text

    texts = on_ranks({"shard": 2, "tp": 2}, run)
    assert len(set(texts)) == 1
    assert "truncated" in texts[0]
    assert texts[0].endswith("[on rank 1 of 4]")


def test_a_file_that_fails_on_one_rank_in_the_midst_of_a_load_is_refused_on_all(good, monkeypatch):
    read = BlockReader.read
    empty = on_meta(llama())

    def fail(self: BlockReader, name: str, block: tuple[slice, ...]) -> Tensor:
        if name.endswith("o_proj.weight") and dist.get_rank() == 2:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, name, block)

    monkeypatch.setattr(BlockReader, "read", fail)
    texts = on_ranks({"tp": 3}, lambda mesh: refusal(load_checkpoint, shard(copy.deepcopy(empty), mesh), good))
    assert len(set(texts)) == 1
    assert "Input/output error [on rank 2 of 3]" in texts[0]


# ----------------------------------------------------------------------------------------- replacing folders


def ready(model: nn.Module, folder: Path, **options: Any) -> dict[str, bytes]:
    """Saves, and returns what a folder holds that loads."""
    save_checkpoint(model, folder, **options)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def other_llama() -> Any:
    model = llama()
    for param in model.parameters():
        param.data += 1
    return model


def test_a_save_replaces_the_weights_and_keeps_a_users_files(tmp_path):
    folder = tmp_path / "checkpoint"
    save_checkpoint(llama(), folder, max_shard_bytes=9000)
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "notes.md").write_text("mine")
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "runs" / "one" / "model.safetensors").write_text("not ours")
    (folder / "runs" / "nowhere").symlink_to("gone")
    save_checkpoint(other_llama(), folder)
    names = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.md",
        "runs/one/model.safetensors",
    }
    assert contents(folder).keys() == names
    assert (folder / "runs" / "nowhere").is_symlink()
    assert (folder / "notes.md").read_text() == "mine"
    assert_same_bits(stored(folder), expected(other_llama()))
    assert beside(folder) == ["checkpoint"]


def test_a_save_through_a_link_replaces_the_folder_and_not_the_link(tmp_path):
    (tmp_path / "disk").mkdir()
    save_checkpoint(llama(), tmp_path / "disk" / "real")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    save_checkpoint(other_llama(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same_bits(stored(tmp_path / "disk" / "real"), expected(other_llama()))


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_a_tokenizer_is_saved_with_the_model_and_kept_by_a_later_save(tmp_path):
    save_checkpoint(llama(), tmp_path / "checkpoint", tokenizer=Tokenizer())
    save_checkpoint(llama(), tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("file", "is a file; give a folder"),
        ("file/below", "cannot be written"),
        ("/proc/dtplan/x", "cannot be written"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_on_all_ranks(at, words, tmp_path):
    (tmp_path / "file").write_text("")
    model = Row()
    texts = simulated_ranks(2, lambda _: refusal(save_checkpoint, model, tmp_path / at))
    assert len(set(texts)) == 1
    assert words in texts[0]


def test_a_rank_that_cannot_write_fails_all_and_leaves_the_old_folder(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    before = ready(llama(), folder)
    write_piece = ShardWriter.write
    failures = []

    def fail(self: ShardWriter, data: memoryview) -> None:
        if dist.get_rank() == 1 and len(data) > 1000:  # not the header
            failures.append(len(data))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_piece(self, data)

    monkeypatch.setattr(ShardWriter, "write", fail)
    empty = on_meta(llama())

    def run(mesh: DeviceMesh) -> str:
        model = shard(copy.deepcopy(empty), mesh)
        load_checkpoint(model, folder)
        return refusal(save_checkpoint, model, folder, max_shard_bytes=9000)

    texts = on_ranks({"shard": 2, "tp": 2}, run)
    assert len(set(texts)) == 1
    assert "No space left on device" in texts[0]
    assert texts[0].endswith("[on rank 1 of 4]")
    assert len(failures) == 1, "a file is given up at its first failure"
    assert contents(folder) == before
    assert beside(folder) == ["checkpoint"]


def test_a_rank_that_cannot_send_fails_all(tmp_path, monkeypatch):
    fill = gather.Exchange.fill

    def fail(self: gather.Exchange, step: gather.Step) -> None:
        if dist.get_rank() == 2:
            raise MemoryError
        fill(self, step)

    monkeypatch.setattr(gather.Exchange, "fill", fail)
    reference = llama()

    def run(mesh: DeviceMesh) -> str:
        return refusal(save_checkpoint, shard(copy.deepcopy(reference), mesh), tmp_path / "checkpoint")

    assert set(on_ranks({"tp": 4}, run)) == {"MemoryError [on rank 2 of 4]"}
    assert beside(tmp_path / "checkpoint") == []


def test_files_are_filled_in_order_and_none_is_empty():
    sizes = [100, 6, 10, 1, 100]
    tensors = [FileTensor(name=str(k), dtype=torch.uint8, shape=(size,)) for k, size in enumerate(sizes)]
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert pack(tensors, 16) == dict(zip(names, [[0], [1, 2], [3], [4]], strict=True))
    assert pack(tensors, 217) == {"model.safetensors": [0, 1, 2, 3, 4]}


def test_a_block_is_sent_once_from_the_nearest_rank():
    tensor = FileTensor(name="weight", dtype=torch.float32, shape=(4, 2))
    upper, lower = ((0, 2), (0, 2)), ((2, 4), (0, 2))
    (whole,) = gather.whole_tensors([tensor], [[[upper]], [[lower]], [[upper]], [[lower]]])
    (piece,) = gather.pieces(0, tensor)
    steps = [gather.plan_step([whole], dict.fromkeys(range(4), piece), rank) for rank in range(4)]
    sent = {(rank, segment.peer, segment.box) for rank in range(4) for segment in steps[rank].sends}
    own = {(0, 0, upper), (2, 2, upper), (1, 1, lower), (3, 3, lower)}
    assert sent == own | {(0, 1, upper), (2, 3, upper), (1, 0, lower), (1, 2, lower)}


def test_only_ranks_that_see_the_folder_write(tmp_path, monkeypatch):
    see = Path.is_dir
    monkeypatch.setattr(
        Path, "is_dir", lambda path: see(path) and (".tmp-" not in path.name or dist.get_rank() % 2 == 0)
    )
    begin = ShardWriter.__init__
    wrote: dict[str, int] = {}

    def noted(self: ShardWriter, file: Path) -> None:
        wrote[file.name] = dist.get_rank()
        begin(self, file)

    monkeypatch.setattr(ShardWriter, "__init__", noted)
    model = llama()
    reports = simulated_ranks(
        4, lambda _: save_checkpoint(copy.deepcopy(model), tmp_path / "checkpoint", max_shard_bytes=9000)
    )
    assert len(reports[0].files) > 2
    assert wrote == {name: number % 2 * 2 for number, name in enumerate(reports[0].files)}
    assert_same_bits(stored(tmp_path / "checkpoint"), expected(model))


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_folder_that_cannot_be_renamed_is_refused(inside, tmp_path, monkeypatch):
    (tmp_path / "here" / inside).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / inside)
    assert "holds the working directory" in refusal(save_checkpoint, Row(), tmp_path / "here")
    assert "is a mount point" in refusal(save_checkpoint, Row(), "/proc")
    save_checkpoint(Row(), "checkpoint")


def test_a_failed_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    before = ready(llama(), folder)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(self, target)

    monkeypatch.setattr(staging, "_exchange", lambda *_: False)  # as on NFS
    monkeypatch.setattr(Path, "rename", fail)
    assert "Device or resource busy" in refusal(save_checkpoint, other_llama(), folder)
    assert contents(folder) == before
    assert beside(folder) == ["checkpoint"]


def test_meta_tensors_and_foreign_dtypes_are_refused(tmp_path):
    assert "model.embed_tokens.weight is on the meta device" in refusal(
        save_checkpoint, on_meta(llama()), tmp_path / "x"
    )
    text = refusal(save_checkpoint, llama(), tmp_path / "x", dtype=torch.complex128)
    assert "safetensors has no torch.complex128; pass a dtype out of torch.float64, " in text
    assert beside(tmp_path / "x") == []


def test_ranks_with_other_calls_or_models_are_refused(tmp_path):
    def calls(rank: int) -> str:
        return refusal(save_checkpoint, Row(), tmp_path / ("a" if rank < 2 else "b"))

    def models(rank: int) -> str:
        return refusal(save_checkpoint, Row() if rank else nn.Linear(3, 3), tmp_path / "a")

    assert {text.partition("differ")[0] for text in simulated_ranks(3, calls)} == {
        "save_checkpoint: on ranks [2] the folder, dtype or max_shard_bytes "
    }
    assert all("on ranks [1, 2]" in text for text in simulated_ranks(3, models))


def test_ranks_that_hold_too_little_are_refused():
    weight = FileTensor(name="weight", dtype=torch.float32, shape=(4, 4))
    upper, lower = ((0, 2), (0, 4)), ((2, 4), (0, 4))
    assert gather.whole_tensors([weight], [[[upper]], [[lower]], [[upper]]])[0].holders == {
        upper: (0, 2),
        lower: (1,),
    }
    assert "weight: the ranks hold 8 different" in refusal(gather.whole_tensors, [weight], [[[upper]], [[upper]]])


# -------------------------------------------------------------------------------------------- real processes


def ranks_load_and_save(rank: int, source: Path, target: Path) -> list[str]:
    gather.PIECE_BYTES = 700
    mesh = mesh_of({"shard": 2, "tp": 2})
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(source))
    load_checkpoint(shard(model, mesh), source)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return list(save_checkpoint(model, target, max_shard_bytes=9000).files)


def test_processes_load_and_save_bit_exactly(pool, tmp_path):
    source = tmp_path / "source"
    save_checkpoint(llama(), source)
    files = pool.run(ranks_load_and_save, source, tmp_path / "target")
    assert len(files[0]) > 4  # more files than ranks: two rounds
    assert_same_bits(stored(tmp_path / "target"), stored(source))


def one_rank_saves(rank: int, folder: Path) -> str | None:
    model = Row()
    text = refusal(save_checkpoint, model, folder, meet_seconds=0.5) if rank == 0 else None
    dist.barrier()
    save_checkpoint(model, folder)  # the ranks can still meet
    return text


def test_a_save_on_one_rank_only_is_found(pool, tmp_path):
    texts = pool.run(one_rank_saves, tmp_path / "checkpoint", ranks=3)
    assert texts[0].startswith(
        "save_checkpoint is collective: all 3 ranks must call it, and ranks 1, 2 did not within 0.5 s; "
    )
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def save_on_a_full_disk(rank: int, folder: Path) -> str:
    if rank == 1:  # what it writes past this size fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    return refusal(save_checkpoint, llama(), folder, max_shard_bytes=1)


def test_a_full_disk_fails_all_ranks_and_leaves_the_old_folder(pool, tmp_path):
    folder = tmp_path / "checkpoint"
    before = ready(other_llama(), folder)
    texts = pool.run(save_on_a_full_disk, folder, ranks=2)
    assert texts[0] == texts[1]
    assert "File too large" in texts[0]
    assert texts[0].endswith("[on rank 1 of 2]")
    assert contents(folder) == before
    assert beside(folder) == ["checkpoint"]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die_writing(rank: int, folder: Path, victim: int) -> None:
    gather.PIECE_BYTES = 700
    write_piece = ShardWriter.write
    left = 5

    def write_some(self: ShardWriter, data: memoryview) -> None:
        nonlocal left
        left -= 1
        if rank == victim and not left:
            die()
        write_piece(self, data)

    mock.patch.object(ShardWriter, "write", write_some).start()
    save_checkpoint(llama(), folder, max_shard_bytes=40_000)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_writing_leaves_the_old_folder(victim, pool, tmp_path):
    folder = tmp_path / "checkpoint"
    before = ready(other_llama(), folder)
    killed = pool.run_outcomes(save_and_die_writing, folder, victim, ranks=2)
    assert "SIGKILL" in str(killed[victim].error)
    assert contents(folder) == before
    assert len(beside(folder)) == (1 if victim else 3), "rank 0 removes what it began, unless it died itself"
    save_checkpoint(llama(), folder)
    assert_same_bits(stored(folder), expected(llama()))
    assert beside(folder) == ["checkpoint"]


def save_and_die_renaming(_: int, folder: Path, step: str) -> None:
    mock.patch.object(staging, "_exchange", return_value=False).start()  # as on NFS
    if step == "remove old":
        mock.patch.object(shutil, "rmtree", die).start()
    rename = Path.rename

    def rename_some(self: Path, target: Path) -> Path:
        if step == ("move new" if ".tmp-" in self.name else "move old"):
            die()
        return rename(self, target)

    mock.patch.object(Path, "rename", rename_some).start()
    save_checkpoint(llama(), folder)


@pytest.mark.parametrize("step", ["move old", "move new", "remove old"])
def test_a_process_that_dies_replacing_leaves_a_whole_folder(step, pool, tmp_path):
    folder = tmp_path / "checkpoint"
    before = ready(other_llama(), folder)
    (killed,) = pool.run_outcomes(save_and_die_renaming, folder, step, ranks=1)
    assert "SIGKILL" in str(killed.error)
    if step == "move new":
        assert "an interrupted save left it as .checkpoint.old-" in refusal(open_checkpoint, folder)
    elif step == "move old":
        assert contents(folder) == before
    else:
        assert_same_bits(stored(folder), expected(llama()))
    whole = contents(folder) or before
    staging.Staging(folder, "next").open()
    assert contents(folder) == whole
    assert beside(folder) == [".checkpoint.lock", ".checkpoint.tmp-next", "checkpoint"]
