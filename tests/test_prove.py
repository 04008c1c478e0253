"""`dtplan prove`: built-in plans are proved on shrunken models, wrong plans are refuted with the cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result

from dtplan.cli import cli
from dtplan.plan.read import load_plan, parse_plan
from dtplan.plan.spec import Plan
from dtplan.prove.live import live_model, refuse_unfit
from dtplan.prove.oracle import BOUND
from dtplan.prove.proof import prove, prove_model
from dtplan.prove.result import Finding, Leg, Proof
from dtplan.prove.shrink import CannotProveError
from dtplan.prove.tell import as_text
from tests.families import CONFIGS

WRONG = Path(__file__).parent / "plans" / "wrong"
LLAMA_7B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
LLAMA_70B = {
    **LLAMA_7B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
NEOX_20B: dict[str, Any] = {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
}
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
    "use_cache": False,
}
EAGER_EXPERTS: dict[str, Any] = {"experts_implementation": "eager"}
"""The grouped kernel has no float64."""
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**TINY)),
    "llama-untied-head": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    ),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**TINY, head_dim=8)),
    "neox": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**TINY)),
    "phi3": (
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config(**{**TINY, "num_key_value_heads": 4}, pad_token_id=0, eos_token_id=2),
    ),
    "olmo2": (transformers.Olmo2ForCausalLM, CONFIGS["olmo2"]()),
    "starcoder": (transformers.GPTBigCodeForCausalLM, CONFIGS["gpt_bigcode"]()),
    "deepseek": (transformers.DeepseekV3ForCausalLM, CONFIGS["deepseek_v3"]()),
    "gpt-oss": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig(
            **TINY,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            pad_token_id=0,
            **EAGER_EXPERTS,
        ),
    ),
}


def config_file(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return str(file)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["prove", *args])


def proof_of(plan: Plan, model: str, *legs: Leg) -> Proof:
    cls, config = MODELS[model]
    return prove_model(lambda: live_model(cls, config, 0), plan, given=plan.name, model=model, legs=legs)


def assert_proved(proof: Proof, *, legs: int) -> None:
    assert [str(result.leg) for result in proof.legs if result.verdict != "proved"] == []
    assert len(proof.legs) == legs
    for result in proof.legs:
        assert result.steps == 3
        assert result.largest_error is not None
        assert 0 < result.largest_error <= BOUND  # 0 would mean that nothing was sharded, or nothing compared


# ------------------------------------------------------------------------------------------- right plans are proved


def test_llama_7b(tmp_path: Path) -> None:
    found = run("llama", "--model", config_file(tmp_path, LLAMA_7B), "--tp", "2,4,8")
    assert found.exit_code == 0, found.output
    assert "proved: 12 of 12 legs, on this shrunken model" in found.output
    assert "num_attention_heads 32 -> 16" in found.output
    assert "ok      tp 8, sequence_parallel, loss_parallel  (8 simulated ranks" in found.output


def test_llama_70b(tmp_path: Path) -> None:
    """64 heads on 8 kv heads stay 64 on 8: nothing smaller is divided by 8 alike."""
    proof = prove("llama", config_file(tmp_path, LLAMA_70B), tp=[8], sequence_parallel="on")
    assert_proved(proof, legs=2)
    assert not {choice.field for choice in proof.choices} & {"num_attention_heads", "num_key_value_heads"}
    assert {result.tensors for result in proof.legs} == {2 + 21 + 21}  # logits and loss, gradients, parameters


def test_neox_20b(tmp_path: Path) -> None:
    assert_proved(prove("gpt_neox", config_file(tmp_path, NEOX_20B), tp=[2, 4, 8]), legs=12)


def test_fsdp_around_it_and_real_processes(tmp_path: Path) -> None:
    found = run("--model", config_file(tmp_path, LLAMA_7B), "--sequence-parallel", "on", "--fsdp", "--json")
    assert found.exit_code == 0, found.output
    data = json.loads(found.output)
    assert data["verdict"] == "proved"
    assert [(leg["mesh"], leg["leg"]["world"], leg["ranks"]) for leg in data["legs"]] == [
        ({"tp": 2}, "simulated ranks", 2),
        ({"tp": 2}, "simulated ranks", 2),
        ({"shard": 2, "tp": 2}, "simulated ranks", 4),
        ({"replicate": 2, "shard": 2, "tp": 2}, "simulated ranks", 8),
        ({"shard": 2, "tp": 2}, "gloo processes", 4),
    ]
    assert data["dtype"] == "float64"
    assert data["bound"] == BOUND
    assert data["digest"] == load_plan("llama").digest
    assert data["versions"]["torch"] == torch.__version__


def test_an_ungrouped_plan_is_proved() -> None:
    """It costs more collectives, and its numbers are right."""
    plan = parse_plan(
        "dtplan: 1\nextends: llama\nrules:\n  model.layers.*.self_attn: {input: residual}\n"
        "  model.layers.*.mlp: {input: keep}\n"
    )
    assert_proved(proof_of(plan, "llama", Leg(tp=2)), legs=1)


@pytest.mark.parametrize(("plan", "name"), [("llama", "llama"), ("gpt_neox", "neox")])
def test_a_stream_that_is_cut_along_the_batch_is_proved(plan: str, name: str) -> None:
    rows = parse_plan(f"dtplan: 1\nextends: {plan}\nresidual: {{sequence_parallel: S(0)}}\n")
    legs = [Leg(tp=2, sequence_parallel=True, loss_parallel=loss_parallel) for loss_parallel in (False, True)]
    assert_proved(proof_of(rows, name, *legs), legs=2)


def test_a_key_s_bias_has_no_gradient_and_is_not_taken_for_an_error() -> None:
    """It moves all scores of a query alike; what autograd gives is rounding, without a relative error."""
    plan = parse_plan(
        "dtplan: 1\nunits: {ffn: ffn_dim}\nrules:\n"
        "  model.decoder.{embed_tokens,embed_positions,final_layer_norm}: {style: replicate, grad: complete}\n"
        "  model.decoder.layers.*:\n"
        "    self_attn.{q,k,v,out}_proj: {style: replicate, grad: complete}\n"
        '    "{self_attn,final}_layer_norm": {style: replicate, grad: complete}\n'
        "    fc1: {style: colwise, unit: ffn}\n"
        "    fc2: {style: rowwise, unit: ffn}\n"
        "  lm_head: {style: replicate, grad: complete}\n"
    )
    config = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        dropout=0.0,
    )
    proof = prove_model(
        lambda: live_model(transformers.OPTForCausalLM, config, 0), plan, given="opt", model="opt", legs=[Leg(tp=2)]
    )
    assert_proved(proof, legs=1)
    assert proof.zero_gradients == tuple(f"model.decoder.layers.{i}.self_attn.k_proj.bias" for i in range(2))


# ---------------------------------------------------------------------------------- wrong plans are refuted, with why

SEQUENCE = Leg(tp=2, sequence_parallel=True)
PROVED = "with this, the leg is proved"
EXPECTED: dict[str, tuple[Leg, str, str, str, str]] = {
    # file: (leg, name, kind, a part of the advice, what a run with the advice gave)
    "qwen3-norms-not-summed": (
        Leg(tp=2),
        "model.layers.1.self_attn.k_norm.weight",
        "partial sum",
        "write `grad: sum`",
        PROVED,
    ),
    "qwen3-without-norms": (Leg(tp=2), "DTP403", "refused by bind", "to keep it whole on every rank", ""),
    "neox-norms-not-summed": (
        Leg(tp=2),
        "gpt_neox.layers.1.post_attention_layernorm.weight",
        "partial sum",
        "write `grad: sum`",
        PROVED,
    ),
    "neox-qkv-as-three-parts": (
        Leg(tp=2),
        "gpt_neox.layers.0.attention.dense",
        "no sum fits",
        "write `unit: head`; of 96 rows rank 0 then holds 0-47, not 0-15 and 32-47 and 64-79",
        PROVED,
    ),
    "llama-norm-on-shards": (
        SEQUENCE,
        "model.layers.1.post_attention_layernorm.weight",
        "partial sum",
        "write `grad: sum`",
        PROVED,
    ),
    "llama-rowwise-left-partial": (
        Leg(tp=2),
        "model.layers.0.post_attention_layernorm",
        "no sum fits",
        "`model.layers.0.self_attn.o_proj`",
        PROVED,
    ),
    "llama-input-not-summed": (
        Leg(tp=2),
        "model.layers.0.mlp.down_proj.weight",
        "contaminated",
        "`model.layers.1.self_attn.q_proj`",
        PROVED,
    ),
    "llama-one-input-not-summed": (
        Leg(tp=2),
        "model.layers.1.input_layernorm.weight",
        "contaminated",
        "`model.layers.1.self_attn.q_proj`",
        PROVED,
    ),
    "llama-whole-key": (
        Leg(tp=2),
        "model.layers.0.self_attn",
        "crash",
        "write `style: colwise, unit: kv_head`",
        PROVED,
    ),
    "llama-wrong-heads": (
        Leg(tp=2),
        "model.layers.0.self_attn.o_proj",
        "no sum fits",
        "k_proj` (llama-wrong-heads.yaml:8:3): write `style: colwise, unit: kv_head`",
        PROVED,
    ),
    "llama-untied-head": (Leg(tp=2), "DTP409", "refused by bind", "both ends", ""),
    "gpt-oss-bias-in-the-sum": (Leg(tp=2), "model.layers.0.mlp.experts", "no sum fits", "once: true", PROVED),
    "olmo2-norm-of-own-heads": (
        Leg(tp=2),
        "model.layers.0.self_attn.q_norm",
        "no sum fits",
        "write `style: sharded_norm`",
        PROVED,
    ),
    "starcoder-kv-not-summed": (
        Leg(tp=2),
        "transformer.h.1.attn.c_attn.weight",
        "partial sum",
        "write `grad: sum` in the section that is whole",
        PROVED,
    ),
    "deepseek-rope-key-not-summed": (
        Leg(tp=2),
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "contaminated",
        "`output: {sum_grad_of_last: FIELD}`",
        "",
    ),
    "phi3-gate-up-in-one-piece": (
        Leg(tp=2),
        "model.layers.0.mlp.down_proj",
        "no sum fits",
        "write `sections: [ffn, ffn]`; of 128 rows rank 0 then holds 0-31 and 64-95, not 0-63",
        PROVED,
    ),
    "phi3-qkv-in-one-piece": (
        Leg(tp=2),
        "model.layers.0.self_attn",
        "crash",
        "write `localize: [num_key_value_heads, config.num_attention_heads]`",
        PROVED,
    ),
}


def first_finding(proof: Proof) -> Finding:
    assert proof.verdict == "refuted"
    return proof.legs[0].findings[0]


def test_every_wrong_plan_has_its_diagnosis() -> None:
    assert {path.stem for path in WRONG.glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("file", EXPECTED)
def test_a_wrong_plan_is_refuted_with_its_cause(file: str) -> None:
    leg, name, kind, advice, tried = EXPECTED[file]
    model = next(key for key in sorted(MODELS, key=len, reverse=True) if file.startswith(key))
    proof = proof_of(load_plan(WRONG / f"{file}.yaml"), model, leg)
    found = first_finding(proof)
    assert (found.name, found.kind) == (name, kind)
    assert advice in found.advice.replace(f"{WRONG}/", "")
    assert found.tried == tried
    if kind not in {"refused by bind", "crash"}:
        assert proof.legs[0].wrong


def test_the_rule_of_a_finding_is_the_wrong_line() -> None:
    proof = proof_of(load_plan(WRONG / "qwen3-norms-not-summed.yaml"), "qwen3", Leg(tp=2))
    found = first_finding(proof)
    text = (WRONG / "qwen3-norms-not-summed.yaml").read_text(encoding="utf-8").splitlines()
    line = next(i for i, row in enumerate(text, 1) if "grad: complete" in row)
    assert found.rule.endswith(f"qwen3-norms-not-summed.yaml:{line}:3")
    assert len(proof.legs[0].findings) == 1  # four parameters, one rule


def test_only_the_switch_that_is_wrong_is_refuted() -> None:
    proof = proof_of(load_plan(WRONG / "llama-norm-on-shards.yaml"), "llama", Leg(tp=2), SEQUENCE)
    assert [result.verdict for result in proof.legs] == ["proved", "refuted"]
    assert proof.exit_code == 1


def test_a_gradient_summed_though_whole_is_counted_tp_times() -> None:
    plan = parse_plan("dtplan: 1\nextends: llama\nrules:\n  model.norm: {style: norm, grad: sum}\n")
    found = first_finding(proof_of(plan, "llama", Leg(tp=2)))
    assert (found.name, found.kind) == ("model.norm.weight", "counted n times")
    assert "2 times" in found.says
    assert "grad: complete" in found.advice


def test_two_kv_heads_at_tp_4_are_refused_by_bind_as_for_the_real_model(tmp_path: Path) -> None:
    file = config_file(tmp_path, {**LLAMA_7B, "num_key_value_heads": 2})
    found = run("llama", "--model", file, "--tp", "2,4", "--sequence-parallel", "off")
    assert found.exit_code == 1
    assert "DTP405: refused by bind" in found.output
    assert "kv_head = 2 (num_key_value_heads) allows 1, 2" in found.output
    assert "refuted: 2 of 4 legs; 2 proved, 0 not run" in found.output
    assert f"again: dtplan prove llama --model {file} --tp 2,4 --sequence-parallel off --seed 0" in found.output


def test_a_replay_tells_the_same(tmp_path: Path) -> None:
    """The command that a failure prints, run as it stands."""
    plan = str(WRONG / "llama-rowwise-left-partial.yaml")
    args = (plan, "--model", config_file(tmp_path, LLAMA_7B), "--sequence-parallel", "off", "--seed", "5", "--json")
    first = json.loads(run(*args).output)
    command = first["replay"].split()
    assert command[:2] == ["dtplan", "prove"]
    again = json.loads(run(*command[2:], "--json").output)
    assert again["legs"][0]["wrong"] == first["legs"][0]["wrong"]
    assert again["seed"] == 5


# --------------------------------------------------------------------------------------- what cannot be run says so


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "does not run on token ids alone"),
        (
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            "refuses its shrunken config (ValueError: embed_dim must be divisible by num_heads",
        ),
    ],
)
def test_a_model_that_needs_more_than_tokens_exits_with_2(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("dtplan: 1\nrules:\n  lm_head: {style: colwise, output: logits}\n")
    found = run(str(plan), "--model", config_file(tmp_path, config))
    assert isinstance(found.exception, CannotProveError)
    assert text in str(found.exception)
    assert found.exception.exit_code == 2


def test_a_model_that_is_large_even_when_shrunken_is_not_built() -> None:
    with pytest.raises(CannotProveError, match=r"6,738,415,616 parameters even when shrunken"):
        refuse_unfit(transformers.LlamaForCausalLM, transformers.LlamaConfig())


def test_a_nested_config_is_proved_where_tokens_are_enough(tmp_path: Path) -> None:
    """Nothing is claimed of the vision tower, which takes no part."""
    vision = {"model_type": "clip_vision_model", "hidden_size": 1024, "num_attention_heads": 16, "image_size": 336}
    text = {**LLAMA_7B, "vocab_size": 32064}
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    file = config_file(tmp_path, {**config, "text_config": text, "vision_config": vision})
    proof = prove(WRONG.parent / "llava.yaml", file, tp=[2], sequence_parallel="on")
    assert_proved(proof, legs=2)
    used = {choice.field: choice.used for choice in proof.choices}
    assert used["text_config.num_attention_heads"] == 4
    assert used["vision_config.hidden_size"] < 1024
    assert proof.idle
    assert all("vision_tower" in name or "projector" in name for name in proof.idle)
    assert f"{len(proof.idle)} parameters take no part on tokens alone" in as_text(proof)


def test_an_old_torch_exits_with_2_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    found = run("llama", "--model", config_file(tmp_path, LLAMA_7B))
    assert isinstance(found.exception, CannotProveError)
    assert "needs torch 2.11 or newer, this is 2.9.1+cpu" in str(found.exception)
    assert found.exception.exit_code == 2


def test_degrees_that_are_none_are_misuse(tmp_path: Path) -> None:
    for text in ("two", "2,,4", "0", "-2"):
        assert run("llama", "--model", config_file(tmp_path, LLAMA_7B), "--tp", text).exit_code == 2
