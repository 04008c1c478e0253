"""The silent cases that a plan, or a model against its plan, can cause: each is planted here and found.

Found means refused by binding, with the code, or refuted by numbers, with the module, what the ranks hold and what to
write. `docs/prove.md` lists the silent cases that no plan can cause, and where they are tested.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaForCausalLM

from dtplan.plan.read import load_plan, parse_plan
from dtplan.plan.spec import Plan
from dtplan.prove.live import live_model, randomized
from dtplan.prove.proof import prove_model
from dtplan.prove.result import Finding, Leg, Proof
from tests.cases import P0, plan_with, t0
from tests.families import build, plan_file
from tests.models import build as build_model
from tests.models import neox

PROVED = "with this, the leg is proved"
SEQUENCE = Leg(tp=2, sequence_parallel=True)


def proof_of(make: Callable[[], nn.Module], plan: Plan, leg: Leg = Leg(tp=2)) -> Proof:  # noqa: B008 - it is frozen
    return prove_model(make, plan, given=plan.name, model="", legs=[leg])


def first(proof: Proof) -> Finding:
    assert proof.verdict == "refuted"
    return proof.legs[0].findings[0]


def refusals(make: Callable[[], nn.Module], plan: Plan, leg: Leg = Leg(tp=2)) -> list[str]:  # noqa: B008 - it is frozen
    """Codes with which binding refuses; nothing ran."""
    proof = proof_of(make, plan, leg)
    assert {found.kind for found in proof.legs[0].findings} == {"refused by bind"}
    assert proof.exit_code == 1
    return [found.name for found in proof.legs[0].findings]


def assert_silent(proof: Proof) -> None:
    """Every number was there, and some were wrong: without a proof nobody would have seen it."""
    (result,) = proof.legs
    assert result.largest_error is not None
    assert result.largest_error > 1e-3
    assert result.wrong


def of_t0(**changes: Any) -> Callable[[], nn.Module]:
    return lambda: live_model(LlamaForCausalLM, t0(**changes), 0)


def family(name: str) -> Callable[[], nn.Module]:
    return lambda: build(name)


def changed(name: str, *replaced: tuple[str, str]) -> Plan:
    text = plan_file(name).read_text(encoding="utf-8")
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return parse_plan(text, f"{name}.yaml")


def without(plan: Plan, pattern: str) -> Plan:
    kept = tuple(rule for rule in plan.rules if rule.pattern != pattern)
    assert len(kept) == len(plan.rules) - 1
    return dataclasses.replace(plan, rules=kept)


# --- Plan keys and coverage ---


def test_b01_a_rule_that_names_nothing() -> None:
    plan = plan_with(P0, **{"self_attn.q_proj": "self_attn.q_porj"})
    assert refusals(of_t0(), plan) == ["DTP403", "DTP401"]  # q_proj without a rule, q_porj without a module


def test_b02_a_plan_that_shards_nothing() -> None:
    plan = plan_with(P0)
    rules = tuple(dataclasses.replace(rule, style="replicate", unit=None) for rule in plan.rules)
    assert refusals(of_t0(), dataclasses.replace(plan, rules=rules)) == ["DTP410"]


def test_b05_an_overlay_keeps_the_rules_of_its_base(tmp_path: Path) -> None:
    base = plan_with(P0)
    assert refusals(of_t0(), without(base, "lm_head")) == ["DTP403"]
    (tmp_path / "base.yaml").write_text(P0.replace("  lm_head: replicate\n", ""))
    (tmp_path / "overlay.yaml").write_text(
        "dtplan: 1\nextends: base.yaml\nunits: {vocab: vocab_size}\n"
        "rules:\n  lm_head: {style: colwise, unit: vocab, output: logits}\n"
    )
    plan = load_plan(tmp_path / "overlay.yaml")
    assert {Path(rule.at.file).name for rule in plan.rules} == {"base.yaml", "overlay.yaml"}
    assert proof_of(of_t0(), plan).verdict == "proved"


def test_b06_a_tied_embedding_by_another_name() -> None:
    plan = parse_plan("dtplan: 1\nextends: gpt_neox\nrules:\n  gpt_neox.embed_in: replicate\n")
    make = lambda: build_model(neox(num_hidden_layers=1, tie_word_embeddings=True))  # noqa: E731
    assert refusals(make, plan) == ["DTP409"]
    assert proof_of(make, load_plan("gpt_neox")).verdict == "proved"


def test_b10_a_wrapper_without_the_head_s_rule() -> None:
    llava = load_plan(plan_file("llava"))
    assert refusals(family("llava"), without(llava, "lm_head")) == ["DTP403"]
    proof = proof_of(family("llava"), llava)
    assert proof.verdict == "proved"
    assert len(proof.idle) > 30  # the images' part is not spoken of


# --- Head counts, GQA and per-head parameters ---


GPT_NEO = """
dtplan: 1
units: {head: num_heads, ffn: intermediate_size}
rules:
  "transformer.{wte,wpe}": replicate
  transformer.h.*:
    "ln_{1,2}": norm
    attn.attention: {localize: [num_heads]}
    "attn.attention.{q,k,v}_proj": {style: colwise, unit: head}
    attn.attention.out_proj: {style: rowwise, unit: head}
    mlp.c_fc: {style: colwise, unit: ffn}
    mlp.c_proj: {style: rowwise, unit: ffn}
  transformer.ln_f: norm
  lm_head: replicate
