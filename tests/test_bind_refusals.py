"""What binding refuses beside the cases: each finding has its code, its place and a next step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtplan
from dtplan import BindError
from tests.models import llama, neox, on_meta

EXTENDS = "dtplan: 1\nextends: llama\n"


@pytest.mark.parametrize(
    ("text", "code", "says", "advises"),
    [
        (
            EXTENDS + "units: {head: num_atention_heads}\n",
            "DTP406",
            "unit `head` is counted by `num_atention_heads`, and the model's config (LlamaConfig) has no positive",
            "name the config field",
        ),
        (
            EXTENDS + "rules: {model.layers.*.self_attn: {input: {hiden_states: R}}}\n",
            "DTP412",
            "forward has no argument `hiden_states`",
            "did you mean 'hidden_states'?",
        ),
        (
            EXTENDS + "rules: {model.layers.*.mlp: {input: {7: R}}}\n",
            "DTP412",
            "forward has 1 arguments, none at position 7",
            "",
        ),
        (
            EXTENDS + "rules: {model.layers.*.self_attn: {input: R, localize: [head_dimension]}}\n",
            "DTP412",
            "`localize: head_dimension` needs a whole number that 2 divides, it is None",
            "",
        ),
        (
            EXTENDS + "rules: {model.layers.*.self_attn: {input: R, reads: [k_prj]}}\n",
            "DTP412",
            "`reads: k_prj` names no module below it",
            "did you mean 'k_proj'?",
        ),
        (
            EXTENDS
            + "rules: {model.layers.*.self_attn.q_proj: {style: replicate, output: {sum_grad_of_last: rope}}}\n",
            "DTP412",
            "`sum_grad_of_last: rope` is no number of features: the config has None there",
            "name the config field",
        ),
        (
            EXTENDS + "rules: {model.layers.*.mlp.act_fn: {style: sharded_norm, unit: ffn}}\n",
            "DTP404",
            "`sharded_norm` is for an RMSNorm or LayerNorm over its last dim",
            "keep what it norms whole",
        ),
        (
            EXTENDS + "fsdp: {units: [model.layer.*]}\n",
            "DTP413",
            "the FSDP unit `model.layer.*` names nothing",
            "model.layers.*",
        ),
        (
            EXTENDS + "rules: {model.layers.*.mlp: {input: {x: {from: P, to: S(1)}}}}\n",
            "DTP414",
            "no operation leads from P to S(1) here",
            "say where the value comes from",
        ),
        (
            EXTENDS + "rules: {model.layers.*.self_attn.q_proj: {style: colwise, unit: vocab}}\n",
            "DTP408",
            "is not a whole number of 30 vocab units",
            "vocab is counted by `vocab_size`: is it the unit of this dim?",
        ),
        (
            EXTENDS + "rules: {model.layers.*.input_layernorm: {style: norm, override: true}, "
            "'model.layers.*.*': {style: norm, override: true, optional: true}}\n",
            "DTP301",
            "names what",
            "keep one",
        ),
    ],
    ids=[
        "406",
        "412-name",
        "412-position",
        "412-attribute",
        "412-reads",
        "412-field",
        "404-norm",
        "413",
        "414",
        "408",
        "301",
    ],
)
def test_each_refusal_has_its_code_place_and_next_step(text: str, code: str, says: str, advises: str) -> None:
    model = on_meta(llama(vocab_size=30))
    with pytest.raises((BindError, dtplan.PlanError)) as caught:
        dtplan.bind(model, dtplan.parse_plan(text, "mine.yaml"), tp=2)
    found = [finding for finding in caught.value.diagnostics if finding.code == code]
    assert found, str(caught.value)
    assert says in found[0].message
    assert advises in found[0].hint
    assert found[0].line > 0


def test_all_refusals_come_in_one_run() -> None:
    plan = dtplan.parse_plan(
        EXTENDS + "rules:\n  model.layers.*.mlp.up_porj: colwise\n  lm_haed: colwise\nfsdp: {units: [model.layer.*]}\n"
    )
    with pytest.raises(BindError) as caught:
        dtplan.bind(on_meta(llama(num_attention_heads=6, hidden_size=48, num_key_value_heads=3)), plan, tp=2)
    assert sorted(finding.code for finding in caught.value.diagnostics) == ["DTP401", "DTP401", "DTP405", "DTP413"]


def test_a_subclass_of_a_linear_is_not_taken_for_one() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return super().forward(input) * 2

    model = on_meta(llama())
    model.model.layers[0].mlp.up_proj.__class__ = Scaled
    with pytest.raises(BindError) as caught:
        dtplan.bind(model, tp=2)
    (finding,) = caught.value.diagnostics
    assert finding.code == "DTP404"
    assert "model.layers.0.mlp.up_proj is a" in finding.message
    assert "Scaled" in finding.message


def test_a_norm_of_a_parallel_residual_must_sum_its_gradient() -> None:
    text = (
        "dtplan: 1\nextends: gpt_neox\nvariants:\n  - when: {use_parallel_residual: true}\n    rules:\n"
        "      gpt_neox.layers.*.input_layernorm: {style: norm, override: true}\n"
    )
    with pytest.raises(BindError, match="DTP415"):
        dtplan.bind(on_meta(neox()), dtplan.parse_plan(text), tp=2)


def test_a_frozen_parameter_among_cut_ones_has_no_gradient_to_ask_for() -> None:
    """Ernie's routers have a bias that training does not move."""
    rule = "dtplan: 1\nextends: llama\nrules:\n  model.layers.*.self_attn.k_proj: {style: replicate, override: true}\n"
    model = on_meta(llama())
    with pytest.raises(BindError, match="DTP415"):
        dtplan.bind(model, dtplan.parse_plan(rule), tp=2)
    for layer in model.model.layers:
        layer.self_attn.k_proj.requires_grad_(False)
    dtplan.bind(model, dtplan.parse_plan(rule), tp=2)


