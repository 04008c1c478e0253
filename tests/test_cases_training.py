"""Cases under *Sequence parallel*, *Replicated-parameter gradients*, *Clipping*, *Mixed* and *Mesh shapes*."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import CompileConfig
from transformers.models.llama import modeling_llama

import dtplan
from dtplan import ApplyError, BindError, DegreesError
from dtplan.plan.spec import S
from dtplan.planner.clip import total_norm
from dtplan.planner.loss import causal_lm_loss
from dtplan.prove.counter import CollectiveCounter
from dtplan.prove.oracle import BOUND, errors, float64_casts, outcome, relative_error, whole
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from tests.cases import P0, gap, ids_of, model_of, plan_with, t0
from tests.models import batch, build, llama, neox, on_meta

T0_NORM = 2.304
"""T0's gradient norm, as the cases give it."""


def mesh_of(**axes: int) -> Any:
    """A CPU mesh with the given axes."""
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


# --- Sequence parallel ---


@pytest.mark.parametrize("length", [7, 1])
def test_b39_a_sequence_that_does_not_divide_is_refused_before_any_collective(length: int) -> None:
    copies = [model_of(t0()) for _ in range(2)]
    ids = ids_of(t0(), length=length)

    def on_rank(rank: int) -> str:
        sharded = dtplan.parallelize(copies[rank], mesh_of(tp=2), sequence_parallel=True)
        with pytest.raises(ApplyError) as caught:
            sharded(ids)
        return str(caught.value)

    first, second = simulated_ranks(2, on_rank)
    assert first == second
    assert f"dim 1 of length {length} cannot be cut over 2 tp ranks" in first
    assert "pad the sequence to a multiple of 2" in first


def test_b39_a_batch_that_does_not_divide_is_refused_where_the_plan_cuts_it() -> None:
    plan = dataclasses.replace(dtplan.load_plan("llama"), sequence_parallel=S(0))
    copies = [model_of(t0()) for _ in range(2)]

    def on_rank(rank: int) -> str:
        sharded = dtplan.parallelize(copies[rank], mesh_of(tp=2), plan, sequence_parallel=True)
        with pytest.raises(ApplyError) as caught:
            sharded(ids_of(t0())[:1])
        return str(caught.value)

    for said in simulated_ranks(2, on_rank):
        assert "dim 0 of length 1 cannot be cut over 2 tp ranks; give a batch of a multiple of 2" in said


def test_b40_positions_and_mask_see_the_whole_sequence() -> None:
    config = t0()
    seen: list[tuple[int, ...]] = []
    copies = [model_of(config) for _ in range(2)]

    def on_rank(rank: int) -> float:
        sharded = dtplan.parallelize(copies[rank], mesh_of(tp=2), sequence_parallel=True)
        attention = sharded.model.layers[0].self_attn
        attention.register_forward_pre_hook(
            lambda _m, _args, kwargs: seen.append(
                (kwargs["position_embeddings"][0].shape[1], *kwargs["attention_mask"].shape[-2:])
            ),
            with_kwargs=True,
        )
        return gap(sharded(ids_of(config)).logits, truth)

    with torch.no_grad():
        truth = model_of(config)(ids_of(config)).logits
    assert max(simulated_ranks(2, on_rank)) < 1e-6
    assert seen == [(8, 8, 8)] * 2


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.input_layernorm.weight"])
def test_b42_b43_a_norm_s_gradient_is_whole_and_the_same_on_every_rank(name: str) -> None:
    """The torch side of B42: the norm in front of the projections, under sequence parallelism."""
    model, ids = model_of(t0()), ids_of(t0())
    reference = copy.deepcopy(model)
    reference(ids, labels=ids).loss.backward()
    wanted = reference.get_parameter(name).grad
    assert wanted is not None
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> Tensor:
        sharded = dtplan.parallelize(copies[rank], mesh_of(tp=2), sequence_parallel=True)
        sharded(ids, labels=ids).loss.backward()
        grad = sharded.get_parameter(name).grad
        assert isinstance(grad, DTensor)
        return grad.to_local()

    first, second = simulated_ranks(2, on_rank)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, wanted, rtol=1e-5, atol=1e-7)


# --- Replicated-parameter gradients, loss and grad-norm scale ---


