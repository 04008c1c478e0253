"""The cases of fused layers and FP8, by id, on the stand-in of TransformerEngine's interface."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan.plan.read import parse_plan
from dtplan.prove.oracle import BOUND, errors, outcome
from dtplan.prove.simulated import simulated_ranks
from dtplan.te.choose import choose
from dtplan.weights.load import load_checkpoint
from tests import te_standin
from tests.families import build as build_family
from tests.families import plan_file
from tests.models import batch, build, llama


def wide(**changes: Any) -> Any:
    """Widths that FP8 accepts at tp 2, and the attention that TransformerEngine's takes the place of."""
    return llama(attn_implementation="sdpa", head_dim=16, **changes)


def mesh(**axes: int) -> Any:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@pytest.mark.parametrize("axes", [{"tp": 2}, {"shard": 2, "tp": 2}], ids=str)
def test_b42_gradients_of_fused_norms_are_summed_under_sequence_parallelism(standin, axes):
    config = wide()
    model, data = build(config), batch(config)
    truth = outcome(copy.deepcopy(model), data)
    ranks = torch.Size(axes.values()).numel()
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def on_rank(rank: int) -> dict[str, float]:
        sharded = dtplan.parallelize(copies[rank], mesh(**axes), te="require", sequence_parallel=True)
        return errors(outcome(sharded, data), truth)

    for found in simulated_ranks(ranks, on_rank):
        norms = {name: error for name, error in found.items() if "norm" in name}
        assert len(norms) == 5  # two in each of two layers, and the last
        assert max(norms.values()) <= BOUND


def test_b44_a_batch_that_fp8_cannot_cut_is_told_with_the_multiple_that_is_needed(standin):
    config = wide()
    models = [build(config) for _ in range(2)]

    def on_rank(rank: int) -> str:
        sharded = dtplan.parallelize(models[rank], mesh(tp=2), fp8="current", sequence_parallel=True)
        sharded(input_ids=torch.zeros(1, 16, dtype=torch.long))
        with pytest.raises(dtplan.ApplyError) as caught:
            sharded(input_ids=torch.zeros(1, 24, dtype=torch.long))
        return str(caught.value)

    first, second = simulated_ranks(2, on_rank)
    assert first == second
    assert "[1, 24] tokens leaves 12 to each of 2 ranks" in first
    assert "multiple of 16 tokens" in first


def test_b46_the_gradient_norm_counts_what_is_whole_once(standin):
    """By placements and not by flags: norms and row biases are whole."""
    config = wide(mlp_bias=True)
    model, data = build(config), batch(config)
    reference = copy.deepcopy(model)
    outcome(reference, data)
    truth = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> float:
        sharded = dtplan.parallelize(copies[rank], mesh(tp=2), te="auto", sequence_parallel=True)
        outcome(sharded, data)
        return float(dtplan.clip_grad_norm_(sharded, 1.0))

    for found in simulated_ranks(2, on_rank):
        assert abs(found - float(truth)) <= 1e-12 * float(truth)


def test_b69_layers_are_swapped_before_they_are_sharded_and_never_after(standin):
    model = build(wide())

    def on_rank(rank: int) -> None:
        dtplan.parallelize(model, mesh(tp=1), te="off")
        with pytest.raises(dtplan.ApplyError, match="parallelized already"):
            dtplan.parallelize(model, mesh(tp=1), te="require")

    simulated_ranks(1, on_rank)


def test_b94_fp8_reduces_its_maxima_over_all_ranks(standin):
    """Tensor and data parallel together."""
    config = wide()
    models = [build(config) for _ in range(4)]

    def on_rank(rank: int) -> None:
        sharded = dtplan.parallelize(models[rank], mesh(shard=2, tp=2), fp8="delayed", sequence_parallel=True)
        sharded(input_ids=batch(config)["input_ids"])

    simulated_ranks(4, on_rank)
    assert len(te_standin.ENTERED) == 4
    for recipe, group in te_standin.ENTERED:
        assert type(recipe).__name__ == "DelayedScaling"
        assert recipe.reduce_amax
        assert group is not None
        assert group.size() == 4


