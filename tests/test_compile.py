"""Compiled layers: one whole graph each, moves and local parameters inside, and the same numbers as eager."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan.prove.pool import GlooPool
from dtplan.te import engine
from tests import te_standin
from tests.cases import t0
from tests.models import batch, build, llama, neox


def _by_unit(model: Any) -> None:
    for unit in dtplan.applied(model).bound.fsdp_units:
        model.get_submodule(unit).compile(backend="aot_eager", fullgraph=True)


def _with_logits(output: Any) -> torch.Tensor:
    """The loss, and something of the logits that are returned with it."""
    loss: torch.Tensor = output.loss + dtplan.entropy(output.logits).mean()
    return loss


Beside = tuple[int, float, dict[str, float], list[int]]


def _compiled_beside_eager(config: Any, compile_: Any, dtype: Any, **options: Any) -> Beside:
    """The graphs that were made, how far loss and gradients are from those of the same model eager, and `_splits`."""
    import torch._dynamo.utils

    data = batch(config)
    losses, grads, splits = [], [], []
    for compiled in (False, True):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = dtplan.parallelize(build(config, dtype=dtype), mesh, **options)
        if compiled:
            compile_(model)
        loss = _with_logits(model(**data))
        splits.append(_splits(loss))
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    gaps = {n: float((grads[0][n] - g).abs().max() / g.abs().max()) for n, g in grads[1].items()}
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], abs(losses[0] - losses[1]), gaps, splits


def _splits(loss: torch.Tensor) -> int:
    """How often autograd itself will put gradients of parts together."""
    nodes, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            left += [following for following, _ in node.next_functions]
    return sum("Split" in node.name() for node in nodes)


def _unit_by_unit(rank: int, name: str, sequence_parallel: bool) -> Beside:
    config = {"llama": llama, "neox": neox}[name](num_hidden_layers=4)
    return _compiled_beside_eager(config, _by_unit, torch.float32, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("name", ["llama", "neox"])
def test_one_graph_serves_every_layer_and_computes_the_same(pool: GlooPool, name: str, sequence_parallel: bool) -> None:
    """Under sequence parallelism the first layer has a graph of its own: it is given the embedding's DTensor."""
    for graphs, loss_gap, gaps, _ in pool.run(_unit_by_unit, name, sequence_parallel, ranks=2, timeout_s=200):
        assert graphs == 1 + sequence_parallel
        assert loss_gap < 1e-6
        assert max(gaps.values()) < 1e-5


def _as_a_whole(rank: int, fused: bool) -> Beside:
    engine.find = lambda: te_standin.ENGINE if fused else "none here"  # type: ignore[assignment]
    config = llama(num_hidden_layers=4, attn_implementation="sdpa")
    compile_ = functools.partial(dtplan.compile_model, backend="aot_eager")
    te = "require" if fused else "off"
    options = {"sequence_parallel": True, "loss_parallel": True, "te": te}
    return _compiled_beside_eager(config, compile_, torch.float64, **options)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_compile_model_computes_the_same_with_few_graphs(pool: GlooPool, fused: bool) -> None:
    """Three for the loss; two for the layers, or one or two for what lies between fused layers.

    Eager, the gradients of q, k and v are put together by autograd in each of four layers; compiled, in the graph.
    """
    for graphs, loss_gap, gaps, splits in pool.run(_as_a_whole, fused, ranks=2, timeout_s=200):
        assert graphs <= 3 + 2
        assert loss_gap < 1e-6
        assert max(gaps.values()) < 1e-5
        assert splits[0] - splits[1] == (4 if fused else 0)


def _whole_and_in_one_graph(rank: int) -> tuple[str, Beside]:
    config = t0()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = dtplan.parallelize(build(config), mesh, loss_parallel=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(model, backend="aot_eager", fullgraph=True)(**batch(config))

    def compile_(model: Any) -> None:
        model.compile(backend="aot_eager")

    return str(caught.value), _compiled_beside_eager(config, compile_, torch.float64, loss_parallel=True)


def test_b101_the_whole_model_compiled_gives_the_gradients_of_eager(pool: GlooPool) -> None:
    """The logits leave the graph as a DTensor. One graph from the first call on says why it is refused.

    Each block compiled by itself is in the tests above, with logits as well.
    """
    for why, (_, loss_gap, gaps, _) in pool.run(_whole_and_in_one_graph, ranks=2, timeout_s=200):
        assert loss_gap < 1e-12
        assert max(gaps.values()) < 1e-12
        assert "call the model once before fullgraph=True" in why
