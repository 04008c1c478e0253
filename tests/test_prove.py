"""`dtplan prove`: built-in plans are proved on shrunken models, wrong plans are refuted with the cause."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result

from dtplan.cli import cli
from dtplan.plan.read import load_plan, parse_plan
from dtplan.plan.spec import Plan, S
from dtplan.prove.held import held
from dtplan.prove.oracle import BOUND
from dtplan.prove.proof import legs_of, prove, prove_model
from dtplan.prove.result import Finding, Leg, Proof
from dtplan.prove.shrink import CannotProveError, live_model, shrink, token_batch

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
    "olmo2": (transformers.Olmo2ForCausalLM, transformers.Olmo2Config(**TINY, pad_token_id=0)),
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
EXPECTED: dict[str, tuple[Leg, str, str, str]] = {
    # file: (leg, name, kind, a part of the advice)
    "qwen3-norms-not-summed": (
        Leg(tp=2),
        "model.layers.1.self_attn.k_norm.weight",
        "partial sum",
        "write `grad: sum`",
    ),
    "qwen3-without-norms": (Leg(tp=2), "DTP403", "refused by bind", "to keep it whole on every rank"),
    "neox-norms-not-summed": (
        Leg(tp=2),
        "gpt_neox.layers.1.post_attention_layernorm.weight",
        "partial sum",
        "write `grad: sum`",
    ),
    "llama-norm-on-shards": (
        SEQUENCE,
        "model.layers.1.post_attention_layernorm.weight",
        "partial sum",
        "write `grad: sum`",
    ),
    "llama-rowwise-left-partial": (
        Leg(tp=2),
        "model.layers.0.post_attention_layernorm",
        "no sum fits",
        "`model.layers.0.self_attn.o_proj`",
    ),
    "llama-input-not-summed": (
        Leg(tp=2),
        "model.layers.0.mlp.down_proj.weight",
        "contaminated",
        "`model.layers.1.self_attn.q_proj`",
    ),
    "llama-one-input-not-summed": (
        Leg(tp=2),
        "model.layers.1.input_layernorm.weight",
        "contaminated",
        "`model.layers.1.self_attn.q_proj`",
    ),
    "llama-whole-key": (Leg(tp=2), "model.layers.0.self_attn", "crash", "size of the whole"),
    "llama-untied-head": (Leg(tp=2), "DTP409", "refused by bind", "both ends"),
    "gpt-oss-bias-in-the-sum": (Leg(tp=2), "model.layers.0.mlp.experts", "no sum fits", "once: true"),
    "phi3-gate-up-in-one-piece": (Leg(tp=2), "model.layers.0.mlp.down_proj", "no sum fits", "order of fused parts"),
    "phi3-qkv-in-one-piece": (Leg(tp=2), "model.layers.0.self_attn", "crash", "size of the whole"),
}


def first_finding(proof: Proof) -> Finding:
    assert proof.verdict == "refuted"
    return proof.legs[0].findings[0]


def test_every_wrong_plan_has_its_diagnosis() -> None:
    assert {path.stem for path in WRONG.glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("file", EXPECTED)
def test_a_wrong_plan_is_refuted_with_its_cause(file: str) -> None:
    leg, name, kind, advice = EXPECTED[file]
    model = next(key for key in sorted(MODELS, key=len, reverse=True) if file.startswith(key))
    proof = proof_of(load_plan(WRONG / f"{file}.yaml"), model, leg)
    found = first_finding(proof)
    assert (found.name, found.kind) == (name, kind)
    assert advice in found.advice
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
        ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}, "has no `num_attention_heads`"),
    ],
)
def test_a_model_that_needs_more_than_tokens_exits_with_2(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("dtplan: 1\nrules:\n  lm_head: {style: colwise, output: logits}\n")
    found = run(str(plan), "--model", config_file(tmp_path, config))
    assert isinstance(found.exception, CannotProveError)
    assert text in str(found.exception)
    assert found.exception.exit_code == 2


def test_an_old_torch_exits_with_2_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    found = run("llama", "--model", config_file(tmp_path, LLAMA_7B))
    assert isinstance(found.exception, CannotProveError)
    assert "needs torch 2.11 or newer, this is 2.9.1+cpu" in str(found.exception)
    assert found.exception.exit_code == 2


def test_what_parallelize_cannot_do_yet_is_not_run() -> None:
    proof = proof_of(load_plan(WRONG.parent / "olmo2.yaml"), "olmo2", Leg(tp=2))
    assert (proof.verdict, proof.exit_code) == ("not run", 2)
    assert "style sharded_norm" in proof.legs[0].reason


def test_degrees_that_are_none_are_misuse(tmp_path: Path) -> None:
    for text in ("two", "2,,4", "0", "-2"):
        assert run("llama", "--model", config_file(tmp_path, LLAMA_7B), "--tp", text).exit_code == 2


# -------------------------------------------------------------------------------------------------------- the parts


@pytest.mark.parametrize("degrees", [[2], [2, 4, 8], [3, 5], [16]])
@pytest.mark.parametrize("config", [LLAMA_7B, LLAMA_70B, NEOX_20B], ids=["7b", "70b", "20b"])
def test_a_shrunken_config_is_divided_by_the_same_degrees(config: dict[str, Any], degrees: list[int]) -> None:
    given = {key: value for key, value in config.items() if key != "model_type"}
    real = transformers.AutoConfig.for_model(config["model_type"], **given)
    small, choices = shrink(real, degrees)
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if (count := getattr(real, field, None)) is not None:
            used = getattr(small, field)
            assert [used % d == 0 for d in degrees] == [count % d == 0 for d in degrees], field
            assert used <= count
    if hasattr(real, "num_key_value_heads"):
        ratio = real.num_attention_heads / real.num_key_value_heads
        assert small.num_attention_heads / small.num_key_value_heads == ratio
    told = {choice.field: choice.used for choice in choices}
    assert told == {field: getattr(small, field) for field in told}
    assert told["num_hidden_layers"] == 2


def test_every_kind_of_layer_is_kept() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    real = transformers.Qwen3NextConfig(layer_types=kinds * 3, num_hidden_layers=12)
    small, _ = shrink(real, [2])
    assert small.layer_types == ["linear_attention", "full_attention"]
    dense_first = transformers.DeepseekV3Config(num_hidden_layers=8, first_k_dense_replace=3)
    assert shrink(dense_first, [2])[0].first_k_dense_replace == 1
    assert shrink(dense_first, [2])[0].num_hidden_layers == 2


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTJConfig(),
        transformers.GPT2Config(),
        transformers.BloomConfig(n_head=16),
        transformers.Gemma2Config(),
        transformers.MixtralConfig(),
        transformers.DeepseekV3Config(),
    ],
    ids=lambda config: config.model_type,
)
def test_other_families_run_once_shrunken(config: Any) -> None:
    small, choices = shrink(config, [2, 4])
    assert {"hidden_size", "n_embd"} & {choice.field for choice in choices}
    model = live_model(transformers.AutoModelForCausalLM.from_config(small).__class__, small, 0)
    assert sum(p.numel() for p in model.parameters()) < 10_000_000
    batch = token_batch(small, rows=1, length=8, seed=0)
    loss = model(**batch, use_cache=False).loss
    assert torch.isfinite(loss)


def test_live_models_are_float64_random_everywhere_and_made_by_the_seed() -> None:
    cls, config = MODELS["llama"]
    one, same, other = (live_model(cls, config, seed) for seed in (1, 1, 2))
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert a.dtype == torch.float64
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert a.std() > 0.1
    rows = token_batch(config, rows=4, length=8, seed=0)["labels"]
    assert set((rows != -100).sum(1).tolist()) == {5}  # means of parts add up


def test_legs() -> None:
    assert [str(leg) for leg in legs_of([4, 2, 2], "off")] == [
        "tp 2",
        "tp 2, loss_parallel",
        "tp 4",
        "tp 4, loss_parallel",
    ]
    assert len(legs_of([2], "both")) == 4
    assert str(legs_of([2], "on", fsdp=True)[-1]) == "shard 2 x tp 2, sequence_parallel"


TRUTH = torch.arange(1.0, 25.0, dtype=torch.float64).reshape(4, 6)
NOISE = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([TRUTH, TRUTH], "right"),
        ([NOISE, TRUTH - NOISE], "partial sum"),
        ([2 * TRUTH, 2 * TRUTH], "counted n times"),
        ([TRUTH / 2, TRUTH / 4], "no sum fits"),
        ([TRUTH, NOISE], "ranks disagree"),
        ([NOISE, NOISE + 1], "no sum fits"),
        ([TRUTH, None], "missing"),
        ([TRUTH[:2], TRUTH[2:]], "right"),
        ([TRUTH[:, :1], TRUTH[:, 1:]], "right"),
        ([TRUTH[2:], TRUTH[:2]], "another shard"),
        ([TRUTH[[0, 2]], TRUTH[[1, 3]]], "another shard"),
        ([2 * TRUTH[:2], 2 * TRUTH[2:]], "counted n times"),
        ([TRUTH[:2], NOISE[2:]], "ranks disagree"),
        ([TRUTH[:2], TRUTH[3:]], "wrong shape"),
    ],
)
def test_what_ranks_hold(parts: list[torch.Tensor | None], kind: str) -> None:
    assert held(parts, TRUTH, None, blocks=4).kind == kind


def test_another_order_of_heads_is_spelled() -> None:
    found = held([TRUTH[[0, 2]], TRUTH[[1, 3]]], TRUTH, S(0), blocks=4)
    assert "block i of 4 along dim 0 is [0, 2, 1, 3][i]" in found.says


def test_models_are_not_touched_by_a_proof() -> None:
    cls, config = MODELS["llama"]
    model = live_model(cls, config, 0)
    before = copy.deepcopy(model.state_dict())
    prove_model(lambda: model, load_plan("llama"), given="llama", model="llama", legs=[Leg(tp=2)])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
