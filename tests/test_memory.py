"""What a rank holds: arithmetic on a bound plan against storages that are there, byte by byte."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Phi3Config

import dtplan
from dtplan.planner.apply import applied
from dtplan.planner.memory import Held, Precision, held, units_of
from dtplan.prove.simulated import simulated_ranks
from dtplan.sizing.watch import local_tensors
from tests.models import CONFIGS, batch, drawing, llama
from tests.te_standin import ENGINE

PHI3 = Phi3Config(
    vocab_size=33,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
)
MODELS = {**CONFIGS, "phi3": PHI3, "llama-odd": llama(hidden_size=40, intermediate_size=20, vocab_size=35)}


def live(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    with drawing(seed=0):
        return AutoModelForCausalLM.from_config(MODELS[name]).to(dtype)


def storages(tensors: Any) -> int:
    """Bytes of the storages under some tensors, each once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in local_tensors(tensors))}.values())


def holds(
    rank: int, model: nn.Module, config: Any, axes: dict[str, int], **options: Any
) -> tuple[Held, dict[str, int]]:
    """What this rank holds after a step, and where it is on the mesh."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = dtplan.parallelize(copy.deepcopy(model), mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batch(config, rows=2)).loss.backward()
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    optimizer.step()
    moments = [value for one in optimizer.state.values() for value in one.values()]
    size = sum(moment.numel() * moment.element_size() for moment in local_tensors(moments))
    found = Held(parameters=storages(parameters), gradients=storages(grads), optimizer=size)
    return found, {name: mesh.get_local_rank(name) for name in axes}


CASES = [
    ("llama-tied", {"tp": 2}, {}),
    ("llama-uneven-vocab", {"tp": 2}, {"loss_parallel": True, "sequence_parallel": True}),
    ("llama-biases", {"shard": 2, "tp": 2}, {}),
    ("llama-odd", {"shard": 3, "tp": 1}, {}),
    ("llama-uneven-vocab", {"shard": 3, "tp": 2}, {}),
    ("neox", {"replicate": 2, "shard": 1, "tp": 2}, {}),
    ("neox-tied-uneven", {"replicate": 1, "shard": 2, "tp": 2}, {"activation_checkpointing": True}),
    ("phi3", {"shard": 2, "tp": 2}, {}),
]


@pytest.mark.parametrize(("name", "axes", "options"), CASES, ids=str)
def test_what_every_rank_holds_is_known_to_the_byte(name: str, axes: dict[str, Any], options: dict[str, Any]) -> None:
    model, config = live(name), MODELS[name]
    size = torch.Size(axes.values()).numel()
    ranks = simulated_ranks(size, lambda rank: holds(rank, model, config, axes, **options))
    switches: dict[str, Any] = {key: value for key, value in options.items() if key != "activation_checkpointing"}
    bound = dtplan.bind(model, **axes, **switches)
    for found, place in ranks:
        at = (place["tp"], place.get("shard", 0))
        assert held(bound, Precision.of("float32"), "adamw", at) == found
    most = held(bound, Precision.of("float32"), "adamw")
    assert all(
        getattr(most, part) >= getattr(found, part) for found, _ in ranks for part in ("parameters", "optimizer")
    )


def test_mixed_precision_keeps_float32() -> None:
    model, config = live("llama"), MODELS["llama"]
    axes: dict[str, Any] = {"shard": 2, "tp": 1}
    ranks = simulated_ranks(2, lambda rank: holds(rank, model, config, axes, mixed_precision="bf16"))
    bound = dtplan.bind(model, **axes)
    for found, place in ranks:
        assert held(bound, Precision.of("float32", "bfloat16"), "adamw", (0, place["shard"])) == found


def test_fused_layers_hold_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtplan.te.engine.find", lambda: ENGINE)
    config = llama(attn_implementation="sdpa", num_key_value_heads=2)
    with drawing(seed=0):
        model = AutoModelForCausalLM.from_config(config).to(torch.float64)

    def on(rank: int) -> tuple[Held, Held]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        sharded = dtplan.parallelize(copy.deepcopy(model), mesh, te="require")
        at = (mesh.get_local_rank("tp"), mesh.get_local_rank("shard"))
        said = held(applied(sharded).bound, Precision.of("float64"), "sgd", at)
        return said, Held(parameters=storages(sharded.parameters()), gradients=said.gradients, optimizer=0)

    for said, found in simulated_ranks(4, on):
        assert said == found


def test_units_add_up_to_what_is_held() -> None:
    bound = dtplan.bind(live("llama-odd"), tp=2, shard=3)
    precision = Precision.of("float32", "bfloat16")
    units = units_of(bound, precision)
    assert sum(unit.kept for unit in units.values()) == held(bound, precision).gradients
    assert sum(unit.gathered for unit in units.values()) == held(bound, precision).parameters * 3 // 2
    assert set(units) == {"model.layers.0", "model.layers.1", ""}


def test_other_optimizers_and_frozen_parameters() -> None:
    model = live("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name)
    bound = dtplan.bind(model)
    layer = sum(p.numel() for p in model.get_submodule("model.layers.0").parameters()) * 4
    assert held(bound, Precision.of("float32"), "momentum").optimizer == layer
    assert held(bound, Precision.of("float32"), "sgd").optimizer == 0
    assert held(bound, Precision.of("float32")).gradients == layer


def test_fsdp_lets_the_unsharded_parameters_go() -> None:
    model = live("llama")

    def on(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
        copied = copy.deepcopy(model)
        before = [weakref.ref(parameter.untyped_storage()) for parameter in copied.parameters()]
        sharded: Tensor | nn.Module = dtplan.parallelize(copied, mesh)
        gc.collect()
        assert sharded is copied
        return sum(one() is not None for one in before)

    assert simulated_ranks(2, on) == [0, 0]
