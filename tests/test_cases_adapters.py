"""Cases B89 and B90: low-rank adapters, a container around a linear layer, under a plan that names its parts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan.plan.library import locate
from dtplan.plan.read import parse_plan
from dtplan.plan.spec import Plan
from dtplan.prove.oracle import BOUND, errors, outcome
from dtplan.prove.simulated import simulated_ranks
from tests.models import batch, build, llama

RANK = 4


class Adapted(nn.Module):
    """A linear layer and its adapter, under the names that PEFT gives them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False, dtype=base.weight.dtype)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return out


def adapted() -> Any:
    """q and o with adapters: a column-parallel layer, and a row-parallel one."""
    model = build(llama())
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.o_proj = Adapted(layer.self_attn.o_proj)
    return model


def plan() -> Plan:
    """Colwise: A is whole and sees a rank's share of the gradient, B is cut; rowwise: A is cut, B is whole."""
    text = locate("llama")[0].read_text(encoding="utf-8")
    lines = {
        "    self_attn.q_proj:         {style: colwise, unit: head}\n": (
            "    self_attn.q_proj.base_layer: {style: colwise, unit: head}\n"
            "    self_attn.q_proj.lora_A:  {grad: sum, output: keep}\n"
            "    self_attn.q_proj.lora_B:  {style: colwise, unit: head}\n"
        ),
        "    self_attn.o_proj:         {style: rowwise, unit: head, output: residual}\n": (
            "    self_attn.o_proj:         {output: {from: P, to: residual}}\n"
            "    self_attn.o_proj.base_layer: {style: rowwise, unit: head, output: P}\n"
            "    self_attn.o_proj.lora_A:  {style: rowwise, unit: head, output: P}\n"
            "    self_attn.o_proj.lora_B:  {grad: sum, output: P}\n"
        ),
    }
    for line, by in lines.items():
        assert line in text
        text = text.replace(line, by)
    return parse_plan(text[: text.index("te:")] + text[text.index("fsdp:") :])


def test_b90_rules_name_the_parts_of_an_adapted_layer() -> None:
    model, data = adapted(), batch(llama())
    truth = outcome(copy.deepcopy(model), data)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> dict[str, float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return errors(outcome(dtplan.parallelize(copies[rank], mesh, plan()), data), truth)

    for found in simulated_ranks(2, on_rank):
        assert sum(".lora_" in name for name in found) == 8
        assert max(found.values()) <= BOUND


def test_b89_an_adapter_is_saved_whole(tmp_path: Path) -> None:
    model = adapted()
    copies = [copy.deepcopy(model) for _ in range(4)]

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        dtplan.save(dtplan.parallelize(copies[rank], mesh, plan()), tmp_path / "adapted")

    simulated_ranks(4, on_rank)
    saved = load_file(tmp_path / "adapted" / "model.safetensors")
    adapters = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    assert saved["model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (32, RANK)
    assert all(torch.equal(saved[name], parameter) for name, parameter in adapters.items())
    again = adapted()
    again.load_state_dict(saved, strict=False)  # ties and the like
    ids = batch(llama())["input_ids"]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
