"""Both built-in plans are exact: logits and every gradient on every rank, in float64, and the fewest collectives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import PretrainedConfig, StableLmConfig

import dtplan
from dtplan.plan.read import parse_plan
from dtplan.planner.ledger import ledger
from dtplan.prove.counter import CollectiveCounter
from dtplan.prove.oracle import BOUND, errors, outcome
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from tests.models import CONFIGS, batch, build, llama, neox, on_meta


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_gradient_on_every_rank(name: str, tp: int, sequence_parallel: bool) -> None:
    config = CONFIGS[name]
    model = build(config)
    data = batch(config)
    truth = outcome(copy.deepcopy(model), data)
    copies = [copy.deepcopy(model) for _ in range(tp)]

    def on_rank(rank: int) -> dict[str, float]:
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(
            copies[rank], mesh, sequence_parallel=sequence_parallel, loss_parallel=sequence_parallel
        )
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
        return errors(outcome(sharded, data), truth)

    for rank, found in enumerate(simulated_ranks(tp, on_rank)):
        wrong = {name: error for name, error in found.items() if not error <= BOUND}
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(found) == 2 + len(truth.grads)


def test_a_layer_is_counted_once_however_many_alike_modules_it_has() -> None:
    """StableLM has a norm module for every head."""
    plan = parse_plan(
        """
dtplan: 1
units: {ffn: intermediate_size}
rules:
  model.embed_tokens: replicate
  model.rotary_emb: replicate
  model.layers.*.self_attn: {style: replicate, below: true}
  model.layers.*.input_layernorm: replicate
  model.layers.*.post_attention_layernorm: replicate
  model.layers.*.mlp: {input: R}
  model.layers.*.mlp.{gate,up}_proj: {style: colwise, unit: ffn}
  model.layers.*.mlp.down_proj: {style: rowwise, unit: ffn}
  model.norm: replicate
  lm_head: replicate
fsdp: {units: [model.layers.*]}
"""
    )
    config = StableLmConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=8, qk_layernorm=True, pad_token_id=0
    )
    (floor,) = ledger(dtplan.bind(on_meta(config), plan, tp=2)).floors
    assert (floor.layer, floor.count, floor.forward, floor.backward) == ("model.layers.*", 3, 1, 1)


COLLECTIVES = {
    # the whole step: forward and backward, per layer; head and embedding aside
    ("llama", False): {"all_reduce": 4, "all_gather": 0, "reduce_scatter": 0},
    ("llama", True): {"all_reduce": 0, "all_gather": 4, "reduce_scatter": 4},
    ("neox", False): {"all_reduce": 2, "all_gather": 0, "reduce_scatter": 0},
    ("neox", True): {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 2},
    ("neox-sequential", False): {"all_reduce": 4, "all_gather": 0, "reduce_scatter": 0},
}


@pytest.mark.parametrize(("name", "sequence_parallel"), COLLECTIVES)
def test_collectives_of_a_layer_are_the_floor(name: str, sequence_parallel: bool) -> None:
    """Counted on models of 1 and 3 layers: the difference is what two layers cost."""
    make = {
        "llama": llama,
        "neox": neox,
        "neox-sequential": lambda **k: neox(use_parallel_residual=False, **k),
    }[name]
    one, three = (
        simulated_ranks(2, _count_on_rank, make(num_hidden_layers=layers), sequence_parallel, False)[0]
        for layers in (1, 3)
    )
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    two_layers = {kind: three.get(kind, 0) - one.get(kind, 0) for kind in kinds}
    assert two_layers == {kind: 2 * count for kind, count in COLLECTIVES[name, sequence_parallel].items()}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("loss_parallel", [False, True], ids=["", "loss-parallel"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "neox", "neox-sequential"])
def test_the_ledger_equals_what_is_counted(name: str, sequence_parallel: bool, loss_parallel: bool) -> None:
    config = CONFIGS[name]
    bound = dtplan.bind(build(config), tp=2, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    book = ledger(bound, batch=2, sequence=8, dtype="float64")
    expected: dict[str, int] = {}
    for (_, kind), count in book.counts().items():
        expected[kind] = expected.get(kind, 0) + count
    assert simulated_ranks(2, _count_on_rank, config, sequence_parallel, loss_parallel) == [expected] * 2
    assert all(floor.forward == floor.floor_forward for floor in book.floors)
    assert all(floor.backward == floor.floor_backward for floor in book.floors)


def _count_on_rank(rank: int, config: PretrainedConfig, sequence_parallel: bool, loss_parallel: bool) -> dict[str, int]:
    """Collectives of one forward and backward at tp 2, by kind."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data = batch(config)
    sharded = dtplan.parallelize(build(config), mesh, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    sharded(data["input_ids"])  # the first call compares batches over ranks: not a part of a step
    with CollectiveCounter() as counter:
        sharded(**data).loss.backward()
    return dict(counter.counts)


def _two_counts_on_rank(rank: int, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """Our counter and torch's own, which works in a process but not in a thread."""
    ours = _count_on_rank(rank, CONFIGS[name], True, True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data = batch(CONFIGS[name])
    sharded = dtplan.parallelize(build(CONFIGS[name]), mesh, sequence_parallel=True, loss_parallel=True)
    sharded(data["input_ids"])
    with CommDebugMode() as counter:
        sharded(**data).loss.backward()
    found = {str(op).split(".")[-1]: n for op, n in counter.get_comm_counts().items() if n}
    return ours, {op.removesuffix("_tensor").removesuffix("_into"): n for op, n in found.items()}


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_the_counter_counts_what_torch_s_own_counts(pool: GlooPool, name: str) -> None:
    for ours, torch_s in pool.run(_two_counts_on_rank, name, ranks=2):
        assert ours == torch_s
        assert sum(ours.values()) > 0


def test_an_ungrouped_plan_is_exact_but_above_the_floor() -> None:
    """P0 of the cases: per-linear rules, as peers write them, cost three more all-reduces a layer."""
    plan = dtplan.parse_plan(
        "dtplan: 1\n"
        "extends: llama\n"
        "rules:\n"
        "  model.layers.*.self_attn: {input: keep}\n"
        "  model.layers.*.mlp: {input: keep}\n"
    )
    config = llama()
    bound = dtplan.bind(build(config), plan, tp=2)
    (floor,) = ledger(bound).floors
    assert (floor.forward, floor.backward) == (2, 5)
    assert (floor.floor_forward, floor.floor_backward) == (2, 2)
    assert any("q_proj, k_proj, v_proj" in line for line in floor.excess)


def test_a_float32_step_by_the_model_s_own_loss() -> None:
    """The front door users take: `labels=` and the model's loss, in float32, under loss parallelism."""
    config = llama(num_key_value_heads=2)
    model = build(config, dtype=torch.float32)
    data = batch(config)
    reference = copy.deepcopy(model)
    loss = reference(**data).loss
    loss.backward()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(copies[rank], mesh, sequence_parallel=True, loss_parallel=True)
        found = sharded(**data).loss
        found.backward()
        return found.item(), dtplan.clip_grad_norm_(sharded, 1.0).item()

    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    for found_loss, found_norm in simulated_ranks(2, on_rank):
        assert found_loss == pytest.approx(loss.item(), rel=1e-6)
        assert found_norm == pytest.approx(norm.item(), rel=1e-5)
