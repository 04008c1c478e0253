"""The inputs that the cases share: T0, the plans P0 to P2, and plans over them as text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import dtplan
from dtplan.prove.oracle import whole
from tests.models import drawing

HEAD = "dtplan: 1\nunits: {vocab: {field: vocab_size, indivisible: uneven}}\nrules:\n"
P0 = """
dtplan: 1
units: {head: num_attention_heads, kv_head: num_key_value_heads, ffn: intermediate_size}
rules:
  model.layers.*.self_attn.q_proj: {style: colwise, unit: head}
  "model.layers.*.self_attn.{k,v}_proj": {style: colwise, unit: kv_head}
  model.layers.*.self_attn.o_proj: {style: rowwise, unit: head}
  "model.layers.*.mlp.{gate,up}_proj": {style: colwise, unit: ffn}
  model.layers.*.mlp.down_proj: {style: rowwise, unit: ffn}
  "model.layers.*.{input,post_attention}_layernorm": norm
  "model.{norm,rotary_emb}": replicate
  model.embed_tokens: replicate
  lm_head: replicate
"""
"""Attention and MLP cut one linear at a time, all else whole."""
P1 = "llama"
"""The built-in plan: P0 with embedding and head cut along the vocabulary."""


def t0(**changes: Any) -> LlamaConfig:
    """One layer, 4 heads, 2 kv heads, untied, float32."""
    given = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_implementation": "eager",
        "use_cache": False,
    }
    return LlamaConfig(**{**given, **changes})


def model_of(config: Any, *, seed: int = 0, meta: bool = False) -> Any:
    """The model as transformers initialises it under a seed, or on the meta device."""
    if meta:
        with torch.device("meta"):
            built: nn.Module = AutoModelForCausalLM.from_config(config)
        return built
    with drawing(seed):
        live: nn.Module = AutoModelForCausalLM.from_config(config)
        return live


def ids_of(config: Any, rows: int = 2, length: int = 8, seed: int = 1) -> Tensor:
    """Random tokens [rows, length]."""
    return torch.randint(0, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def gap(found: Any, truth: Any) -> float:
    """Largest difference of two tensors, either of which may be a DTensor."""
    return float((whole(found.detach()) - whole(truth.detach())).abs().max())


def plan_with(base: str, **replaced: str) -> dtplan.Plan:
    """P0's text with some lines replaced: ``plan_with(P0, q_proj="q_porj")``."""
    for old, new in replaced.items():
        assert old in base
        base = base.replace(old, new)
    return dtplan.parse_plan(base, "case.yaml")