"""


def test_b17_a_forward_that_reshapes_with_the_heads_of_the_whole() -> None:
    """GPT-Neo's takes them from `num_heads`. GPT-J's does no longer; its plan is proved with the families'."""
    config = GPTNeoConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        attention_types=[[["global"], 1]],
        max_position_embeddings=16,
        use_cache=False,
    )
    config._attn_implementation = "eager"

    def make() -> nn.Module:
        return live_model(GPTNeoForCausalLM, config, 0)

    assert proof_of(make, plan_with(GPT_NEO)).verdict == "proved"
    found = first(proof_of(make, plan_with(GPT_NEO, **{"{localize: [num_heads]}": "replicate"})))
    assert found.name == "transformer.h.0.attn.attention"
    assert "shape '[4, 16, 4, 8]' is invalid" in found.says
    assert "write `localize: [num_heads]`" in found.advice
    assert found.tried == PROVED


def test_b18_every_rank_takes_the_slopes_of_the_first_heads() -> None:
    """The slopes are [batch x heads]: cut as one they are those of the first sequences, not of the rank's heads."""
    proof = proof_of(family("bloom"), changed("bloom", ("to: S(0), unit: head}", "to: S(0)}")))
    assert_silent(proof)
    found = first(proof)
    assert found.name == "transformer.h.0.self_attention.dense"
    assert "`transformer.h.*.self_attention` (bloom.yaml:18:5): write `unit: head` for its input alibi" in found.advice
    assert found.tried == PROVED


def test_b19_a_norm_of_kv_heads_at_a_degree_that_does_not_divide_them() -> None:
    plan = changed("olmo2", ("indivisible: uneven", "indivisible: error"))
    assert refusals(family("olmo2"), plan, Leg(tp=4)) == ["DTP405"]


# --- Fused projections ---


class Fused(nn.Module):
    """Attention that stores q, k and v in one matrix, in one of three orders; its sizes are those of its input."""

    def __init__(self, config: Any, order: Literal["parts", "heads", "groups"]) -> None:
        super().__init__()
        self.order, self.head_dim = order, 8
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [batch, sequence, heads, head_dim], of the rank's own heads."""
        shared = self.heads // self.kv_heads
        if self.order == "parts":
            heads = x.unflatten(-1, (-1, self.head_dim))
            kv = heads.shape[-2] // (shared + 2)
            q, k, v = heads.split([shared * kv, kv, kv], -2)
            return q, k, v
        groups = x.unflatten(-1, (-1, shared + 2, self.head_dim))
        q, k, v = groups.split([shared, 1, 1], -2)
        return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        q, k, v = (part.transpose(1, 2) for part in self.parts(self.qkv(hidden_states)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2)), None


def fused(order: Literal["parts", "heads", "groups"]) -> Callable[[], nn.Module]:
    config = t0(num_key_value_heads=4 if order == "heads" else 2)

    def make() -> nn.Module:
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            layer.self_attn = Fused(config, order)
        double: nn.Module = model.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in double.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)
        return double

    return make


