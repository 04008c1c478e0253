"""Repairs that a refutation ran, and the smallest config that fails in the same way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from dtplan.plan.read import load_plan, parse_plan
from dtplan.plan.spec import Plan
from dtplan.prove import edits, repair
from dtplan.prove.live import live_model
from dtplan.prove.proof import prove, prove_model
from dtplan.prove.result import Finding, Leg, Proof, Smallest
from dtplan.prove.smallest import smallest
from dtplan.prove.tell import as_text
from tests.families import build, on_meta, plan_file
from tests.models import build as tiny
from tests.models import llama
from tests.test_prove import LLAMA_7B, LLAMA_70B, PROVED, WRONG, config_file, run


def changed(name: str, *replaced: tuple[str, str]) -> Plan:
    """A family's plan with some text replaced."""
    text = plan_file(name).read_text(encoding="utf-8")
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return parse_plan(text, f"{name}.yaml")


def first_finding(name: str, plan: Plan, *legs: Leg) -> Finding:
    proof = prove_model(lambda: build(name), plan, given=name, model=name, legs=legs or [Leg(tp=2)])
    assert proof.verdict == "refuted"
    return proof.legs[-1].findings[0]


# ---------------------------------------------------------------------------------------------------------- repairs

REPAIRS: dict[str, tuple[str, tuple[tuple[str, str], ...], str]] = {
    # what is wrong: (family, its plan's text right and wrong, advice)
    "parts in another order": (
        "phi3",
        (("[head, kv_head, kv_head]", "[kv_head, head, kv_head]"),),
        (
            "`model.layers.*.self_attn.qkv_proj` (phi3.yaml:20:5): write `sections: [head, kv_head, kv_head]`; of 64 "
            "rows rank 0 then holds 0-15 and 32-39 and 48-55, not 0-7 and 16-31 and 48-55"
        ),
    ),
    "two parts for three": (
        "gpt2",
        (("sections: [head, head, head]", "sections: [head, head]"),),
        (
            "`transformer.h.*.attn.c_attn` (gpt2.yaml:20:5): write `sections: [head, head, head]`; of 96 rows rank 0 "
            "then holds 0-15 and 32-47 and 64-79, not 0-23 and 48-71"
        ),
    ),
    "a parameter of experts in one piece": (
        "mixtral",
        (("sections: [ffn, ffn]", "unit: ffn"),),
        (
            "`model.layers.*.mlp.experts.gate_up_proj` (mixtral.yaml:28:5): write `sections: [ffn, ffn]`; of 128 rows "
            "rank 0 then holds 0-31 and 64-95, not 0-63"
        ),
    ),
    "a size of the whole in attention": (
        "gpt2",
        (("attn:                 {input: R, localize: [split_size]}", "attn: {input: R}"),),
        "`transformer.h.*.attn` (gpt2.yaml:19:5): write `localize: [split_size]`",
    ),
    "a size of the whole in a cut layer": (
        "gpt2",
        (("sections: [head, head, head], localize: [nf]", "sections: [head, head, head]"),),
        "`transformer.h.*.attn.c_attn` (gpt2.yaml:20:5): write `localize: [nf]`",
    ),
}
WHOLE_ATTENTION = """
dtplan: 1
serves: [LlamaForCausalLM]
units: {ffn: intermediate_size, vocab: vocab_size}
residual: {sequence_parallel: S(1)}
rules:
  model.embed_tokens: {style: vocab, unit: vocab, output: {to: residual, global_shape: true}}
  model.rotary_emb:   replicate
  model.layers.*:
    .:                   {input: residual}
    "{input,post_attention}_layernorm": norm
    self_attn:           {style: replicate, below: true}
    mlp:                 {input: R}
    mlp.{gate,up}_proj:  {style: colwise, unit: ffn}
    mlp.down_proj:       {style: rowwise, unit: ffn, output: residual}
  model.norm: {style: norm, output: {to: residual, global_shape: true}}
  lm_head:    {style: colwise, unit: vocab, output: logits}
"""


@pytest.mark.parametrize("wrong", REPAIRS)
def test_what_is_advised_was_run(wrong: str) -> None:
    name, replaced, advice = REPAIRS[wrong]
    found = first_finding(name, changed(name, *replaced))
    assert (found.advice, found.tried) == (advice, PROVED)


