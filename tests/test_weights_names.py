"""Names and shapes of a checkpoint against those of the model: prefixes, aliases, ties, what is missing or too much."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import (
    LlamaModel,
)

from dtplan.weights import load
from dtplan.weights.load import load_checkpoint
from dtplan.weights.save import save_checkpoint
from tests.checkpoints import assert_same_bits, expected, llama, neox, on_meta, on_ranks, refusal, saved, shard, stored


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
