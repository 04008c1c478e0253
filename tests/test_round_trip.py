"""Round trips: a checkpoint through one mesh, then another, is the same bytes; `dtplan roundtrip`, `convert`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, MixtralConfig, Phi3Config, PretrainedConfig

import dtplan
import dtplan.roundtrip
from dtplan.cli import cli
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights import api
from dtplan.weights.checkpoint import open_checkpoint
from dtplan.weights.compare import differences
from examples.smollm2 import gguf_file, read_weights
from tests.cases import model_of
from tests.families import plan_file
from tests.models import llama, neox

TWELVE: dict[str, Any] = {"vocab_size": 33, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 12}
"""Heads that 1, 2, 3 and 4 ranks share; a vocabulary that they share unevenly."""
ONE_LAYER: dict[str, Any] = {**TWELVE, "num_hidden_layers": 1}
FAMILIES: dict[str, tuple[str, Callable[[], PretrainedConfig]]] = {
    "llama": ("llama", lambda: llama(**ONE_LAYER, num_key_value_heads=12)),
    "llama-tied": ("llama", lambda: llama(**ONE_LAYER, num_key_value_heads=12, tie_word_embeddings=True)),
    "neox": ("gpt_neox", lambda: neox(**ONE_LAYER)),
    "phi3": (
        str(plan_file("phi3")),
        lambda: Phi3Config(**{**ONE_LAYER, "num_attention_heads": 24}, num_key_value_heads=12, pad_token_id=0),
    ),
    "mixtral": (
        str(plan_file("mixtral")),
        lambda: MixtralConfig(**ONE_LAYER, num_key_value_heads=12, num_local_experts=3, num_experts_per_tok=2),
    ),
    "gpt2": (str(plan_file("gpt2")), lambda: GPT2Config(vocab_size=33, n_embd=48, n_layer=1, n_head=12)),
}
MESHES = [
    *({"tp": degree} for degree in range(1, 5)),
    *({"shard": shard, "tp": tp} for shard, tp in ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3))),
    {"replicate": 2, "shard": 2, "tp": 2},
]


def randomised(model: Any, seed: int, odd: bool) -> Any:
    """Every bit pattern, and with ``odd`` some tensors in another dtype than the rest."""
    generator = torch.Generator().manual_seed(seed)
    for number, tensor in enumerate([*model.parameters()]):
        dtype = torch.bfloat16 if odd and number % 3 == 0 else torch.float32
        words = torch.randint(0, 256, (tensor.numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        tensor.data = words.view(dtype).view(tensor.shape)
    return model


def through(source: Path, target: Path, family: str, mesh: dict[str, int], odd: bool, max_shard_bytes: int) -> None:
    """The checkpoint loaded onto a mesh and saved."""
    plan, config = FAMILIES[family]
    world = 1
    for size in mesh.values():
        world *= size

    def on_rank(rank: int) -> None:
        model = model_of(config(), meta=True)
        for number, tensor in enumerate([*model.parameters()]):
            tensor.data = tensor.data.to(torch.bfloat16 if odd and number % 3 == 0 else torch.float32)
        axes = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        report = dtplan.load(dtplan.parallelize(model, axes, plan), source)
        assert report.bytes_read == report.bytes_kept
        assert report.missing == report.unexpected == ()
        dtplan.save(model, target, max_shard_bytes=max_shard_bytes)

    simulated_ranks(world, on_rank)


@settings(max_examples=24, deadline=None)
@given(
    family=st.sampled_from([*FAMILIES]),
    first=st.sampled_from(MESHES),
    second=st.sampled_from(MESHES),
    seed=st.integers(0, 2**32),
    odd=st.booleans(),
    max_shard_bytes=st.sampled_from([1, 8000, 10**9]),
)
@example(family="mixtral", first={"tp": 3}, second={"shard": 2, "tp": 2}, seed=0, odd=False, max_shard_bytes=8000)
@example(family="phi3", first={"shard": 4, "tp": 1}, second={"shard": 2, "tp": 2}, seed=0, odd=False, max_shard_bytes=1)
def test_a_checkpoint_comes_back_the_same_from_any_two_meshes(
    family: str, first: dict[str, int], second: dict[str, int], seed: int, odd: bool, max_shard_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, name) for name in ("source", "first", "second")]
        model = randomised(model_of(FAMILIES[family][1]()), seed, odd)
        model.save_pretrained(folders[0])
        for source, target, mesh in zip(folders, folders[1:], (first, second), strict=False):
            through(source, target, family, mesh, odd, max_shard_bytes)
            assert [*differences(open_checkpoint(folders[0]), open_checkpoint(target), {})] == []


# ------------------------------------------------------------------------------------------- dtplan roundtrip


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, [*args])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_of(llama(tie_word_embeddings=True)).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_the_command_says_that_every_mesh_gave_the_bytes_back(folder: Path) -> None:
    result = run("roundtrip", str(folder), "--tp", "1,2", "--fsdp", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["equal"]
    assert [trip["mesh"] for trip in told["trips"]] == [
        {"tp": 1},
        {"shard": 2, "tp": 1},
        {"tp": 2},
        {"shard": 2, "tp": 2},
    ]
    assert {trip["verdict"] for trip in told["trips"]} == {"equal"}
    assert all(trip["bytes_read"] == trip["bytes_kept"] >= told["bytes"] for trip in told["trips"])


def test_a_degree_that_the_plan_refuses_is_told(folder: Path) -> None:
    result = run("roundtrip", str(folder), "--tp", "2,3")
    assert result.exit_code == 1
    assert "ok      tp 2" in result.output
    assert "REFUSED tp 3" in result.output
    assert "1 of 2 meshes gave the checkpoint back" in result.output


def test_other_bytes_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = api.save

    def wrong(model: Any, target: Path) -> Any:
        with torch.no_grad():
            model.model.norm.weight.to_local()[:1].neg_()
        return save(model, target)

    monkeypatch.setattr(api, "save", wrong)
    result = run("roundtrip", str(folder), "--tp", "2")
    assert result.exit_code == 1
    assert "DIFFERS tp 2" in result.output
    assert "model.norm.weight: 1 of 128 bytes differ" in result.output


def test_a_folder_without_weights_is_told_without_a_traceback(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    result = run("roundtrip", str(folder))
    assert isinstance(result.exception, dtplan.WeightsError)
    assert result.exception.exit_code == 2


def test_other_names_and_computed_buffers_are_told(tmp_path: Path) -> None:
    model_of(neox()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    result = run("roundtrip", str(tmp_path), "--tp", "2")
    assert result.exit_code == 0, result.output
    assert "lm_head.weight is saved as embed_out.weight" in result.output
    assert "not loaded, since models compute them: gpt_neox.layers.0.attention.rotary_emb.inv_freq" in result.output


CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "bytes": (lambda t: t["a"].view(-1)[0].neg_(), "a: 1 of 24 bytes differ"),
    "dtype": (lambda t: t.update(a=t["a"].bfloat16()), "a: dtype F32, then BF16"),
    "shape": (lambda t: t.update(a=t["a"].view(3, 2)), "a: shape [2, 3], then [3, 2]"),
    "gone": (lambda t: t.pop("a"), "a: is not there"),
    "new": (lambda t: t.update(c=torch.ones(1)), "c: was not there before"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_every_difference_is_named(tmp_path: Path, kind: str) -> None:
    change, says = CHANGES[kind]
    tensors = {"a": torch.full((2, 3), 2.0), "b": torch.tensor(1)}
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = differences(open_checkpoint(tmp_path / "before"), open_checkpoint(tmp_path / "after"), {})
    assert [*found] == []
    change(tensors)
    save_file(tensors, tmp_path / "after" / "model.safetensors")
    found = differences(open_checkpoint(tmp_path / "before"), open_checkpoint(tmp_path / "after"), {})
    assert [f"{one.name}: {one.says}" for one in found] == [says]


# --------------------------------------------------------------------------------------------- dtplan convert


def test_a_pickle_becomes_safetensors_that_transformers_loads(tmp_path: Path) -> None:
    model = model_of(llama(tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    (tmp_path / "old" / "notes").mkdir()
    (tmp_path / "old" / "notes" / "read.me").write_text("kept")
    torch.save(dict(model.state_dict()), tmp_path / "old" / "pytorch_model.bin")
    result = run("convert", str(tmp_path / "old"), str(tmp_path / "new"), "--max-shard-bytes", "9000")
    assert result.exit_code == 0, result.output
    assert "lm_head.weight: left out, it is a tie" in result.output
    assert not [*(tmp_path / "new").glob("*.bin")]
    assert (tmp_path / "new" / "notes" / "read.me").read_text() == "kept"
    assert len([*(tmp_path / "new").glob("*.safetensors")]) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_head_names_go_back_and_forth(tmp_path: Path) -> None:
    model_of(neox(vocab_size=33)).save_pretrained(tmp_path / "a")
    assert run("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--rename", "embed_out=lm_head").exit_code == 0
    assert "lm_head.weight" in load_file(tmp_path / "b" / "model.safetensors")
    assert run("convert", str(tmp_path / "b"), str(tmp_path / "c"), "--rename", "lm_head=embed_out").exit_code == 0
    assert run("convert", str(tmp_path / "c"), str(tmp_path / "d"), "--rename", "=deep").exit_code == 0
    assert run("convert", str(tmp_path / "d"), str(tmp_path / "e"), "--rename", "deep=").exit_code == 0
    shutil.rmtree(tmp_path / "b")
    for name in ("c", "e"):
        left, right = ((tmp_path / which / "model.safetensors").read_bytes() for which in ("a", name))
        assert left == right
    assert all(name.startswith("deep.") for name in load_file(tmp_path / "d" / "model.safetensors"))


@pytest.mark.parametrize(
    ("rename", "says"),
    [("nobody=x", "no tensor is below 'nobody'"), ("lm_head=model.norm", "would both be model.norm.weight")],
)
def test_renames_that_do_nothing_or_clash_are_refused(folder: Path, tmp_path: Path, rename: str, says: str) -> None:
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": torch.ones(1)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = run("convert", str(folder), str(tmp_path / "new"), "--rename", rename)
    assert isinstance(result.exception, dtplan.WeightsError)
    assert says in str(result.exception)
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------------------------------------ the real model


def test_smollm2_comes_back_the_same_at_tp_3_and_with_fsdp(tmp_path: Path) -> None:
    """The weights of SmolLM2-135M in bfloat16, its vocabulary of 49152 and its tie."""
    config = AutoConfig.from_pretrained(gguf_file().parent, gguf_file=gguf_file().name)
    weights = {name: value.bfloat16() for name, value in read_weights(gguf_file(), config).items()}
    config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    result = dtplan.roundtrip.round_trip(str(tmp_path), tp=(1, 3), fsdp=True)
    assert [(trip.mesh, trip.verdict) for trip in result.trips] == [
        ({"tp": 1}, "equal"),
        ({"shard": 2, "tp": 1}, "equal"),
        ({"tp": 3}, "equal"),
        ({"shard": 2, "tp": 3}, "equal"),
    ]
    assert (result.tensors, result.renamed, result.left_out) == (272, {}, ())
    norms = sum(value.nbytes for value in weights.values() if value.dim() == 1)
    assert [trip.bytes_read - result.bytes for trip in result.trips] == [0, 0, 2 * norms, 2 * norms]