def fused_plan(layout: str) -> Plan:
    """P0 with one rule for q, k and v."""
    before, after = P0.split("  model.layers.*.self_attn.q_proj", 1)[0], P0[P0.index("  model.layers.*.self_attn.o") :]
    if "kv_head" not in layout:
        before = before.replace("kv_head: num_key_value_heads, ", "")  # a unit that nothing uses is refused
    return parse_plan(f"{before}  model.layers.*.self_attn.qkv: {{style: colwise, {layout}}}\n{after}", "fused.yaml")


LAYOUTS: dict[str, tuple[Literal["parts", "heads", "groups"], str, str]] = {
    # id: (order in the model, what the plan says, what is advised)
    "b21-b22-b24, parts in one piece": ("parts", "unit: kv_head", "sections: [head, kv_head, kv_head]"),
    "b24, parts in another order": (
        "parts",
        "sections: [kv_head, kv_head, head]",
        "sections: [head, kv_head, kv_head]",
    ),
    "b24, heads taken for parts": ("heads", "sections: [head, head, head]", "unit: head"),
    "b24-b25, groups taken for parts": ("groups", "sections: [head, kv_head, kv_head]", "unit: kv_head"),
    "b25, groups split at their midpoint": ("groups", "sections: [kv_head, kv_head]", "unit: kv_head"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_b21_b22_b24_b25_a_fused_weight_cut_in_another_order(case: str) -> None:
    order, said, right = LAYOUTS[case]
    proof = proof_of(fused(order), fused_plan(said))
    assert_silent(proof)
    found = first(proof)
    assert (found.name, found.kind) == ("model.layers.0.self_attn.o_proj", "no sum fits")
    assert f"write `{right}`; of" in found.advice
    assert found.tried == PROVED
    assert proof_of(fused(order), fused_plan(right)).verdict == "proved"


def test_b21_gate_and_up_of_phi_3_in_one_piece() -> None:
    proof = proof_of(family("phi3"), changed("phi3", ("sections: [ffn, ffn]", "unit: ffn")))
    assert_silent(proof)
    assert "write `sections: [ffn, ffn]`; of 128 rows rank 0 then holds 0-31 and 64-95, not 0-63" in first(proof).advice
    assert first(proof).tried == PROVED


def test_b25_gate_and_up_that_alternate_are_split_at_their_midpoint() -> None:
    proof = proof_of(
        family("gpt_oss"), changed("gpt_oss", ("{shard: 2, unit: ffn}", "{shard: 2, sections: [ffn, ffn]}"))
    )
    assert_silent(proof)
    assert "experts.gate_up_proj` (gpt_oss.yaml:28:5): write `unit: ffn`" in first(proof).advice
    assert first(proof).tried == PROVED


class Gated(nn.Module):
    """Values under two gates a head, whose rows lie together by kv head: b and a of the first, of the second, ..."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.shared = config.num_attention_heads // config.num_key_value_heads
        self.in_proj_ba = nn.Linear(config.hidden_size, 2 * config.num_attention_heads, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        groups = self.in_proj_ba(hidden_states).unflatten(-1, (-1, 2 * self.shared))
        b, a = (gate.flatten(-2).unsqueeze(-1) for gate in groups.split(self.shared, -1))
        values = self.v_proj(hidden_states).unflatten(-1, (b.shape[-2], -1))
        return self.o_proj((values * b.sigmoid() * a.exp()).flatten(-2)), None


def test_b25_gates_grouped_by_kv_head_are_split_at_their_midpoint() -> None:
    """As `in_proj_ba` of a gated delta rule, 4 groups: taken for two halves, ranks get gates of other heads."""
    config = t0(num_attention_heads=8, num_key_value_heads=4)

    def make() -> nn.Module:
        model = LlamaForCausalLM(config)
        model.model.layers[0].self_attn = Gated(config)
        return randomized(model.double(), 0)

    def plan(layout: str) -> Plan:
        after = P0[P0.index("  model.layers.*.self_attn.o") :]
        return parse_plan(
            f"{P0[: P0.index('rules:')]}rules:\n"
            f"  model.layers.*.self_attn.in_proj_ba: {{style: colwise, {layout}}}\n"
            f"  model.layers.*.self_attn.v_proj: {{style: colwise, unit: head}}\n{after}",
            "gated.yaml",
        )

    proof = proof_of(make, plan("sections: [kv_head, kv_head]"))
    assert_silent(proof)
    found = first(proof)
    assert found.name == "model.layers.0.self_attn.o_proj"
    assert "write `unit: kv_head`; of 16 rows rank 0 then holds 0-7, not 0-3 and 8-11" in found.advice
    assert found.tried == PROVED
    assert proof_of(make, plan("unit: kv_head")).verdict == "proved"


# --- Tied embeddings ---


def test_b27_a_head_that_is_cut_while_the_embedding_it_shares_is_whole() -> None:
    plan = plan_with(P0, **{"lm_head: replicate": "lm_head: {style: colwise, output: logits}"})
    assert refusals(of_t0(tie_word_embeddings=True), plan) == ["DTP409"]


# --- Sequence parallelism and whole parameters ---


@pytest.mark.parametrize(
    ("case", "rule", "name"),
    [
        (
            "b42, before the projections",
            "model.layers.*.input_layernorm: {style: norm, grad: complete}",
            "model.layers.0.input_layernorm.weight",
        ),
        (
            "b43, the last",
            "model.norm: {style: norm, grad: complete, output: {to: residual, global_shape: true}}",
            "model.norm.weight",
        ),
    ],
)
def test_b42_b43_a_norm_whose_gradient_is_not_summed(case: str, rule: str, name: str) -> None:
    plan = parse_plan(f"dtplan: 1\nextends: llama\nrules:\n  {rule}\n")
    assert proof_of(of_t0(), plan).verdict == "proved"  # without sequence parallelism it is right
    proof = proof_of(of_t0(), plan, SEQUENCE)
    assert_silent(proof)
    found = first(proof)
    assert (found.name, found.what, found.kind) == (name, "gradient", "partial sum")
    assert (found.advice, found.tried) == ("write `grad: sum` in its rule", PROVED)


def test_b48_norms_of_heads_whose_gradients_are_not_summed() -> None:
    plan = changed("qwen3", ("grad: sum", "grad: complete"))
    proof = proof_of(family("qwen3"), plan)
    assert_silent(proof)
    found = first(proof)
    assert (found.name, found.kind) == ("model.layers.1.self_attn.k_norm.weight", "partial sum")
    assert found.tried == PROVED


def test_b49_a_norm_over_all_heads_that_sees_some() -> None:
    q, k = "self_attn.q_norm:           {style", "self_attn.k_norm:           {style"
    spelled = [(old, old.replace(":           {style", ".weight: {shard")) for old in (q, k)]
    plan = changed("olmo2", *spelled, ("shard: sharded_norm", "shard: 0"))
    proof = proof_of(family("olmo2"), plan)
    assert_silent(proof)
    found = first(proof)
    assert (found.name, found.what) == ("model.layers.0.self_attn.q_norm", "output")
    assert "write `style: sharded_norm`" in found.advice


def test_b50_the_shared_rope_key_sees_the_gradient_of_some_heads() -> None:
    proof = proof_of(
        family("deepseek_v3"), changed("deepseek_v3", (", output: {sum_grad_of_last: qk_rope_head_dim}", ""))
    )
    assert_silent(proof)
    found = first(proof)
    assert (found.name, found.kind) == ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "contaminated")
    assert "sum_grad_of_last" in found.advice


# --- Rowwise bias ---


def test_b96_a_row_parallel_bias_is_added_by_every_rank() -> None:
    """A named style adds it once whatever the plan says; a plan can still spell the cut out, without it."""
    plan = parse_plan(
        "dtplan: 1\nextends: llama\nrules:\n"
        "  model.layers.*.mlp.down_proj: {output: residual, grad: complete}\n"
        "  model.layers.*.mlp.down_proj.weight: {shard: 1, unit: ffn}\n"
        "  model.layers.*.mlp.down_proj.bias: {grad: complete}\n"
    )
    proof = proof_of(of_t0(mlp_bias=True), plan)
    assert_silent(proof)
    found = first(proof)
    assert found.name == "model.layers.0.mlp.down_proj"
    assert "every rank adds `bias` before the sum over ranks: write `once: true` there" in found.advice
    assert found.tried == PROVED


# --- The page ---


def test_every_silent_case_of_the_page_has_a_test_of_its_name() -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "prove.md").read_text().split("## Silent cases")[1]
    tests = re.findall(
        r"^def test_(\w+)", "".join(file.read_text() for file in root.glob("tests/test_*.py")), re.MULTILINE
    )
    named = {word for name in tests for word in name.split("_")}
    assert len(cases := re.findall(r"\bB\d+", page)) > 40
    assert [case for case in cases if case.lower() not in named] == []
