"""What no checkpoint holds: buffers are computed when a model leaves the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    initialization,
)

from dtplan.weights.load import load_checkpoint
from dtplan.weights.materialise import materialise
from tests.checkpoints import assert_same_bits, expected, llama, on_meta, refusal, saved

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