@pytest.mark.parametrize(
    ("axes", "plan"),
    [({"tp": 1}, "llama"), ({"tp": 2}, "llama"), ({"tp": 2}, "P0"), ({"shard": 2, "tp": 2}, "P0")],
    ids=["tp1", "tp2", "tp2-P0", "shard2-tp2-P0"],
)
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_b45_b54_the_gradient_norm_counts_every_element_once(axes: dict[str, int], plan: str, norm_type: float) -> None:
    """The true norm of T0 is 2.304; summing replicated gradients over tp gives 3.156."""
    model, ids = model_of(t0()), ids_of(t0())
    reference = copy.deepcopy(model)
    reference(ids, labels=ids).loss.backward()
    wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0, norm_type)
    if norm_type == 2.0:
        assert wanted.item() == pytest.approx(T0_NORM, abs=5e-4)
    ranks = int(torch.tensor(list(axes.values())).prod())
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    chosen = plan if plan == "llama" else plan_with(P0)

    def on_rank(rank: int) -> tuple[Tensor, float]:
        sharded = dtplan.parallelize(copies[rank], mesh_of(**axes), chosen)
        sharded(ids, labels=ids).loss.backward()
        norm = dtplan.clip_grad_norm_(sharded, 1.0, norm_type)
        pairs = [(whole(p.grad), reference.get_parameter(n).grad) for n, p in sharded.named_parameters()]
        return norm, max(gap(a, b) for a, b in pairs)

    for norm, distance in simulated_ranks(ranks, on_rank):
        assert type(norm) is Tensor
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-5)
        assert distance < 1e-6


def test_b47_ranks_that_were_built_differently_are_refused_alike() -> None:
    copies = [model_of(t0(), seed=rank) for rank in range(2)]

    def on_rank(rank: int) -> str:
        with pytest.raises(ApplyError) as caught:
            dtplan.parallelize(copies[rank], mesh_of(tp=2))
        assert all(type(p) is nn.Parameter for p in copies[rank].parameters())
        return str(caught.value)

    first, second = simulated_ranks(2, on_rank)
    assert first == second
    assert "tensors differ between ranks" in first
    assert "seed every rank alike" in first


@pytest.mark.parametrize("how", ["live-and-meta", "another-config"])
def test_ranks_that_hold_different_models_are_refused_alike_before_any_of_it_is_sent(how: str) -> None:
    other = model_of(t0(), meta=True) if how == "live-and-meta" else model_of(t0(num_hidden_layers=2))
    models = [model_of(t0()), other]

    def on_rank(rank: int) -> str:
        with pytest.raises(ApplyError) as caught:
            dtplan.parallelize(models[rank], mesh_of(tp=2))
        return str(caught.value)

    first, second = simulated_ranks(2, on_rank)
    assert first == second
    says = "are live on rank 0 and 0 on rank 1" if how == "live-and-meta" else "the model or the plan is not the same"
    assert says in first


def test_nothing_that_is_asked_for_is_silently_ignored() -> None:
    """Recomputation without units, and a plan's own precision without an axis for FSDP2."""
    without_units, precise = (
        plan_with(P0),
        dtplan.parse_plan("dtplan: 1\nextends: llama\nfsdp: {param_dtype: bfloat16}\n"),
    )

    def on_rank(rank: int) -> None:
        mesh = mesh_of(tp=1)
        with pytest.raises(ApplyError, match="activation_checkpointing=True recomputes units; plan has 0 units"):
            dtplan.parallelize(model_of(t0()), mesh, without_units, activation_checkpointing=True)
        with pytest.raises(ApplyError, match="activation_checkpointing=-1"):
            dtplan.parallelize(model_of(t0()), mesh, activation_checkpointing=-1)
        with pytest.raises(DegreesError, match="need a `shard` axis"):
            dtplan.parallelize(model_of(t0()), mesh, precise)

    simulated_ranks(1, on_rank)


@pytest.mark.parametrize("case", ["b48", "b49"])
def test_b48_b49_a_whole_norm_between_cut_layers_must_say_what_its_gradient_is(case: str) -> None:
    """B48: a norm over a head. B49: a norm over all heads, whose mean is over a dim that is cut."""
    size = {"b48": 8, "b49": 32}[case]
    model = model_of(t0(), meta=True)
    for layer in model.model.layers:
        layer.self_attn.q_norm = modeling_llama.LlamaRMSNorm(size).to("meta")
    with pytest.raises(BindError) as caught:
        dtplan.bind(model, plan_with(P0 + "  model.layers.*.self_attn.q_norm: norm\n"), tp=2)
    assert [finding.code for finding in caught.value.diagnostics] == ["DTP415"]
    assert "write `grad: sum`" in str(caught.value)
    summed = plan_with(P0 + "  model.layers.*.self_attn.q_norm: {style: norm, grad: sum}\n")
    placed = {name: tensor for _, name, tensor in dtplan.bind(model, summed, tp=2).tensors()}
    assert placed["model.layers.0.self_attn.q_norm.weight"].grad == "sum"


