"""`dtplan prove` on real configs of the families with a plan, built-in or in ``tests/plans``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig

from dtplan.prove.oracle import BOUND
from dtplan.prove.proof import prove
from tests.families import plan_file

CONFIGS: dict[str, tuple[str, PretrainedConfig]] = {
    # family: (class, the sizes of a model that one can download)
    "bloom": ("BloomForCausalLM", transformers.BloomConfig(vocab_size=250880, hidden_size=1024, n_layer=24, n_head=16)),
    "falcon": ("FalconForCausalLM", transformers.FalconConfig()),  # 71 heads
    "falcon 11B": (
        "FalconForCausalLM",
        transformers.FalconConfig(
            hidden_size=4096,
            num_attention_heads=32,
            num_kv_heads=8,
            ffn_hidden_size=16384,
            new_decoder_architecture=True,
            num_ln_in_parallel_attn=1,
        ),
    ),
    "gemma2": ("Gemma2ForCausalLM", transformers.Gemma2Config()),
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config()),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM",
        transformers.GPTBigCodeConfig(n_embd=6144, n_head=48, n_inner=24576),
    ),
    "gpt_oss": ("GptOssForCausalLM", transformers.GptOssConfig()),
    "gptj": ("GPTJForCausalLM", transformers.GPTJConfig()),
    "mixtral": ("MixtralForCausalLM", transformers.MixtralConfig()),
    "olmo2": ("Olmo2ForCausalLM", transformers.Olmo2Config(num_key_value_heads=8)),
    "phi3": ("Phi3ForCausalLM", transformers.Phi3Config()),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config()),
    "starcoder2": ("Starcoder2ForCausalLM", transformers.Starcoder2Config()),
}
AT_4 = {"falcon", "gpt2", "olmo2", "phi3", "qwen3"}
"""Small ones, that are proved at degree 4 as well."""


def real(folder: Path, cls: str, config: PretrainedConfig) -> str:
    file = folder / "config.json"
    given: dict[str, Any] = {**config.to_dict(), "architectures": [cls]}
    file.write_text(json.dumps(given, default=str))
    return str(file)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_is_proved_with_and_without_sequence_parallelism(tmp_path: Path, name: str) -> None:
    cls, config = CONFIGS[name]
    degrees = [2, 4] if name in AT_4 else [2]
    proof = prove(plan_file(name.split(maxsplit=1)[0]), real(tmp_path, cls, config), tp=degrees, loss_parallel="off")
    assert [str(result.leg) for result in proof.legs if result.verdict != "proved"] == []
    assert len(proof.legs) == 2 * len(degrees)
    assert all(0 < (result.largest_error or 0) <= BOUND and result.steps == 3 for result in proof.legs)
    assert proof.idle == ()
