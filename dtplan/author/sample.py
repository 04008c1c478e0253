"""A live model of the same class that is small, and whose counts tell config fields apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtplan.prove.live import live_model, refuse_unfit, token_batch
from dtplan.prove.oracle import float64_casts, logits_of
from dtplan.prove.shrink import COUNTS, CannotProveError, Reader, rebuilt, shrink, text_prefix

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 4
"""At degree 2 a rank has several heads and several kv heads: no count is 1 by chance."""
_WIDTHS = {
    "intermediate_size": 22,
    "moe_intermediate_size": 26,
    "shared_expert_intermediate_size": 34,
    "shared_intermediate_size": 34,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
}
_OWN_WIDTHS = {"n_inner": 22, "ffn_dim": 22, "ffn_hidden_size": 22}
"""Where a config gives no number for an MLP's columns, its class computes one."""
_LATENT = {
    "head_dim": _WIDTHS["qk_rope_head_dim"],
    "qk_head_dim": _WIDTHS["qk_nope_head_dim"] + _WIDTHS["qk_rope_head_dim"],
}
"""Widths that follow from others where keys are made of two parts."""
_DEGREE = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """A small live model in float64, a batch of tokens for it, and its config's own fields."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    text: Any
    prefix: str
    """``text_config.`` where the decoder's config lies within another."""
    grouped: bool
    """Whether it has fewer kv heads than heads although the real model has as many."""

    def fields(self) -> Iterator[tuple[str, int]]:
        """Whole numbers of the decoder's config by the class's own names."""
        for name, value in self.text.to_dict().items():
            if type(value) is int:
                yield name, value


def sample(real: nn.Module, *, seed: int = 0) -> Sample:
    """A small model of ``real``'s class, with as many kinds of layers.

    Raises:
        CannotProveError: the class cannot be shrunken, or does not take the small sizes.
    """
    small, _ = shrink(real.config, [_DEGREE], type(real))
    why: Exception | None = None
    for wanted, is_grouped in _wanted(real.config, small):
        try:
            tried = rebuilt(small, wanted)
            refuse_unfit(type(real), tried)
            model, batch = live_model(type(real), tried, seed), token_batch(tried, rows=2, length=12, seed=seed)
            with torch.no_grad(), float64_casts():
                logits_of(model, batch)
        except Exception as error:  # noqa: BLE001 - a class has rules of its own for sizes: then the next, less odd ones
            why = error
            continue
        text = tried.get_text_config(decoder=True)
        return Sample(model, batch, text, text_prefix(tried), is_grouped)
    told = (str(why).strip().splitlines() or [type(why).__name__])[0]
    raise CannotProveError(
        f"{type(real).__name__} does not run on token ids alone, once shrunken ({told}): no data flow to draft "
        "a plan from"
    ) from why


def _wanted(real: Any, small: Any) -> Iterator[tuple[dict[str, Any], bool]]:
    """Sizes to try, the most telling first: with fewer kv heads than heads, then as the real model has them."""
    text = small.get_text_config(decoder=True)
    prefix = text_prefix(small)
    had = Reader(real.get_text_config(decoder=True), real.get_text_config(decoder=True).to_dict())
    heads, kv_heads = had.need("num_attention_heads"), had.get("num_key_value_heads")
    kv_field = had.key("num_key_value_heads")
    widths = _widths(text)
    if kv_heads == 1:
        choices = [({kv_field: 1}, False)]
    elif kv_heads is not None or hasattr(text, kv_field):
        choices = [({kv_field: KV_HEADS}, kv_heads is None or kv_heads == heads), ({kv_field: HEADS}, False)]
    else:
        choices = [({}, False)]
    for own in (widths, {}):
        for kv, is_grouped in choices:
            sizes = {had.key("num_attention_heads"): HEADS, **kv, **_hidden(had, text), **own}
            yield {prefix + name: value for name, value in sizes.items()}, is_grouped
    yield {}, False


def _hidden(had: Reader, text: Any) -> dict[str, Any]:
    """A residual stream as wide as all heads, or wider where the class has a width of heads."""
    explicit = had.get("head_dim")
    dim = text.to_dict().get("head_dim")
    dim = dim if isinstance(dim, int) else text.hidden_size // text.num_attention_heads
    dim = HEAD_DIM if had.get("qk_rope_head_dim") else dim
    sizes: dict[str, Any] = {had.key("hidden_size"): HEADS * dim}
    if explicit and not had.get("qk_rope_head_dim"):
        sizes[had.key("head_dim")] = dim
    for name in ("word_embed_proj_dim",):
        if had.get(name) == had.get("hidden_size"):
            sizes[name] = HEADS * dim
    return sizes


def _widths(text: Any) -> dict[str, Any]:
    read = Reader(text, text.to_dict())
    sizes: dict[str, Any] = {read.key(name): value for name, value in _WIDTHS.items() if _is_count(read.get(name))}
    if (read.get("num_experts_per_tok") or 0) > 2:
        sizes |= {read.key(name): 4 for name in COUNTS if _is_count(read.get(name))}
        sizes |= {read.key("num_experts_per_tok"): 2}
        sizes |= {name: value for name, value in {"n_group": 2, "topk_group": 1}.items() if read.get(name)}
    if read.get("qk_rope_head_dim"):
        sizes |= {name: value for name, value in _LATENT.items() if read.get(name)}
    names = text.to_dict()
    sizes |= {name: value for name, value in _OWN_WIDTHS.items() if name in names}
    return sizes


def _is_count(value: Any) -> bool:
    """Whether the model has what is counted: 0 says that it has none."""
    return type(value) is int and value > 0