def test_what_stays_whole_is_given_the_whole_sequence() -> None:
    """Attention without tp: under sequence parallelism its rule must gather the stream and hand a part back."""
    plan, legs = parse_plan(WHOLE_ATTENTION, "whole.yaml"), [Leg(tp=2), Leg(tp=2, sequence_parallel=True)]
    proof = prove_model(lambda: tiny(llama()), plan, given="whole", model="llama", legs=legs)
    assert [leg.verdict for leg in proof.legs] == ["proved", "refuted"]
    found = proof.legs[1].findings[0]
    told = "`model.layers.*.self_attn` (whole.yaml:12:5): write `style: replicate, input: R, output: residual`"
    assert (found.name, found.advice, found.tried) == ("model.layers.0.self_attn", told, PROVED)
    mended = WHOLE_ATTENTION.replace("below: true}", "below: true, input: R, output: residual}")
    proof = prove_model(
        lambda: tiny(llama()), parse_plan(mended, "whole.yaml"), given="whole", model="llama", legs=legs
    )
    assert proof.verdict == "proved"


def test_advice_that_is_not_all_is_told_as_such() -> None:
    """Both fused weights are wrong: with the first mended, the second is what fails."""
    plan = changed("phi3", ("[head, kv_head, kv_head]", "[kv_head, head, kv_head]"), ("[ffn, ffn]", "[head, head]"))
    swapped = changed(
        "phi3", ("[head, kv_head, kv_head]", "[kv_head, head, kv_head]"), ("sections: [ffn, ffn]", "unit: ffn")
    )
    assert first_finding("phi3", plan).tried == PROVED  # [head, head] cuts the same rows as [ffn, ffn]
    found = first_finding("phi3", swapped)
    assert "sections: [head, kv_head, kv_head]" in found.advice
    told = "with this, this output is right; what is wrong then is model.layers.0.mlp.down_proj (no sum fits)"
    assert found.tried == told


def test_a_leg_that_fails_elsewhere_tries_first_what_helped_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under sequence parallelism the same fault is a crash far from the rule."""
    ran: list[str] = []
    run_it = repair._Bench._run

    def noted(bench: repair._Bench, wanted: repair.Edits) -> Any:
        ran.append("; ".join(map(str, wanted)))
        return run_it(bench, wanted)

    monkeypatch.setattr(repair._Bench, "_run", noted)
    plan = load_plan(WRONG / "llama-rowwise-left-partial.yaml")
    legs = [Leg(tp=2), Leg(tp=2, sequence_parallel=True), Leg(tp=2, loss_parallel=True)]
    proof = prove_model(
        lambda: live_model(transformers.LlamaForCausalLM, llama(), 0), plan, given="", model="", legs=legs
    )
    first, second, _ = (result.findings[0] for result in proof.legs)
    assert (first.kind, second.kind) == ("no sum fits", "crash")
    where = "self_attn.o_proj` (llama-rowwise-left-partial.yaml:6:3)"
    assert f"{where}: write `output: residual`" in second.advice.replace(f"{WRONG}/", "")
    assert [result.findings[0].tried for result in proof.legs] == [PROVED] * 3
    assert ran == ["`output: residual`"] * 3


def test_columns_in_the_order_of_sections_are_not_taken_for_wrong() -> None:
    """What fails is behind them."""
    plan = changed(
        "phi3",
        (
            "self_attn.o_proj:         {style: rowwise, unit: head, output: residual}",
            "self_attn.o_proj: {style: rowwise, unit: head, output: P}",
        ),
    )
    found = first_finding("phi3", plan)
    assert found.name == "model.layers.0.post_attention_layernorm"
    assert found.tried == PROVED


class Scaled(nn.Module):
    """An activation that depends on how many columns it sees, which no plan can mend."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * x.shape[-1]


def test_what_no_layout_mends_is_not_claimed_and_the_tries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "TRIES", 2)

    def make() -> nn.Module:
        model = live_model(transformers.LlamaForCausalLM, llama(num_hidden_layers=1), 0)
        model.get_submodule("model.layers.0.mlp").act_fn = Scaled()
        return model

    proof = prove_model(make, load_plan("llama"), given="llama", model="", legs=[Leg(tp=2)])
    found = proof.legs[0].findings[0]
    assert (found.name, found.kind) == ("model.layers.0.mlp.down_proj", "partial sum")
    assert "depends on how much of it a rank has" in found.advice
    assert found.tried == "still wrong with another layout (2 runs)"


