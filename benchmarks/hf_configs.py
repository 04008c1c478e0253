"""Small configs of transformers' causal language models that have a tensor-parallel plan, and options to vary.

Most are the default config made small as `dtplan prove` makes it. Where a class needs more than its defaults, or has
sizes of its own, they are set here. Every kind of layer that the default config has is in the small one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_LATENT = {
    **_SMALL,
    **_EXPERTS,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
_MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_DELTA = {
    **_SMALL,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 8,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}

SMALL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_DELTA, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "falcon_h1": {**_SMALL, **_MAMBA, "mamba_d_ssm": 128},
    "kimi_linear": _DELTA,
    "bamba": {**_SMALL, **_MAMBA, "attn_layer_indices": [1]},
    "deepseek_v2": {**_LATENT, "first_k_dense_replace": 1},
    "deepseek_v32": {**_LATENT, **_INDEXER, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {
        **_SMALL,
        **_EXPERTS,
        **_INDEXER,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "o_groups": 4,
        "o_lora_rank": 16,
        "num_nextn_predict_layers": 0,
        "sliding_window": 4,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "dory": {
        **_SMALL,
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "mlp", "sliding_attention", "mlp", "full_attention", "mlp"],
    },
    "dots3_note_text": {
        **_LATENT,
        **_INDEXER,
        "head_dim": 16,
        "sliding_window": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["indexed_attention", "sliding_attention"],
        "shared_experts_intermediate_size": 48,
        "per_layer_config": {},
    },
    "gemma3n_text": {
        **_SMALL,
        "num_hidden_layers": 4,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 160,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "sliding_window": 4,
    },
    "gemma4_text": {
        **_SMALL,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 16}},
        "vocab_size_per_layer_input": 160,
        "hidden_size_per_layer_input": 16,
        "sliding_window": 4,
    },
    "gemma4_unified_text": {
        **_SMALL,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 16}},
        "sliding_window": 4,
    },
    "glm_moe_dsa": {**_LATENT, **_INDEXER, "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "full"]},
    "granitemoehybrid": {
        **_SMALL,
        **_MAMBA,
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "hy_v4": {
        **_LATENT,
        **_INDEXER,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["indexed_attention"] * 3,
        "indexer_types": ["full", "full", "shared"],
    },
    "inkling2_text": {
        **_SMALL,
        **_EXPERTS,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 8,
        "unpadded_vocab_size": 160,
        "rel_extent": 16,
        "d_rel": 4,
        "sliding_window_size": 4,
        "layer_types": ["hybrid_sliding", "hybrid"],
    },
    "llama4_text": {
        **_SMALL,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 8,
    },
    "longcat_flash": {
        **{key: value for key, value in _LATENT.items() if key not in ("num_hidden_layers", "intermediate_size")},
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "minicpm3": {key: value for key, value in _LATENT.items() if key not in _EXPERTS},
    "nemotron_h": {
        **{key: value for key, value in _SMALL.items() if key != "num_hidden_layers"},
        **_EXPERTS,
        "moe_shared_expert_intermediate_size": 48,
        "mamba_num_heads": 16,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "phi4_multimodal": {
        **{key: value for key, value in _SMALL.items() if key != "head_dim"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 28,
            "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "qwen4_exp_text": {
        **_SMALL,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "hc_lowrank": 16,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
}
"""Configs that are set by hand, by model type."""

COMPLETED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": (["conv", "full_attention"] * 16)},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "phimoe": {"router_jitter_noise": 0.0},  # drawn anew on every rank
}
"""Fields that the defaults leave out and the class needs."""


def given(model_type: str) -> dict[str, Any]:
    """Arguments of the config, beside its defaults."""
    return SMALL.get(model_type) or COMPLETED.get(model_type, {})


def architectures() -> Iterator[tuple[str, str]]:
    """Model type and class of every causal language model whose config has a tensor-parallel plan."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    for model_type, name in CLASSES.items():
        if getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None):
            yield model_type, name


def small_config(model_type: str, options: dict[str, Any]) -> Any:
    """The small config, in float64, with some options set."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from dtplan.prove.shrink import rebuilt, shrink

    config = CONFIG_MAPPING[model_type](**given(model_type))
    small = rebuilt(config, {}) if model_type in SMALL else shrink(config, [2, 4])[0]
    return rebuilt(small, options) if options else small


OPTIONS = (
    "use_parallel_residual",
    "use_qk_norm",
    "qk_layernorm",
    "attention_k_eq_v",
    "enable_moe_block",
    "is_moe",
    "use_double_wide_mlp",
    "shared_expert_sink",
    "gating",
    "use_attention_gate",
    "use_sandwich_norm",
    "use_post_norm",
    "mamba_rms_norm",
    "mamba_norm_before_gate",
    "norm_topk_prob",
    "rope_interleave",
    "moe_apply_router_weight_on_input",
    "attn_temperature_tuning",
    "use_bidirectional_attention",
)
"""Switches of a config that change what its modules are or how they are joined; each is turned over by itself."""
BIASES = (
    "attention_bias",
    "mlp_bias",
    "use_bias",
    "qkv_bias",
    "attention_out_bias",
    "conv_bias",
    "mamba_proj_bias",
    "projectors_bias",
    "lm_head_bias",
)
"""Switches that add biases; all of them are turned over together."""


def options_of(config: Any) -> dict[str, dict[str, Any]]:
    """Name -> changed fields of every case beside the config as it is."""
    said = {key: value for key, value in config.to_dict().items() if isinstance(value, bool)}
    cases = {}
    if biases := {key: not said[key] for key in BIASES if key in said}:
        cases["biases" if any(biases.values()) else "no biases"] = biases
    if "tie_word_embeddings" in said:
        cases["untied" if said["tie_word_embeddings"] else "tied"] = {
            "tie_word_embeddings": not said["tie_word_embeddings"]
        }
    cases |= {f"{key}={not said[key]}".lower(): {key: not said[key]} for key in OPTIONS if key in said}
    return cases