def _unequal_parts() -> list[dict[str, Tensor]]:
    """Two data-parallel batches with different numbers of labels, the second of B65 with none at all."""
    data = batch(t0(), rows=4)
    labels = data["input_ids"].clone()
    labels[1, 2:] = -100
    labels[2:, :] = -100
    return [{"input_ids": data["input_ids"][i : i + 2], "labels": labels[i : i + 2]} for i in (0, 2)]


def test_b51_b52_b65_token_mean_over_unequal_data_parallel_batches() -> None:
    """FSDP2 averages over the data-parallel ranks, so each divides its sum by the mean number of labels a rank."""
    parts = _unequal_parts()
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    model = model_of(t0())
    reference = copy.deepcopy(model)
    reference(**joined).loss.backward()
    wanted = reference(**joined).loss.item()
    labels = int((joined["labels"][:, 1:] != -100).sum())
    copies = [copy.deepcopy(model) for _ in range(4)]

    def on_rank(rank: int) -> tuple[float, float]:
        sharded = dtplan.parallelize(copies[rank], mesh_of(shard=2, tp=2), loss_parallel=True)
        loss = sharded(**parts[rank // 2], num_items_in_batch=labels / 2).loss
        loss.backward()
        pairs = [(whole(p.grad), reference.get_parameter(n).grad) for n, p in sharded.named_parameters()]
        return loss.item(), max(gap(a, b) for a, b in pairs)

    found = simulated_ranks(4, on_rank)
    assert all(distance < 1e-6 for _, distance in found)
    assert (found[0][0] + found[2][0]) / 2 == pytest.approx(wanted, rel=1e-5)


def test_b53_ranks_of_one_tp_group_must_read_the_same_batch() -> None:
    copies = [model_of(t0()) for _ in range(2)]

    def on_rank(rank: int) -> str:
        sharded = dtplan.parallelize(copies[rank], mesh_of(tp=2))
        with pytest.raises(ApplyError) as caught:
            sharded(ids_of(t0(), seed=rank))
        return str(caught.value)

    first, second = simulated_ranks(2, on_rank)
    assert first == second
    assert "different batches" in first
    assert "dp_rank" in first


# --- Clipping and optimizer over mixed tensors ---


def test_b55_gradients_on_several_meshes_and_plain_ones_make_one_norm() -> None:
    torch.manual_seed(0)
    values = [torch.randn(4, 6), torch.randn(8), torch.randn(3, 3)]
    wanted = {
        p: torch.linalg.vector_norm(torch.cat([v.flatten() for v in values]), p).item() for p in (2.0, float("inf"))
    }

    def on_rank(rank: int) -> dict[float, float]:
        mesh = mesh_of(shard=2, tp=2)
        grads = [
            distribute_tensor(values[0], mesh, [Shard(0), Shard(1)], src_data_rank=None),
            distribute_tensor(values[1], mesh["tp"], [Replicate()], src_data_rank=None),
            values[2],
        ]
        return {p: total_norm(grads, p).item() for p in wanted}

    for found in simulated_ranks(4, on_rank):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_b58_the_norm_of_offloaded_gradients_is_summed_on_the_mesh_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's group has no backend for what is in host memory; the meta device stands for the GPU here."""
    config = t0()
    model, data = model_of(config), {"input_ids": ids_of(config), "labels": ids_of(config)}
    copies = [copy.deepcopy(model) for _ in range(2)]
    model(**data).loss.backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    devices: list[str] = []
    all_reduce = dist.all_reduce

    def noted(values: Tensor, *args: Any, **kwargs: Any) -> None:
        devices.append(values.device.type)
        if not values.is_meta:
            all_reduce(values, *args, **kwargs)

    def on_rank(rank: int) -> Tensor:
        sharded = dtplan.parallelize(copies[rank], mesh_of(shard=2), cpu_offload=True)
        sharded(**data).loss.backward()
        norm = dtplan.clip_grad_norm_(sharded, 1.0)
        assert all(p.grad.to_local().is_cpu for p in sharded.parameters())
        dist.barrier()
        monkeypatch.setattr(DeviceMesh, "device_type", "meta")
        monkeypatch.setattr("dtplan.planner.clip.dist.all_reduce", noted)
        dist.barrier()
        total_norm([p.grad for p in sharded.parameters()])
        return norm

    for norm in simulated_ranks(2, on_rank):
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert devices == ["meta", "meta"]


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_b56_all_parameters_go_through_one_foreach_or_fused_optimizer(fused: bool) -> None:
    model, ids = model_of(t0()), ids_of(t0())
    reference = copy.deepcopy(model)
    copies = [copy.deepcopy(model) for _ in range(2)]
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "fused" if fused else "foreach": True}

    def step(run: nn.Module) -> None:
        run(ids, labels=ids).loss.backward()
        torch.optim.AdamW(run.parameters(), **options).step()

    step(reference)

    def on_rank(rank: int) -> float:
        sharded = dtplan.parallelize(copies[rank], mesh_of(tp=2), plan_with(P0))
        step(sharded)
        pairs = zip(reference.parameters(), sharded.parameters(), strict=True)
        return max(gap(a, b) for a, b in pairs)

    assert max(simulated_ranks(2, on_rank)) < 1e-5  # eps keeps Adam from blowing up a tiny gradient's rounding


def test_the_norm_refuses_a_partial_sum_and_reports_what_is_not_finite() -> None:
    def on_rank(rank: int) -> None:
        from torch.distributed.tensor import Partial

        partial = DTensor.from_local(torch.ones(2), mesh_of(tp=2), [Partial()], run_check=False)
        with pytest.raises(ApplyError, match="still a partial sum"):
            total_norm([partial])
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.tensor([float("nan"), 1.0])
        with pytest.raises(ApplyError, match="nothing was scaled"):
            dtplan.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
        assert parameter.grad[1] == 1.0

    simulated_ranks(2, on_rank)


# --- Mixed Tensor/DTensor activations and custom kernels ---


def test_b67_a_module_that_is_called_past_its_unit_says_so_and_a_registered_method_works() -> None:
    model, ids = model_of(t0()), ids_of(t0())
    wanted = model.model.embed_tokens(ids)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> float:
        sharded = dtplan.parallelize(copies[rank], mesh_of(shard=2, tp=1))
        with pytest.raises(ApplyError, match=r"model\.embed_tokens was called while FSDP2 held its parameters cut"):
            sharded.model.embed_tokens(ids)
        sharded.embed = lambda tokens: sharded.model.embed_tokens(tokens)  # noqa: PLW0108 - a function, to be wrapped
        register_fsdp_forward_method(sharded, "embed")
        return gap(sharded.embed(ids), wanted)

    assert simulated_ranks(2, on_rank) == [0.0, 0.0]


def test_b68_a_module_can_be_called_by_itself_and_all_activations_are_plain() -> None:
    model, ids = model_of(t0()), ids_of(t0())
    copies = [copy.deepcopy(model) for _ in range(2)]
    kinds: set[type] = set()

    def on_rank(rank: int) -> float:
        sharded = dtplan.parallelize(copies[rank], mesh_of(tp=2))
        for module in sharded.modules():
            module.register_forward_hook(lambda _m, _a, out: kinds.add(type(out)) if isinstance(out, Tensor) else None)
        sharded(ids)
        hidden = sharded.model(ids).last_hidden_state
        return gap(sharded.lm_head(hidden), model(ids).logits)

    assert max(simulated_ranks(2, on_rank)) < 1e-6
    assert kinds == {Tensor}


class KernelNorm(modeling_llama.LlamaRMSNorm):
    """A norm whose kernel reads raw pointers, so it takes nothing but plain tensors (B70)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        assert type(hidden_states) is Tensor, type(hidden_states)
        assert type(self.weight) in (Tensor, nn.Parameter), type(self.weight)
        assert hidden_states.is_contiguous()
        return super().forward(hidden_states)


def test_b70_a_kernel_gets_plain_local_tensors() -> None:
    config = llama()
    model, data = build(config), batch(config)
    for module in model.modules():
        if type(module) is modeling_llama.LlamaRMSNorm:
            module.__class__ = KernelNorm
    truth = outcome(copy.deepcopy(model), data)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> dict[str, float]:
        return errors(outcome(dtplan.parallelize(copies[rank], mesh_of(tp=2), sequence_parallel=True), data), truth)

    for found in simulated_ranks(2, on_rank):
        assert max(found.values()) <= BOUND


@pytest.mark.parametrize("axes", [{"tp": 2}, {"shard": 2}, {"shard": 2, "tp": 1}], ids=["tp2", "shard2", "shard2-tp1"])
def test_b71_generation_as_the_first_call_gives_the_same_tokens(axes: dict[str, int]) -> None:
    config = t0(use_cache=True, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    model, prompt = model_of(config), ids_of(config, rows=1, length=4)
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    wanted = model.generate(prompt, **options)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> Tensor:
        return dtplan.parallelize(copies[rank], mesh_of(**axes)).generate(prompt, **options)

    for tokens in simulated_ranks(2, on_rank):
        assert torch.equal(tokens, wanted)


@pytest.mark.parametrize("chunk", [None, 2], ids=["", "chunks"])
def test_b100_a_static_cache_has_the_kv_heads_of_its_rank(chunk: int | None) -> None:
    """Made at the first key; transformers makes it beforehand for prompts in chunks, from the config's heads."""
    config = t0(use_cache=True, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    model, prompt = model_of(config), ids_of(config, rows=1, length=4)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    wanted = model.generate(prompt, **options).sequences
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> tuple[Tensor, int]:
        sharded = dtplan.parallelize(copies[rank], mesh_of(tp=2))
        found = sharded.generate(prompt, cache_implementation="static", prefill_chunk_size=chunk, **options)
        return found.sequences, found.past_key_values.layers[0].keys.shape[1]

    for tokens, heads in simulated_ranks(2, on_rank):
        assert torch.equal(tokens, wanted)
        assert heads == 1


def _compiled_generation_on_rank(rank: int) -> tuple[int, Tensor, Tensor]:
    config = t0(use_cache=True, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    model, prompt = model_of(config), ids_of(config, rows=1, length=4)
    options = {"max_new_tokens": 4, "do_sample": False}
    wanted = model.generate(prompt, **options)
    how: Any = CompileConfig(backend="eager", fullgraph=True)
    how.mode = None  # those there are belong to inductor
    how._compile_all_devices = True  # transformers leaves a CPU's forward as it is otherwise
    sharded = dtplan.parallelize(model, mesh_of(tp=2))
    found = sharded.generate(prompt, cache_implementation="static", compile_config=how, **options)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], found, wanted


def test_b100_compiled_generation_takes_one_graph_and_gives_the_same_tokens(pool: GlooPool) -> None:
    for graphs, found, wanted in pool.run(_compiled_generation_on_rank, ranks=2, timeout_s=200):
        assert graphs == 1
        assert torch.equal(found, wanted)


# --- Mesh shapes and accumulation ---


def test_b104_fsdp_without_an_axis_for_it_is_refused() -> None:
    copies = [model_of(t0()) for _ in range(2)]

    def on_rank(rank: int) -> str:
        with pytest.raises(DegreesError) as caught:
            dtplan.parallelize(copies[rank], mesh_of(tp=2), mixed_precision="bf16")
        return str(caught.value)

    first, second = simulated_ranks(2, on_rank)
    assert first == second
    assert "mixed precision and CPU offload need a `shard` axis, of size 1 if nothing is to be sharded" in first


def _init_on_rank(rank: int, config: dict[str, int]) -> tuple[dict[str, int], int, int, int]:
    state = dtplan.init(config)
    sizes = {axis: state.mesh[axis].size() for axis in state.mesh.mesh_dim_names or ()}
    dtplan.reset()
    return sizes, state.dp_rank, state.dp_size, state.tp_rank


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, {"replicate": 2, "shard": 1, "tp": 2}),
        ({"tensor_parallel_degree": 2}, {"replicate": 1, "shard": 2, "tp": 2}),
        ({"tensor_parallel_degree": 1, "hybrid_shard_degree": 2}, {"replicate": 2, "shard": 2, "tp": 1}),
        ({}, {"replicate": 1, "shard": 4, "tp": 1}),
    ],
    ids=["b105-replicas", "largest-shard", "hybrid", "default"],
)
def test_b105_init_makes_a_mesh_of_all_ranks(pool: GlooPool, config: dict[str, int], sizes: dict[str, int]) -> None:
    found = pool.run(_init_on_rank, config)
    tp = sizes["tp"]
    assert found == [(sizes, rank // tp, 4 // tp, rank % tp) for rank in range(4)]


@pytest.mark.parametrize("axes", [{"shard": 2, "tp": 1}, {"tp": 1}], ids=["shard2-tp1", "tp1"])
def test_b106_a_tp_axis_of_size_1_works_and_keeps_every_name(axes: dict[str, int]) -> None:
    config = neox()
    model, data = build(config), batch(config)
    truth = outcome(copy.deepcopy(model), data)
    ranks = axes.get("shard", 1)
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def on_rank(rank: int) -> tuple[dict[str, float], list[str]]:
        sharded = dtplan.parallelize(copies[rank], mesh_of(**axes), sequence_parallel=True, loss_parallel=True)
        return errors(outcome(sharded, data), truth), list(sharded.state_dict())

    for found, names in simulated_ranks(ranks, on_rank):
        assert max(found.values()) <= BOUND
        assert names == list(model.state_dict())


def _accumulated_on_rank(rank: int) -> tuple[float, dict[str, int]]:
    """Two micro-batches, gradients synchronised on the last one only."""
    config = llama()
    data = batch(config, rows=4)
    data["labels"] = data["input_ids"].clone()
    model = build(config)
    truth = outcome(copy.deepcopy(model), data)
    sharded = dtplan.parallelize(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp")))
    half = rank // 2 * 2
    with CollectiveCounter() as counter:
        for row in (half, half + 1):
            sharded.set_requires_gradient_sync(row == half + 1)
            part = {key: value[row : row + 1] for key, value in data.items()}
            with float64_casts():
                loss = causal_lm_loss(sharded(part["input_ids"]).logits, part["labels"]) / 2
                loss.backward()
    grads = {name: whole(p.grad) for name, p in sharded.named_parameters()}
    worst = max(relative_error(grads[n], g) for n, g in truth.grads.items())
    return worst, dict(counter.counts)


def test_b107_accumulation_reduces_once_a_step(pool: GlooPool) -> None:
    units = 3  # two layers and the root
    for worst, counts in pool.run(_accumulated_on_rank):
        assert worst <= BOUND
        assert counts["reduce_scatter"] == units, counts


# --- Others that apply refuses ---


def test_a_second_call_is_refused_and_so_is_what_cannot_work_on_shards() -> None:
    copies = [model_of(t0()) for _ in range(2)]

    def on_rank(rank: int) -> None:
        sharded = dtplan.parallelize(copies[rank], mesh_of(tp=2))
        with pytest.raises(ApplyError, match="parallelized already"):
            dtplan.parallelize(sharded, mesh_of(tp=2))
        with pytest.raises(ApplyError, match=r"save_pretrained does not work on a sharded model: call dtplan\.save"):
            sharded.save_pretrained("nowhere")
        with pytest.raises(ApplyError, match="resize before"):  # B38
            sharded.resize_token_embeddings(36)
        with pytest.raises(ApplyError, match="not parallelized"):
            dtplan.applied(model_of(t0(), meta=True))

    simulated_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"dp": 2}, "the mesh has the axes dp; the axes are replicate, shard, tp, in this order"),
        ({"tp": 1, "shard": 2}, "the mesh has the axes tp, shard; the axes are replicate, shard, tp, in this order"),
    ],
)
def test_a_mesh_with_other_axes_is_refused(axes: dict[str, int], text: str) -> None:
    copies = [on_meta(llama()) for _ in range(2)]

    def on_rank(rank: int) -> None:
        with pytest.raises(DegreesError, match=text):
            dtplan.parallelize(copies[rank], mesh_of(**axes))
        with pytest.raises(DegreesError, match="no axis names"):
            dtplan.parallelize(copies[rank], init_device_mesh("cpu", (2,)))

    simulated_ranks(2, on_rank)


def test_live_and_meta_models_bind_alike_and_binding_is_deterministic() -> None:
    for config in (llama(tie_word_embeddings=True), neox()):
        live, meta = build(config, dtype=torch.float32), on_meta(config)
        texts = {dtplan.bind(model, tp=2, sequence_parallel=True).json_text() for model in (live, meta, live)}
        assert len(texts) == 1
