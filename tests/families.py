"""Tiny models of the families with a plan: 4 heads on 2 kv heads, where they have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.gptj import modeling_gptj

from dtplan.plan.library import builtin_plans
from dtplan.plan.read import load_plan
from tests.models import drawing

FOLDER = Path(__file__).parent / "plans"
_EAGER: dict[str, Any] = {"attn_implementation": "eager", "use_cache": False}
_TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **_EAGER,
}
_GQA = {**_TINY, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {
    "vocab_size": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **_EAGER,
}
_EAGER_EXPERTS: dict[str, Any] = {"experts_implementation": "eager"}
"""Experts one by one: the grouped kernel has no float64."""
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, **_EAGER_EXPERTS}
IMAGE = 31
"""The token that stands for a part of an image."""


def _deepseek_v3() -> PretrainedConfig:
    """One dense layer, one of experts."""
    return transformers.DeepseekV3Config(
        **{**_TINY, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        **_EAGER_EXPERTS,
    )


def _qwen3_next() -> PretrainedConfig:
    """One layer of the gated delta rule, one of attention; key heads and value heads differ in width."""
    return transformers.Qwen3NextConfig(
        **_GQA,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        **_EAGER_EXPERTS,
    )


def _llava() -> PretrainedConfig:
    """Four parts an image."""
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_GQA),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        ),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )


def falcon(**changes: Any) -> PretrainedConfig:
    """Multi-query, with rotary embedding and parallel branches, as Falcon 7B."""
    given = {**{k: v for k, v in _TINY.items() if k != "intermediate_size"}, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.FalconConfig(**{**given, **changes})


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "bloom": lambda: transformers.BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4, **_EAGER),
    "deepseek_v3": _deepseek_v3,
    "falcon": falcon,
    "gemma2": lambda: transformers.Gemma2Config(**_GQA, head_dim=8, query_pre_attn_scalar=8),
    "gpt2": lambda: transformers.GPT2Config(**_GPT),
    "gpt_bigcode": lambda: transformers.GPTBigCodeConfig(**_GPT, n_inner=64, multi_query=True),
    "gpt_oss": lambda: transformers.GptOssConfig(**_GQA, **_EXPERTS, head_dim=8, pad_token_id=0),
    "gptj": lambda: transformers.GPTJConfig(**_GPT, n_inner=64, rotary_dim=4),
    "llava": _llava,
    "mistral": lambda: transformers.MistralConfig(**_GQA, head_dim=8, sliding_window=4),
    "mixtral": lambda: transformers.MixtralConfig(**_GQA, **_EXPERTS),
    "olmo2": lambda: transformers.Olmo2Config(**_GQA, pad_token_id=0),
    "phi3": lambda: transformers.Phi3Config(**_GQA, pad_token_id=0),
    "qwen2": lambda: transformers.Qwen2Config(**_GQA),
    "qwen3": lambda: transformers.Qwen3Config(**_GQA, head_dim=8),
    "qwen3_next": _qwen3_next,
    "starcoder2": lambda: transformers.Starcoder2Config(**_GQA, residual_dropout=0.0, embedding_dropout=0.0),
}
NEW_FALCON: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2}
VARIANTS: dict[str, tuple[str, Callable[[], PretrainedConfig]]] = {
    "falcon 40B": ("falcon", lambda: falcon(**NEW_FALCON)),
    "falcon 11B, one norm for both branches": ("falcon", lambda: falcon(**NEW_FALCON, num_ln_in_parallel_attn=1)),
    "falcon RW": ("falcon", lambda: falcon(multi_query=False, alibi=True, parallel_attn=False, bias=True)),
    "falcon, multi-head": ("falcon", lambda: falcon(multi_query=False)),
    "falcon, multi-query with biases of heads": ("falcon", lambda: falcon(alibi=True, bias=True)),
    "falcon 7B, attention whole": ("falcon", lambda: falcon(num_attention_heads=1)),
    "falcon RW, attention whole": ("falcon", lambda: falcon(num_attention_heads=1, multi_query=False, alibi=True)),
    "starcoder, multi-head": (
        "gpt_bigcode",
        lambda: transformers.GPTBigCodeConfig(**_GPT, n_inner=64, multi_query=False),
    ),
}
"""Configs that take another variant of a plan: the plan's name, and the config."""


def plan_file(name: str) -> Path:
    """The plan of a family; of GPT-J, which transformers wrote anew after 5.17, the one for the code that is here."""
    folder = FOLDER / "older" if name == "gptj" and not hasattr(modeling_gptj, "GPTJRotaryEmbedding") else FOLDER
    return builtin_plans().get(name, folder / f"{name}.yaml")


def build(name: str, config: PretrainedConfig | None = None) -> nn.Module:
    """A live float64 model of the class that the plan serves, with every parameter random."""
    with drawing(seed=0):
        model: nn.Module = _class_of(name)(config or CONFIGS[name]()).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


def on_meta(name: str, config: PretrainedConfig | None = None) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = _class_of(name)(config or CONFIGS[name]())
    return model


def _class_of(name: str) -> Any:
    (serves,) = load_plan(plan_file(name)).serves
    return getattr(transformers, serves)


def batch(name: str, *, images: bool) -> dict[str, Tensor]:
    """Two rows of eight tokens, some labels ignored; for LLaVA with an image in each row."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, IMAGE, (2, 8), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    if name != "llava" or not images:
        return {"input_ids": ids, "labels": labels}
    ids[:, 1:5] = IMAGE
    pixels = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels}
