"""Compiled layers: one whole graph each, moves and local parameters inside, and the same numbers as eager."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan.prove.pool import GlooPool
from tests.models import batch, build, llama, neox


def _compiled_on_rank(rank: int, name: str, sequence_parallel: bool) -> tuple[int, float, dict[str, float]]:
    import torch
    import torch._dynamo.utils

    config = {"llama": llama, "neox": neox}[name](num_hidden_layers=4)
    data = batch(config)
    losses, grads = [], []
    for compiled in (False, True):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = dtplan.parallelize(build(config, dtype=torch.float32), mesh, sequence_parallel=sequence_parallel)
        if compiled:
            for unit in dtplan.applied(model).bound.fsdp_units:
                model.get_submodule(unit).compile(backend="aot_eager", fullgraph=True)
        loss = model(**data).loss
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    gaps = {n: float((grads[0][n] - g).abs().max() / g.abs().max()) for n, g in grads[1].items()}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return graphs, abs(losses[0] - losses[1]), gaps


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("name", ["llama", "neox"])
def test_one_graph_serves_every_layer_and_computes_the_same(pool: GlooPool, name: str, sequence_parallel: bool) -> None:
    """Under sequence parallelism the first layer has a graph of its own: it is given the embedding's DTensor."""
    for graphs, loss_gap, gaps in pool.run(_compiled_on_rank, name, sequence_parallel, ranks=2, timeout_s=200):
        assert graphs == 1 + sequence_parallel
        assert loss_gap < 1e-6
        assert max(gaps.values()) < 1e-5


def _compile_model_on_rank(rank: int, fused: bool) -> tuple[int, float, dict[str, float]]:
    """`compile_model` with the loss over cut logits, beside the same model eager."""
    import torch
    import torch._dynamo.utils

    from dtplan.te import engine
    from tests import te_standin

    engine.find = lambda: te_standin.ENGINE if fused else "none here"  # type: ignore[assignment]
    config = llama(num_hidden_layers=4, attn_implementation="sdpa")
    data = batch(config)
    losses, grads = [], []
    for compiled in (False, True):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = dtplan.parallelize(build(config), mesh, sequence_parallel=True, loss_parallel=True)
        assert any(module.style == "te" for module in dtplan.applied(model).bound.modules) == fused
        if compiled:
            dtplan.compile_model(model, backend="aot_eager")
        loss = model(**data).loss
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    gaps = {n: float((grads[0][n] - g).abs().max() / g.abs().max()) for n, g in grads[1].items()}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return graphs, abs(losses[0] - losses[1]), gaps


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_compile_model_computes_the_same_with_few_graphs(pool: GlooPool, fused: bool) -> None:
    """Three for the loss; two for the layers, or one for what lies between fused layers."""
    for graphs, loss_gap, gaps in pool.run(_compile_model_on_rank, fused, ranks=2, timeout_s=200):
        assert graphs <= 3 + 2
        assert loss_gap < 1e-6
        assert max(gaps.values()) < 1e-5
