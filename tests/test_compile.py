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