def test_replicate_keeps_a_region_whole_and_exact_where_the_degree_does_not_divide() -> None:
    """SmolLM2's 9 heads and 3 kv heads at tp 2: attention stays whole, the MLP is cut."""
    import copy

    from torch.distributed.device_mesh import init_device_mesh

    from dtplan.prove.oracle import BOUND, errors, outcome
    from dtplan.prove.simulated import simulated_ranks
    from tests.models import batch, build

    plan = dtplan.parse_plan(
        EXTENDS + "units:\n  head: {field: num_attention_heads, indivisible: replicate}\n"
        "  kv_head: {field: num_key_value_heads, indivisible: replicate}\n"
    )
    config = llama(num_attention_heads=9, num_key_value_heads=3, hidden_size=36)
    model, data = build(config), batch(config)
    truth = outcome(copy.deepcopy(model), data)
    for sequence_parallel in (False, True):
        copies = [copy.deepcopy(model) for _ in range(2)]

        def on_rank(
            rank: int, copies=copies, sequence_parallel=sequence_parallel
        ) -> tuple[dict[str, float], list[int]]:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            sharded = dtplan.parallelize(copies[rank], mesh, plan, sequence_parallel=sequence_parallel)
            layer = sharded.model.layers[0]
            rows = [m.weight.to_local().shape[0] for m in (layer.self_attn.q_proj, layer.mlp.up_proj)]
            return errors(outcome(sharded, data), truth), rows

        for found, rows in simulated_ranks(2, on_rank):
            assert rows == [36, 32]
            wrong = {name: error for name, error in found.items() if not error <= BOUND}
            assert not wrong


def test_a_rule_on_a_row_parallel_bias_leaves_it_added_once() -> None:
    plan = dtplan.parse_plan(EXTENDS + "rules:\n  model.layers.*.self_attn.o_proj.bias: {grad: complete}\n")
    bound = dtplan.bind(on_meta(llama(attention_bias=True)), plan, tp=2)
    placed = {name: tensor for _, name, tensor in bound.tensors()}
    assert placed["model.layers.0.self_attn.o_proj.bias"].once