def test_edits_find_the_rule_that_is_written() -> None:
    """Of a variant, under another name of the module, and a new one where a parameter has none of its own."""
    starcoder = load_plan(plan_file("gpt_bigcode"))
    told = edits.rule_of(starcoder, on_meta("gpt_bigcode"), "transformer.h.1.attn.c_attn")
    assert told is not None
    assert told in starcoder.variants[0].rules
    llava, model = load_plan(plan_file("llava")), on_meta("llava")
    mlp = "model.language_model.layers.0.mlp.down_proj"
    once = edits.edited(llava, model, [edits.gradient(mlp, "sum"), edits.added_once(f"{mlp}.bias")])
    rule = edits.rule_of(once, model, mlp)
    assert rule is not None
    assert rule.grad == "sum"
    assert rule.pattern == "model.layers.*.mlp.down_proj"
    new = edits.rule_of(once, model, f"{mlp}.bias")
    assert new is not None
    assert new.once
    assert edits.rule_of(llava, model, f"{mlp}.bias") is None


# ------------------------------------------------------------------------------------------------- the smallest config


def smallest_of(tmp_path: Path, plan: str, config: dict[str, Any], **given: Any) -> tuple[Proof, Smallest]:
    proof = prove(str(WRONG / f"{plan}.yaml"), config_file(tmp_path, config), **given)
    assert proof.smallest is not None
    return proof, proof.smallest


def test_the_smallest_config_fails_in_the_same_way_and_its_command_replays_it(tmp_path: Path) -> None:
    proof, small = smallest_of(
        tmp_path, "llama-rowwise-left-partial", LLAMA_7B, tp=[2, 4], sequence_parallel="off", loss_parallel="off"
    )
    assert str(small.leg) == "tp 2"
    assert small.batch == (1, 4)
    used = {choice.field: choice.used for choice in small.choices}
    assert (used["num_hidden_layers"], used["num_attention_heads"], used["hidden_size"]) == (1, 2, 8)
    first = proof.legs[0].findings[0]
    assert (small.finding.kind, small.finding.rule) == (first.kind, first.rule)
    assert f"again: {small.replay}  # plan {proof.digest[:12]}" in as_text(proof)

    command = small.replay.split()
    assert command[:2] == ["dtplan", "prove"]
    again = json.loads(run(*command[2:], "--json").output)
    assert [leg["leg"]["loss_parallel"] for leg in again["legs"]] == [False]
    assert (again["batch"], again["smallest"]) == ([1, 4], None)
    (found,) = again["legs"][0]["findings"]
    assert (found["name"], found["kind"], found["says"]) == (
        small.finding.name,
        small.finding.kind,
        small.finding.says,
    )
    assert {choice["field"]: choice["used"] for choice in again["choices"]} == used


def test_what_the_failure_needs_is_kept(tmp_path: Path) -> None:
    """Queries meet the heads of others only where several share one."""
    _, small = smallest_of(tmp_path, "llama-wrong-heads", LLAMA_70B, tp=[2], sequence_parallel="off")
    used = {choice.field: choice.used for choice in small.choices}
    assert used["num_key_value_heads"] == 2
    assert used["num_attention_heads"] > 2
    assert used["num_hidden_layers"] == 1


def test_a_smaller_config_that_fails_in_another_way_is_not_taken() -> None:
    failed = Finding(name="a", what="output", kind="partial sum", says="", rule="plan.yaml:1:1")

    def fails(config: Any, _batch: tuple[int, int]) -> Finding:
        return dataclasses.replace(failed, kind="crash" if config.num_attention_heads < 4 else "partial sum")

    small = smallest(llama(), (4, 16), 1, 2, failed, fails)
    assert small is not None
    assert small.changes["num_hidden_layers"] == 1
    assert "num_attention_heads" not in small.changes
    assert small.changes["intermediate_size"] == 4


def test_nothing_smaller_is_looked_for_where_nothing_ran_or_it_is_not_wanted(tmp_path: Path) -> None:
    refused = prove(WRONG / "llama-untied-head.yaml", config_file(tmp_path, {**LLAMA_7B, "tie_word_embeddings": True}))
    assert (refused.verdict, refused.smallest) == ("refuted", None)
    file = config_file(tmp_path, LLAMA_7B)
    args = (str(WRONG / "llama-whole-key.yaml"), "--model", file, "--sequence-parallel", "off", "--no-smallest")
    found = run(*args)
    assert found.exit_code == 1
    assert "smallest" not in found.output


@pytest.mark.parametrize(
    "option", [["--batch", "4"], ["--batch", "0x4"], ["--set", "num_hidden_layers"], ["--set", "a=b c"]]
)
def test_options_that_say_nothing_are_misuse(tmp_path: Path, option: list[str]) -> None:
    found = run("llama", "--model", config_file(tmp_path, LLAMA_7B), *option)
    assert found.exit_code == 2
    assert option[1] in found.output
