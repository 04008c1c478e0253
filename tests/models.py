"""Tiny models and batches that tests share; every parameter is random, so that no gradient is trivially small."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PretrainedConfig

_DRAWING = threading.Lock()
_TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
    "use_cache": False,
}


def llama(**changes: Any) -> LlamaConfig:
    """A tiny Llama: 4 heads, 4 kv heads."""
    return LlamaConfig(**{**_TINY, "num_key_value_heads": 4, **changes})


def neox(**changes: Any) -> GPTNeoXConfig:
    """A tiny GPT-NeoX with the parallel residual: 4 heads."""
    return GPTNeoXConfig(**{**_TINY, **changes})


CONFIGS: dict[str, PretrainedConfig] = {
    "llama": llama(),
    "llama-tied": llama(tie_word_embeddings=True),
    "llama-biases": llama(attention_bias=True, mlp_bias=True),
    "llama-uneven-vocab": llama(vocab_size=33),
    "neox": neox(),
    "neox-sequential": neox(use_parallel_residual=False),
    "neox-tied-uneven": neox(tie_word_embeddings=True, vocab_size=33),
    "neox-no-attention-bias": neox(attention_bias=False),
}


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Random numbers from a seed; simulated ranks are threads and share the generator, so one draws at a time."""
    with _DRAWING:
        torch.manual_seed(seed)
        yield


def build(config: PretrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A live model with all parameters drawn from a normal distribution; the same on ranks that are threads."""
    with drawing(seed):
        model: nn.Module = AutoModelForCausalLM.from_config(config).to(dtype)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


def on_meta(config: PretrainedConfig) -> Any:
    """The model on the meta device."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def batch(config: PretrainedConfig, *, rows: int = 2, length: int = 8, seed: int = 1) -> dict[str, Tensor]:
    """Random tokens [rows, length]; the labels are the tokens, with some ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}
