"""Meshes of two and three axes: FSDP2 around tensor parallelism, hybrid sharding, and its options.

All run on simulated ranks, where a case takes half a second; the ones that stand for the rest also run on gloo.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

import dtplan
from dtplan.planner.fsdp import precision
from dtplan.prove.oracle import BOUND, errors, outcome, relative_error, whole
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from tests.models import CONFIGS, batch, build, llama

MESHES = {
    "shard2-tp2": {"shard": 2, "tp": 2},
    "shard4-tp1": {"shard": 4, "tp": 1},
    "replicate2-shard1-tp2": {"replicate": 2, "shard": 1, "tp": 2},
    "replicate2-shard2-tp1": {"replicate": 2, "shard": 2, "tp": 1},
    "replicate2-shard2": {"replicate": 2, "shard": 2},
    "shard1-tp4": {"shard": 1, "tp": 4},
}


def _mesh(shape: dict[str, int]) -> Any:
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


def _halves(config: PretrainedConfig, data_ranks: int) -> list[dict[str, torch.Tensor]]:
    """The joined batch cut into a part for each data-parallel rank; every part has as many labels."""
    data = batch(config, rows=4)
    data["labels"] = data["input_ids"].clone()
    return [{key: value.chunk(data_ranks)[i] for key, value in data.items()} for i in range(data_ranks)]


def _errors_on_rank(
    rank: int, config: PretrainedConfig, shape: dict[str, int], options: dict[str, Any]
) -> dict[str, float]:
    data_ranks = shape.get("replicate", 1) * shape.get("shard", 1)
    parts = _halves(config, data_ranks)
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    model = build(config)
    truth = outcome(copy.deepcopy(model), joined)
    sharded = dtplan.parallelize(model, _mesh(shape), **options)
    found = errors(outcome(sharded, parts[rank // shape.get("tp", 1)]), truth)
    # each data-parallel rank has its own logits and loss; what FSDP2 averages are the gradients
    grads = {name: error for name, error in found.items() if name.startswith("grad ")}
    assert len(grads) == len(truth.grads)
    norm = dtplan.clip_grad_norm_(sharded, 1e-3).item()
    wanted = torch.linalg.vector_norm(torch.stack([g.norm() for g in truth.grads.values()])).item()
    factor = 1e-3 / (wanted + 1e-6)
    clipped = {
        f"clipped {name}": relative_error(whole(p.grad), truth.grads[name] * factor)
        for name, p in sharded.named_parameters()
        if p.grad is not None
    }
    return {**grads, "norm": abs(norm - wanted) / wanted, **clipped}


def _assert_exact(found_by_rank: list[dict[str, float]]) -> None:
    for rank, found in enumerate(found_by_rank):
        wrong = {key: error for key, error in found.items() if not error <= BOUND}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", ["llama-tied", "neox", "llama-uneven-vocab"])
def test_every_gradient_and_the_clipped_norm(name: str, shape: dict[str, int]) -> None:
    _assert_exact(simulated_ranks(4, _errors_on_rank, CONFIGS[name], shape, {}))


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("llama-tied", "shard2-tp2", {"sequence_parallel": True, "loss_parallel": True}),
        ("neox", "replicate2-shard1-tp2", {"sequence_parallel": True}),
        ("llama-uneven-vocab", "replicate2-shard2", {}),
    ],
)
def test_the_same_over_real_processes(pool: GlooPool, name: str, mesh: str, options: dict[str, Any]) -> None:
    _assert_exact(pool.run(_errors_on_rank, CONFIGS[name], MESHES[mesh], options))


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": True},
        {"sequence_parallel": True, "loss_parallel": True},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
    ],
    ids="-".join,
)
def test_options_compose_with_fsdp(options: dict[str, Any]) -> None:
    _assert_exact(simulated_ranks(4, _errors_on_rank, CONFIGS["neox"], MESHES["shard2-tp2"], options))


def _checkpointed_on_rank(rank: int, config: PretrainedConfig, every: int) -> tuple[float, list[str], list[int]]:
    """Case B103: gradients with recomputation equal those without, bit for bit, in bf16 and float32."""
    data = batch(config)
    grads = {}
    calls = [0] * config.num_hidden_layers
    for activation_checkpointing in (False, every):
        sharded = dtplan.parallelize(
            build(config, dtype=torch.float32),
            _mesh({"shard": 2, "tp": 2}),
            mixed_precision="bf16",
            sequence_parallel=True,
            activation_checkpointing=activation_checkpointing,
        )
        for index, unit in enumerate(dtplan.applied(sharded).bound.fsdp_units):

            def called(*_: object, index: int = index) -> None:
                calls[index] += 1

            sharded.get_submodule(f"{unit}.mlp").register_forward_pre_hook(called)
        sharded(**data).loss.backward()
        grads[activation_checkpointing] = {n: p.grad.full_tensor() for n, p in sharded.named_parameters()}
    plain, recomputed = grads[False], grads[every]
    differing = [name for name in plain if not torch.equal(plain[name], recomputed[name])]
    return max(g.abs().max().item() for g in plain.values()), differing, calls


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["llama", "neox"])
def test_b103_recomputation_changes_no_gradient(name: str, every: int) -> None:
    once_without, twice_with = 1, 2
    for largest, differing, calls in simulated_ranks(4, _checkpointed_on_rank, CONFIGS[name], every):
        assert largest > 0
        assert differing == []
        recomputed = [index % every == 0 for index in range(2)]
        assert calls == [once_without + (twice_with if again else 1) for again in recomputed]


def _dtypes_on_rank(rank: int) -> dict[str, set[str]]:
    sharded = dtplan.parallelize(
        build(llama(), dtype=torch.float32),
        _mesh({"shard": 2, "tp": 2}),
        mixed_precision="bf16",
        loss_parallel=True,
    )
    seen: set[str] = set()
    linear = sharded.get_submodule("model.layers.0.mlp.up_proj")

    def note(_module: object, _args: object, out: torch.Tensor) -> None:
        seen.add(str(out.dtype))

    linear.register_forward_hook(note)
    sharded(**batch(llama())).loss.backward()
    return {
        "computed": seen,
        "parameters": {str(p.dtype) for p in sharded.parameters()},
        "gradients": {str(p.grad.dtype) for p in sharded.parameters()},
        "buffers": {str(b.dtype) for b in sharded.buffers()},
    }


def test_mixed_precision_computes_in_bf16_and_keeps_float32() -> None:
    for found in simulated_ranks(4, _dtypes_on_rank):
        assert found == {
            "computed": {"torch.bfloat16"},
            "parameters": {"torch.float32"},
            "gradients": {"torch.float32"},
            "buffers": {"torch.float32"},
        }


def _layout_on_rank(rank: int) -> tuple[set[Any], list[str], bool]:
    mesh = _mesh({"replicate": 2, "shard": 1, "tp": 2})
    sharded = dtplan.parallelize(build(llama()), mesh)
    axes = {p.device_mesh.mesh_dim_names for p in sharded.parameters() if isinstance(p, DTensor)}
    units = [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]
    return axes, units, all(isinstance(p, DTensor) for p in sharded.parameters())


def test_every_parameter_is_a_dtensor_on_one_mesh_and_every_layer_a_unit() -> None:
    for axes, units, all_dtensors in simulated_ranks(4, _layout_on_rank):
        assert axes == {("replicate", "shard", "tp")}
        assert units == ["", "model.layers.0", "model.layers.1"]
        assert all_dtensors


def _three_adamw_steps_on_rank(
    rank: int, config: PretrainedConfig, shape: dict[str, int], options: dict[str, Any]
) -> float:
    """Case B56: foreach AdamW over all parameters at once, with clipping; parameters against the unsharded run."""
    model = build(config)
    reference = copy.deepcopy(model)
    data_ranks = shape.get("replicate", 1) * shape.get("shard", 1)
    parts = _halves(config, data_ranks)
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    sharded = dtplan.parallelize(model, _mesh(shape), **options)
    runs = [(reference, joined), (sharded, parts[rank // shape.get("tp", 1)])]
    for run, data in runs:
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-3, foreach=True, eps=1e-3)
        for _ in range(3):
            outcome(run, data)
            dtplan.clip_grad_norm_(run, 0.5)
            optimizer.step()
    pairs = zip(reference.parameters(), sharded.parameters(), strict=True)
    return max(((a - b.full_tensor()).abs().max() / a.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("name", ["llama-tied", "neox"])
@pytest.mark.parametrize("shape", [{"shard": 2, "tp": 2}, {"tp": 4}], ids=["shard2-tp2", "tp4"])
def test_b56_three_optimizer_steps_equal_the_unsharded_run(
    name: str, shape: dict[str, int], options: dict[str, Any]
) -> None:
    found = simulated_ranks(4, _three_adamw_steps_on_rank, CONFIGS[name], shape, options)
    assert max(found) <= BOUND, found


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mixed_precision_reduces_in_float32(word: str, dtype: torch.dtype) -> None:
    policy = precision(word)
    assert policy is not None
    assert (policy.param_dtype, policy.reduce_dtype) == (dtype, torch.float32)
    with pytest.raises(dtplan.DegreesError, match="give 'bf16', 'fp16'"):
        precision("bf8")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_recomputation_keeps_no_cache_of_keys_and_values(attention: str) -> None:
    """Configs ask for a cache unless told otherwise; the second run of a layer would write to it again."""
    config = llama(use_cache=True, attn_implementation=attention)
    model, data = build(config), batch(config)
    copies = [copy.deepcopy(model) for _ in range(2)]
    model(**data).loss.backward()
    truth = {name: p.grad for name, p in model.named_parameters()}
    given = next(n for n in ("cache", "past_key_values") if n in inspect.signature(type(model).forward).parameters)

    def on_rank(rank: int) -> dict[str, float]:
        mesh = _mesh({"tp": 2})
        sharded = dtplan.parallelize(copies[rank], mesh, activation_checkpointing=True)
        found = sharded(**data)
        assert found[given].get_seq_length() == 0
        found.loss.backward()
        with torch.no_grad():
            prefix = sharded(input_ids=data["input_ids"][:, :4])[given]
            assert prefix.get_seq_length() == 4
        with pytest.raises(dtplan.ApplyError, match=r"layers.0 is recomputed, and was given a cache that holds 4 tok"):
            sharded(input_ids=data["input_ids"][:, 4:], **{given: prefix})
        grads = {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
        return {name: ((grads[name] - g).abs().max() / g.abs().max()).item() for name, g in truth.items()}

    for found in simulated_ranks(2, on_rank):
        assert found
        assert max(found.values()) <= BOUND
