"""Checkpoints of models whose layers TransformerEngine fused: in and out by the names of the modules they replace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan.planner.apply import applied
from dtplan.prove.oracle import wholes
from dtplan.prove.simulated import simulated_ranks
from dtplan.te import engine as engines
from dtplan.weights.save import save_checkpoint
from tests import te_standin
from tests.models import build, llama, neox, on_meta

CONFIGS: dict[str, Any] = {
    "llama": lambda: llama(attn_implementation="sdpa", num_key_value_heads=2, tie_word_embeddings=True, vocab_size=33),
    "llama, biases": lambda: llama(attn_implementation="sdpa", attention_bias=True, mlp_bias=True),
    "neox": lambda: neox(attn_implementation="sdpa", hidden_act="gelu_new"),
}


@pytest.mark.parametrize("axes", [{"tp": 2}, {"shard": 4, "tp": 1}, {"shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_layers_load_and_save_the_tensors_they_are_made_of(
    name: str, axes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "find", lambda: te_standin.ENGINE)
    config = CONFIGS[name]()
    reference: nn.Module = build(config)
    save_checkpoint(reference, tmp_path / "source")
    truth = dict(reference.named_parameters())

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model = dtplan.parallelize(on_meta(config).double(), mesh, te="require")
        assert any(module.style == "te" for module in applied(model).bound.modules)
        report = dtplan.load(model, tmp_path / "source")
        assert report.bytes_read == report.bytes_kept
        assert report.missing == report.unexpected == ()
        held = wholes(model, {name: p.detach() for name, p in model.named_parameters()})
        assert {name: torch.equal(held[name], value) for name, value in truth.items()} == dict.fromkeys(truth, True)
        dtplan.save(model, tmp_path / "saved")

    simulated_ranks(torch.Size(axes.values()).numel(), on_rank)
    before, after = ((tmp_path / which / "model.safetensors").read_bytes() for which in ("source", "saved"))
    assert before == after