def test_b95_a_norm_over_all_heads_that_is_cut_is_not_swapped(standin):
    text = plan_file("olmo2").read_text(encoding="utf-8")
    plan = parse_plan(text.partition("te:")[0] + "te: {model.layers.*: [{layer: RMSNorm, norm: self_attn.q_norm}]}\n")
    model = build_family("olmo2")
    choice = choose(model, dtplan.bind(model, plan, tp=2))
    assert choice.fused == ()
    assert [kept.reason for kept in choice.kept] == [
        "q_norm is cut over ranks: TransformerEngine norms what one rank holds"
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
def test_b96_a_row_parallel_bias_is_added_once(standin, sequence_parallel):
    """After the sum over ranks, which is the fused layer's own; its gradient is the unsharded one."""
    config = wide(attention_bias=True, mlp_bias=True)
    model: nn.Module = build(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.bias", "down_proj.bias")):
                parameter.fill_(3.0)
    data = batch(config)
    truth = outcome(copy.deepcopy(model), data)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> dict[str, float]:
        sharded = dtplan.parallelize(copies[rank], mesh(tp=2), te="require", sequence_parallel=sequence_parallel)
        return errors(outcome(sharded, data), truth)

    for found in simulated_ranks(2, on_rank):
        assert {name for name in found if name.endswith("_proj.bias")} >= {
            f"grad model.layers.{layer}.{name}.bias"
            for layer in (0, 1)
            for name in ("self_attn.o_proj", "mlp.down_proj")
        }
        assert max(found.values()) <= BOUND


# --- FP8 ---


class BlockFp8(nn.Linear):
    """A weight in FP8 with a scale for each block of 128 x 128, as checkpoints have them."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        self.weight = nn.Parameter(self.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(width // 128, width // 128), requires_grad=False)


@pytest.mark.parametrize(
    "rule",
    [
        "mlp.down_proj: {style: rowwise, unit: ffn, output: residual}",
        "mlp.down_proj: {style: rowwise, unit: ffn, output: residual, like: Linear, grad: complete}",
        "mlp.down_proj.weight: {shard: 1}",
    ],
)
def test_b102_a_weight_whose_scales_are_by_blocks_is_not_cut(rule):
    """At tp 4 a rank would hold 64 of 256 columns, half of a block."""
    model = build(llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1), dtype=torch.float32)
    model.model.layers[0].mlp.down_proj = BlockFp8(256)
    plan = parse_plan(f"dtplan: 1\nextends: llama\nrules:\n  model.layers.*.{rule}\n")
    with pytest.raises(dtplan.BindError, match=r"DTP404 .*down_proj.weight: FP8 weights are not cut") as caught:
        dtplan.bind(model, plan, tp=4)
    assert "dequantise it as the model is loaded" in str(caught.value)


@pytest.mark.parametrize("strict", [True, False])
def test_b102_a_file_with_such_a_weight_is_refused_by_its_name(strict, tmp_path):
    config, name = llama(hidden_size=256, num_hidden_layers=1), "model.layers.0.self_attn.o_proj.weight"
    model = build(config, dtype=torch.float32)
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    scales = {f"{name}_scale_inv": torch.ones(2, 2)}
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn), **scales}, tmp_path / "model.safetensors")
    with pytest.raises(dtplan.WeightsError, match="dequantise the file first") as caught:
        load_checkpoint(model, tmp_path, strict=strict)
    assert name in str(caught.value)


def test_b102_dims_that_block_fp8_cannot_multiply_are_told_by_name(standin):
    """Scales of a run are made from what a rank holds, so its part alone must fit."""
    models = [build(llama(attn_implementation="sdpa", num_key_value_heads=2)) for _ in range(2)]

    def on_rank(rank: int) -> str:
        with pytest.raises(dtplan.ApplyError) as caught:
            dtplan.parallelize(models[rank], mesh(tp=2), te="require", fp8="block")
        return str(caught.value)

    for text in simulated_ranks(2, on_rank):
        assert "FP8 needs multiples of 16" in text
