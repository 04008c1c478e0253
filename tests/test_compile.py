"""Compiled layers: one whole graph each, moves and local parameters inside, and the same numbers as eager."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan.prove.pool import GlooPool
from tests.models import CONFIGS, batch, build


def _compiled_on_rank(rank: int, name: str) -> tuple[float, dict[str, float]]:
    import torch

    data = batch(CONFIGS[name])
    losses, grads = [], []
    for compiled in (False, True):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = dtplan.parallelize(build(CONFIGS[name], dtype=torch.float32), mesh, sequence_parallel=True)
        if compiled:
            for unit in dtplan.applied(model).bound.fsdp_units:
                model.get_submodule(unit).compile(backend="aot_eager", fullgraph=True)
        loss = model(**data).loss
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    gaps = {n: float((grads[0][n] - g).abs().max() / g.abs().max()) for n, g in grads[1].items()}
    return abs(losses[0] - losses[1]), gaps


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_a_layer_compiles_as_one_graph_and_computes_the_same(pool: GlooPool, name: str) -> None:
    for loss_gap, gaps in pool.run(_compiled_on_rank, name, ranks=2, timeout_s=200):
        assert loss_gap < 1e-6
        assert max(gaps.values()) < 1e-5
