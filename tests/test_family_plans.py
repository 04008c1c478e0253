"""The plan language against the odd families: what it says of them, and that what is applied is exact."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig

import dtplan
from dtplan._errors import BindError
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import check, load_plan, parse_plan
from dtplan.plan.spec import Plan, R
from dtplan.prove.oracle import BOUND, errors, outcome
from dtplan.prove.simulated import simulated_ranks
from tests.families import CONFIGS, FOLDER, VARIANTS, batch, build, on_meta, plan_file


def test_every_plan_has_a_model():
    plans = {path.stem for path in FOLDER.glob("*.yaml")} | builtin_plans().keys()
    assert plans - {"llama", "gpt_neox"} == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_lint_finds_nothing(name):
    assert check(plan_file(name)) == ()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
def test_every_rule_hits_and_every_tensor_is_placed(name, sequence_parallel):
    model = on_meta(name)
    bound = dtplan.bind(model, plan_file(name), tp=2, sequence_parallel=sequence_parallel)
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers()]
    assert sorted(name for _, name, _ in bound.tensors()) == sorted(tensors)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_gradient_are_exact(name, sequence_parallel):
    assert largest_error(name, load_plan(plan_file(name)), sequence_parallel=sequence_parallel) <= BOUND


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_a_plan_is_exact(variant, sequence_parallel):
    name, config = VARIANTS[variant]
    plan = load_plan(plan_file(name))
    assert largest_error(name, plan, config=config(), sequence_parallel=sequence_parallel) <= BOUND


FAULTS = {
    "qwen3, norms of heads not summed": ("qwen3", "grad: sum", "grad: complete"),
    "gpt-oss, bias of experts on every rank": ("gpt_oss", "{once: true}", "{grad: complete}"),
    "gpt-oss, routing weights not summed": ("gpt_oss", ", routing_weights: sum", ""),
    "bloom, heads of the first sequence for all": ("bloom", "to: S(0), unit: head}", "to: S(0)}"),
    "phi-3, gate and up as one": ("phi3", "sections: [ffn, ffn]", "unit: ffn"),
    "phi-3, two parts for three": ("phi3", "[head, kv_head, kv_head]", "[kv_head, head, kv_head]"),
    "gpt-2, q, k and v as one": ("gpt2", "sections: [head, head, head]", "unit: head"),
    "mixtral, gate and up of experts as one": ("mixtral", "sections: [ffn, ffn]", "unit: ffn"),
    "olmo2, norms of the rank's heads": ("olmo2", "_norm:           {style: sharded_norm", "_norm.weight: {shard: 0"),
    "starcoder, k and v not summed": ("gpt_bigcode", "whole: true, grad: sum", "whole: true, grad: complete"),
    "falcon, k and v not summed": ("falcon", "whole: true, grad: sum", "whole: true, grad: complete"),
    "deepseek, rope key not summed": ("deepseek_v3", ", output: {sum_grad_of_last: qk_rope_head_dim}", ""),
    "qwen3-next, gated norm of heads not summed": (
        "qwen3_next",
        "linear_attn.norm:                {style: replicate, grad: sum}",
        "linear_attn.norm:                {style: replicate, grad: complete}",
    ),
    "gpt-j, norm not summed": ("gptj", "{style: norm, grad: sum}", "{style: norm, grad: complete}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_plan_is_not(fault):
    """Each of these rules is needed: without it the comparison above finds an error."""
    name, right, wrong = FAULTS[fault]
    text = plan_file(name).read_text(encoding="utf-8")
    assert right in text
    assert largest_error(name, parse_plan(text.replace(right, wrong))) > 1e-3


def test_gpt_oss_cannot_run_with_whole_sinks():
    text = plan_file("gpt_oss").read_text(encoding="utf-8").replace("{shard: 0, unit: head}", "{grad: sum}")
    with pytest.raises(RuntimeError, match="size"):
        largest_error("gpt_oss", parse_plan(text))


def largest_error(
    name: str, plan: Plan, *, config: PretrainedConfig | None = None, sequence_parallel: bool = False
) -> float:
    """Of logits, loss and all gradients on both ranks, relative to the unsharded model."""
    model = build(name, config)
    data = batch(name, images=not sequence_parallel)  # images are put into whole embeddings
    truth = outcome(copy.deepcopy(model), data)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> dict[str, float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(copies[rank], mesh, plan, sequence_parallel=sequence_parallel)
        return errors(outcome(sharded, data), truth)

    found = simulated_ranks(2, on_rank)
    assert all(len(each) == 2 + len(truth.grads) for each in found)
    # A key's bias moves all scores of a query alike, so its gradient is zero and what is left is rounding.
    zero = {f"grad {name}" for name, grad in truth.grads.items() if grad.abs().max() < 1e-15}
    assert all(name.endswith("k_proj.bias") for name in zero)
    return max(error for each in found for name, error in each.items() if name not in zero)


def test_sections_that_do_not_make_up_the_dim_are_refused():
    text = plan_file("phi3").read_text(encoding="utf-8").replace("[head, kv_head, kv_head]", "[head, head, kv_head]")
    with pytest.raises(BindError, match=r"not made of head 4 \+ head 4 \+ kv_head 2 units") as caught:
        dtplan.bind(on_meta("phi3"), parse_plan(text), tp=2)
    assert [finding.code for finding in caught.value.diagnostics] == ["DTP408"]


def test_gemma_s_embedding_is_a_class_of_its_own():
    """It scales its rows, which `vocab` cannot know; the plan says that it is like an embedding otherwise."""
    text = plan_file("gemma2").read_text(encoding="utf-8").replace("like: Embedding, ", "")
    with pytest.raises(BindError, match="like: Embedding") as caught:
        dtplan.bind(on_meta("gemma2"), parse_plan(text), tp=2)
    assert [finding.code for finding in caught.value.diagnostics] == ["DTP404"]


def test_llava_s_text_is_cut_as_llama_is_and_the_rest_is_whole():
    wrapped = dtplan.bind(on_meta("llava"), plan_file("llava"), tp=2)
    llama = dtplan.bind(on_meta_llama(), "llama", tp=2)
    prefix = "model.language_model."
    text = {name.replace(prefix, "model."): t.placement for _, name, t in wrapped.tensors() if prefix in name}
    text["lm_head.weight"] = next(t.placement for _, name, t in wrapped.tensors() if name == "lm_head.weight")
    assert text == {name: t.placement for _, name, t in llama.tensors()}
    rest = [t.placement for _, name, t in wrapped.tensors() if prefix not in name and name != "lm_head.weight"]
    assert len(rest) > 30
    assert set(rest) == {R}
    assert wrapped.fsdp_units == ("model.language_model.layers.0", "model.language_model.layers.1")


def on_meta_llama() -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(CONFIGS["llava"]().text_config)


def test_plans_fit_on_a_screen():
    lengths = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in Path(FOLDER).glob("*.yaml")}
    assert {name: length for name, length in lengths.items() if length > 60} == {}
