"""TransformerEngine's attention as one of the kernels that transformers' attention layers choose from."""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import Tensor, nn

from dtplan.te.engine import Engine

NAME = "dtplan_te"


def use(module: nn.Module, engine: Engine) -> None:
    """Let one attention layer compute with TransformerEngine; the model's own config stays as it is.

    The layer asks its config which kernel to call, so it gets a copy. Masks are still made for torch's kernel: causal
    attention without padding has none.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, functools.partial(attention, engine))
    config: Any = copy.copy(module.config)
    config._attn_implementation = NAME  # noqa: SLF001 - transformers' own name for the choice
    module.config = config


def attention(
    engine: Engine,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [batch, heads, sequence, width]; the result is [batch, sequence, heads, width].

    What TransformerEngine is not asked for here (a mask, dropout, a window, a cache) goes to torch's kernel.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plain = attention_mask is None and not dropout and kwargs.get("sliding_window") is None
    if not plain or query.shape[2] != key.shape[2] or query.dtype not in engine.dtypes:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    kernel = _kernel(engine, query.shape[1], key.shape[1], query.shape[3], value.shape[3], scaling)
    out = kernel(*(x.transpose(1, 2) for x in (query, key, value)))
    return out.unflatten(-1, (query.shape[1], value.shape[3])), None


@functools.cache
def _kernel(engine: Engine, heads: int, kv_heads: int, width: int, value_width: int, scaling: float | None) -> Any:
    """One for all layers of a shape: it holds no parameters."""
    return engine.layers.DotProductAttention(
        heads,
        (width, value_width) if width != value_width else width,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
        softmax_scale=scaling,
    )
