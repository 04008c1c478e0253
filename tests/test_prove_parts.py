"""The parts of a proof: the shrunken config, live models, legs, and what is told of tensors that ranks hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from dtplan.plan.read import load_plan
from dtplan.plan.spec import S
from dtplan.prove.held import held
from dtplan.prove.live import live_model, token_batch
from dtplan.prove.proof import legs_of, prove_model
from dtplan.prove.result import Leg
from dtplan.prove.shrink import shrink
from tests.test_prove import LLAMA_7B, LLAMA_70B, MODELS, NEOX_20B


@pytest.mark.parametrize("degrees", [[2], [2, 4, 8], [3, 5], [16]])
@pytest.mark.parametrize("config", [LLAMA_7B, LLAMA_70B, NEOX_20B], ids=["7b", "70b", "20b"])
def test_a_shrunken_config_is_divided_by_the_same_degrees(config: dict[str, Any], degrees: list[int]) -> None:
    given = {key: value for key, value in config.items() if key != "model_type"}
    real = transformers.AutoConfig.for_model(config["model_type"], **given)
    small, choices = shrink(real, degrees)
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if (count := getattr(real, field, None)) is not None:
            used = getattr(small, field)
            assert [used % d == 0 for d in degrees] == [count % d == 0 for d in degrees], field
            assert used <= count
    if hasattr(real, "num_key_value_heads"):
        ratio = real.num_attention_heads / real.num_key_value_heads
        assert small.num_attention_heads / small.num_key_value_heads == ratio
    told = {choice.field: choice.used for choice in choices}
    assert told == {field: getattr(small, field) for field in told}
    assert told["num_hidden_layers"] == 2


def test_every_kind_of_layer_is_kept() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    real = transformers.Qwen3NextConfig(layer_types=kinds * 3, num_hidden_layers=12)
    small, _ = shrink(real, [2])
    assert small.layer_types == ["linear_attention", "full_attention"]
    dense_first = transformers.DeepseekV3Config(num_hidden_layers=8, first_k_dense_replace=3)
    assert shrink(dense_first, [2])[0].first_k_dense_replace == 1
    assert shrink(dense_first, [2])[0].num_hidden_layers == 2


def test_layers_with_sizes_of_their_own_keep_them_in_proportion() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    real = transformers.Gemma4TextConfig(num_hidden_layers=12, layer_types=kinds * 2)
    assert {n: layer["head_dim"] for n, layer in real.to_dict()["per_layer_config"].items()} == {"05": 512, "11": 512}
    small, choices = shrink(real, [2])
    assert small.layer_types == ["sliding_attention", "full_attention"]
    own = small.to_dict()
    assert own["head_dim"] == 4
    assert [layer["head_dim"] for layer in own["per_layer_config"].values()] == [8]
    assert "per_layer_config" in {choice.field for choice in choices}


def test_sizes_of_other_names_are_shrunken_where_parameters_have_them() -> None:
    real = transformers.CTRLConfig(n_layer=2)
    assert shrink(real, [2])[0].dff == real.dff
    small, choices = shrink(real, [2], transformers.CTRLLMHeadModel)
    assert small.dff == 24
    assert {choice.field: choice.used for choice in choices}["dff"] == 24


def test_a_nested_config_keeps_no_cache() -> None:
    real: Any = transformers.Gemma3Config()
    assert real.text_config.use_cache
    assert not shrink(real, [2])[0].text_config.use_cache


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTJConfig(),
        transformers.GPT2Config(),
        transformers.BloomConfig(n_head=16),
        transformers.Gemma2Config(),
        transformers.MixtralConfig(),
        transformers.DeepseekV3Config(),
    ],
    ids=lambda config: config.model_type,
)
def test_other_families_run_once_shrunken(config: Any) -> None:
    small, choices = shrink(config, [2, 4])
    assert {"hidden_size", "n_embd"} & {choice.field for choice in choices}
    model = live_model(transformers.AutoModelForCausalLM.from_config(small).__class__, small, 0)
    assert sum(p.numel() for p in model.parameters()) < 10_000_000
    batch = token_batch(small, rows=1, length=8, seed=0)
    loss = model(**batch, use_cache=False).loss
    assert torch.isfinite(loss)


def test_live_models_are_float64_random_everywhere_and_made_by_the_seed() -> None:
    cls, config = MODELS["llama"]
    one, same, other = (live_model(cls, config, seed) for seed in (1, 1, 2))
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert a.dtype == torch.float64
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert a.std() > 0.1
    rows = token_batch(config, rows=4, length=8, seed=0)["labels"]
    assert set((rows != -100).sum(1).tolist()) == {5}  # means of parts add up


def test_legs() -> None:
    assert [str(leg) for leg in legs_of([4, 2, 2], "off")] == [
        "tp 2",
        "tp 2, loss_parallel",
        "tp 4",
        "tp 4, loss_parallel",
    ]
    assert len(legs_of([2], "both")) == 4
    assert str(legs_of([2], "on", fsdp=True)[-1]) == "shard 2 x tp 2, sequence_parallel"


TRUTH = torch.arange(1.0, 25.0, dtype=torch.float64).reshape(4, 6)
NOISE = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([TRUTH, TRUTH], "right"),
        ([NOISE, TRUTH - NOISE], "partial sum"),
        ([2 * TRUTH, 2 * TRUTH], "counted n times"),
        ([TRUTH / 2, TRUTH / 4], "no sum fits"),
        ([TRUTH, NOISE], "ranks disagree"),
        ([NOISE, NOISE + 1], "no sum fits"),
        ([TRUTH, None], "missing"),
        ([TRUTH[:2], TRUTH[2:]], "right"),
        ([TRUTH[:, :1], TRUTH[:, 1:]], "right"),
        ([TRUTH[2:], TRUTH[:2]], "another shard"),
        ([TRUTH[[0, 2]], TRUTH[[1, 3]]], "another shard"),
        ([2 * TRUTH[:2], 2 * TRUTH[2:]], "counted n times"),
        ([TRUTH[:2], NOISE[2:]], "ranks disagree"),
        ([TRUTH[:2], TRUTH[3:]], "wrong shape"),
    ],
)
def test_what_ranks_hold(parts: list[torch.Tensor | None], kind: str) -> None:
    assert held(parts, TRUTH, None, blocks=4).kind == kind


def test_another_order_of_heads_is_spelled() -> None:
    found = held([TRUTH[[0, 2]], TRUTH[[1, 3]]], TRUTH, S(0), blocks=4)
    assert "block i of 4 along dim 0 is [0, 2, 1, 3][i]" in found.says


def test_models_are_not_touched_by_a_proof() -> None:
    cls, config = MODELS["llama"]
    model = live_model(cls, config, 0)
    before = copy.deepcopy(model.state_dict())
    prove_model(lambda: model, load_plan("llama"), given="llama", model="llama", legs=[Leg(tp=2)])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
