"""Cases under *Plan keys and coverage*, *Head counts* and *Tied embeddings*: what binding refuses and makes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaForCausalLM, LlamaModel

import dtplan
from dtplan import BindError
from dtplan.author.importers import ImportPlanError, from_hf
from dtplan.author.importers.hf import MODULE_STYLES
from dtplan.prove.oracle import BOUND, errors, outcome, whole
from dtplan.prove.simulated import simulated_ranks
from tests.cases import P0, ids_of, model_of, plan_with, t0
from tests.models import batch, build, llama, neox, on_meta


def refusal(model: nn.Module, plan: str | dtplan.Plan, tp: int = 2) -> list[tuple[str, str]]:
    """Code and text of every finding of a binding that must fail."""
    with pytest.raises(BindError) as caught:
        dtplan.bind(model, plan, tp=tp)
    return [(finding.code, finding.render()) for finding in caught.value.diagnostics]


# --- Plan keys and coverage ---


def test_b01_a_key_that_names_nothing_is_refused_before_anything_changes() -> None:
    model = model_of(t0())
    before = {name: (id(p), type(p)) for name, p in model.named_parameters()}
    found = refusal(model, plan_with(P0, **{"self_attn.q_proj": "self_attn.q_porj"}))
    dead = [text for code, text in found if code == "DTP401"]
    assert len(dead) == 1
    assert "model.layers.*.self_attn.q_porj" in dead[0]
    assert "did you mean 'model.layers.*.self_attn.q_proj'?" in dead[0]
    assert "case.yaml:5:3" in dead[0]
    assert {name: (id(p), type(p)) for name, p in model.named_parameters()} == before


def test_b02_a_plan_that_shards_nothing_is_refused_at_tp_2_and_fine_at_tp_1() -> None:
    model = model_of(t0(), meta=True)
    text = "\n".join(
        ["dtplan: 1", "rules:"]
        + [
            f"  {name}: replicate"
            for name, m in model.named_modules()
            if [*m.parameters(recurse=False), *m.buffers(recurse=False)]
        ]
    )
    plan = dtplan.parse_plan(text)
    assert [code for code, _ in refusal(model, plan)] == ["DTP410"]
    assert dtplan.bind(model, plan, tp=1).tp == 1


class RenamedForCausalLM(LlamaForCausalLM):
    """Remote code: a class that no plan knows."""


def test_b03_an_unknown_class_gets_no_guessed_plan() -> None:
    with torch.device("meta"):
        model = RenamedForCausalLM(t0())
    ((code, text),) = refusal(model, "auto")
    assert code == "DTP407"
    assert "RenamedForCausalLM" in text
    for way in ("plan=<built-in name>", "plan=<path of a YAML plan>", "dtplan.load_plan"):
        assert way in text
    assert dtplan.bind(model, "auto", tp=1).fsdp_units == ("model.layers.0",)
    assert dtplan.bind(model, "llama", tp=2).plan == "llama"


def test_b03_at_tp_1_a_model_without_a_plan_is_wrapped_by_fsdp_alone() -> None:
    config = llama()
    data = batch(config)
    model = build(config)
    model.__class__ = RenamedForCausalLM
    truth = outcome(copy.deepcopy(model), data)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> dict[str, float]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
        return errors(outcome(dtplan.parallelize(copies[rank], mesh), data), truth)

    for found in simulated_ranks(2, on_rank):
        assert max(found.values()) <= BOUND


def test_b06_a_tied_embedding_is_found_whatever_its_name() -> None:
    """The rest of B06, equal logits, is `neox-tied-uneven` in test_exact.py."""
    bound = dtplan.bind(on_meta(neox(tie_word_embeddings=True)), tp=2)
    assert bound.ties == (("gpt_neox.embed_in.weight", "lm_head.weight"),)
    placed = {name: tensor for _, name, tensor in bound.tensors()}
    assert placed["lm_head.weight"].tied_to == "gpt_neox.embed_in.weight"
    assert placed["lm_head.weight"].placement == placed["gpt_neox.embed_in.weight"].placement


def test_b07_uncovered_linears_are_listed_with_their_bytes_and_replicate_silences() -> None:
    model = model_of(t0(num_hidden_layers=4), meta=True)
    for layer in list(model.model.layers)[:3]:
        layer.linear_attn = nn.Linear(32, 48, bias=False, device="meta")
    found = refusal(model, plan_with(P0))
    assert [code for code, _ in found] == ["DTP403"]
    assert "model.layers.{0..2}.linear_attn" in found[0][1]
    assert f"{3 * 32 * 48 * 4:,} bytes" in found[0][1]
    silenced = plan_with(P0 + "  model.layers.*.linear_attn: replicate\n")
    assert dtplan.bind(model, silenced, tp=2).tp == 2


def test_b08_show_gives_bytes_per_rank_before_any_weight_is_read() -> None:
    bound = dtplan.bind(model_of(t0(), meta=True), tp=2)
    model = model_of(t0())
    whole = sum(p.numel() * 4 for p in model.parameters())
    norms = 3 * 32 * 4
    assert bound.parameter_bytes() == (whole, (whole - norms) // 2 + norms)


class Wrapper(nn.Module):
    """A multimodal wrapper: the text model lies under a prefix."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config
        self.text = LlamaForCausalLM(config)  # type: ignore[arg-type]

    def forward(self, **inputs: Tensor) -> object:
        return self.text(**inputs)


def test_b09_one_style_that_nobody_knows_is_told_by_name_and_laid_over() -> None:
    """Of a tied model, whose plan is its own to give: the source stays as it is."""
    model = on_meta(llama(tie_word_embeddings=True))
    given = {**model._tp_plan, "lm_head": "colwise_of_next_year"}
    model._tp_plan = dict(given)
    with pytest.raises(ImportPlanError) as caught:
        from_hf(model)
    text = str(caught.value)
    assert "`lm_head` has the style 'colwise_of_next_year'" in text
    assert all(style in text for style in MODULE_STYLES)
    assert "to replace that rule alone, give another: {'lm_head': STYLE}" in text
    rules = {rule.path: rule.keys for rule in from_hf(model, {"lm_head": "colwise_gather_output"}).draft.rules}
    assert rules["lm_head"]["output"] == "gather"
    assert rules["model.layers.*.self_attn.q_proj"]["style"] == "colwise"
    assert model._tp_plan == given


def test_b10_one_plan_serves_a_model_under_a_prefix() -> None:
    with torch.device("meta"):
        wrapped = Wrapper(t0())
    plan = dtplan.parse_plan(
        "dtplan: 1\nextends: llama\nserves: [Wrapper]\nnames: {model: [text.model], lm_head: [text.lm_head]}\n"
    )
    alone = dtplan.bind(model_of(t0(), meta=True), tp=2)
    under = dtplan.bind(wrapped, plan, tp=2)
    places = {name: (t.placement, t.local_shape) for _, name, t in alone.tensors()}
    assert {name.removeprefix("text."): (t.placement, t.local_shape) for _, name, t in under.tensors()} == places


def test_b11_a_rule_for_a_matrix_does_not_land_on_a_norm() -> None:
    found = refusal(
        model_of(t0(), meta=True),
        plan_with(
            P0,
            **{'"model.{norm,rotary_emb}": replicate': "model.norm: colwise\n  model.rotary_emb: replicate"},
        ),
    )
    assert [code for code, _ in found] == ["DTP404"]
    assert "LlamaRMSNorm" in found[0][1]


def test_b11_a_dim_that_the_tensor_lacks_is_refused() -> None:
    text = P0.replace(
        '"model.{norm,rotary_emb}": replicate', "model.norm.weight: {shard: 1}\n  model.rotary_emb: replicate"
    )
    ((code, message),) = refusal(model_of(t0(), meta=True), dtplan.parse_plan(text))
    assert code == "DTP408"
    assert "`weight` has 1 dims [32], there is no dim 1" in message


def test_b11_two_rules_on_one_module_are_refused_with_both_lines() -> None:
    with pytest.raises(dtplan.PlanError) as caught:
        plan_with(P0 + "  model.layers.0.mlp.down_proj: replicate\n")
    assert "DTP301" in str(caught.value)
    assert "case.yaml:14:3" in str(caught.value)
    assert "case.yaml:9" in str(caught.value)
    won = plan_with(P0 + "  model.layers.0.mlp.down_proj: {style: rowwise, unit: ffn, output: R, override: true}\n")
    assert dtplan.bind(model_of(t0(), meta=True), won, tp=2).tp == 2


def test_b12_one_plan_serves_the_bare_model_too() -> None:
    plan = dtplan.parse_plan(
        "dtplan: 1\nextends: llama\nserves: [LlamaForCausalLM, LlamaModel]\nnames: {model: [.]}\n"
        "rules:\n  lm_head: {style: colwise, unit: vocab, output: logits, optional: true}\n"
    )
    with torch.device("meta"):
        bare = LlamaModel(t0())
    bound = dtplan.bind(bare, plan, tp=2)
    assert "layers.0.self_attn.q_proj.weight" in {name for _, name, _ in bound.tensors()}
    assert dtplan.bind(model_of(t0(), meta=True), plan, tp=2).modules[-1].pattern == "lm_head"


# --- Head counts, GQA and per-head parameters ---


@pytest.mark.parametrize(
    ("changes", "tp", "unit", "allowed"),
    [
        ({"num_key_value_heads": 1}, 2, "kv_head = 1 (num_key_value_heads)", "1"),  # B13
        (
            {"hidden_size": 64, "num_attention_heads": 8},
            4,
            "kv_head = 2 (num_key_value_heads)",
            "1, 2",
        ),  # B14
    ],
    ids=["b13", "b14"],
)
def test_b13_b14_kv_heads_limit_the_degree(changes: dict[str, int], tp: int, unit: str, allowed: str) -> None:
    ((code, text),) = refusal(model_of(t0(**changes), meta=True), "llama", tp=tp)
    assert code == "DTP405"
    assert unit in text
    assert text.endswith(f"degrees that every unit allows: {allowed}")


def test_llama_2_13b_allows_1_2_4_and_8() -> None:
    config = t0(
        hidden_size=5120,
        intermediate_size=13824,
        num_attention_heads=40,
        num_key_value_heads=40,
        vocab_size=32000,
    )
    model = model_of(config, meta=True)
    for tp in (1, 2, 4, 8):
        assert dtplan.bind(model, tp=tp).tp == tp
    for tp in (3, 5, 6, 10, 16):
        ((code, text),) = refusal(model, "auto", tp=tp)
        assert code == "DTP405"
        assert "head = 40 (num_attention_heads) allows 1, 2, 4, 5, 8, 10, 20, 40" in text
        assert text.endswith("degrees that every unit allows: 1, 2, 4, 8")


def test_b19_kv_heads_on_several_ranks_are_kept_by_each_of_them() -> None:
    plan = dtplan.parse_plan(
        "dtplan: 1\nextends: llama\nunits: {kv_head: {field: num_key_value_heads, indivisible: replicate_kv}}\n"
    )
    config = t0(num_attention_heads=4, num_key_value_heads=2)
    copies = [model_of(config) for _ in range(4)]
    truth = copies[0].get_parameter("model.layers.0.self_attn.k_proj.weight").detach().clone()

    def on_rank(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(copies[rank], mesh, plan)
        own = sharded.get_parameter("model.layers.0.self_attn.k_proj.weight")
        assert isinstance(own, DTensor)
        return torch.equal(own.to_local(), truth.chunk(2)[rank // 2])

    assert simulated_ranks(4, on_rank) == [True] * 4


class CountingAttention(nn.Module):
    """Attention that reshapes with counts that it stores (B16)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 8
        self.wq = nn.Linear(32, 32, bias=False)
        self.wk = nn.Linear(32, 16, bias=False)
        self.wv = nn.Linear(32, 16, bias=False)
        self.wo = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        q = self.wq(x).view(rows, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(rows, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(rows, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for t in (k, v))
        weights = torch.softmax(q @ k.transpose(2, 3), -1)
        return self.wo((weights @ v).transpose(1, 2).reshape(rows, length, -1))


def test_b16_counts_that_a_forward_reshapes_with_become_local() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = t0()
            self.attn = CountingAttention()

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x)

    plan = dtplan.parse_plan(
        "dtplan: 1\nunits: {head: num_attention_heads, kv_head: num_key_value_heads}\nrules:\n"
        "  attn: {input: R, localize: [num_heads, num_kv_heads]}\n"
        "  attn.wq: {style: colwise, unit: head}\n"
        '  "attn.{wk,wv}": {style: colwise, unit: kv_head}\n'
        "  attn.wo: {style: rowwise, unit: head}\n"
    )
    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    reference = copy.deepcopy(model)
    truth = reference(x)
    truth.square().sum().backward()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> tuple[int, int, float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(copies[rank], mesh, plan)
        out = sharded(x)
        out.square().sum().backward()
        gaps = [(out - truth).abs().max().item()]
        for name, parameter in reference.named_parameters():
            gaps.append((whole(sharded.get_parameter(name).grad) - parameter.grad).abs().max().item())  # type: ignore[arg-type, operator]
        return sharded.attn.num_heads, sharded.attn.num_kv_heads, max(gaps)

    for heads, kv_heads, gap in simulated_ranks(2, on_rank):
        assert (heads, kv_heads) == (2, 1)
        assert gap < 1e-12


def test_b20_a_bare_parameter_is_cut_by_head() -> None:
    model = model_of(t0(), meta=True)
    for layer in model.model.layers:
        layer.self_attn.sinks = nn.Parameter(torch.empty(4, device="meta"))
    plan = plan_with(P0 + "  model.layers.*.self_attn.sinks: {shard: 0, unit: head}\n")
    placed = {name: tensor for _, name, tensor in dtplan.bind(model, plan, tp=2).tensors()}
    assert placed["model.layers.0.self_attn.sinks"].local_shape == (2,)


# --- Tied embeddings ---


def test_b27_a_tied_head_needs_a_rule_for_the_embedding_too() -> None:
    model = model_of(t0(tie_word_embeddings=True), meta=True)
    vocab = P0.replace("ffn: intermediate_size", "ffn: intermediate_size, vocab: vocab_size")
    without = vocab.replace("  model.embed_tokens: replicate\n", "").replace(
        "lm_head: replicate", "lm_head: {style: colwise, unit: vocab}"
    )
    assert {code for code, _ in refusal(model, dtplan.parse_plan(without))} == {"DTP403"}
    whole = vocab.replace("lm_head: replicate", "lm_head: {style: colwise, unit: vocab}")
    ((code, text),) = refusal(model, dtplan.parse_plan(whole))
    assert code == "DTP409"
    assert "model.embed_tokens.weight is R" in text
    assert "lm_head.weight is S(0)" in text


def test_b32_two_cuts_of_one_shared_tensor_are_refused() -> None:
    model = model_of(t0(tie_word_embeddings=True), meta=True)
    text = P0.replace("model.embed_tokens: replicate", "model.embed_tokens: colwise").replace(
        "lm_head: replicate", "lm_head: colwise"
    )
    ((code, message),) = refusal(model, dtplan.parse_plan(text))
    assert code == "DTP409"
    assert "S(1)" in message
    assert "S(0)" in message


def test_b29_a_tie_stays_one_parameter_with_the_whole_gradient() -> None:
    """Stock parallelize_module leaves two, each with a part of the gradient."""
    config = t0(tie_word_embeddings=True)
    model, ids = model_of(config), ids_of(config)
    reference = copy.deepcopy(model)
    reference(ids, labels=ids).loss.backward()
    wanted = reference.lm_head.weight.grad
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> tuple[bool, float, bool]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(copies[rank], mesh)
        one = sharded.lm_head.weight is sharded.model.embed_tokens.weight
        sharded(ids, labels=ids).loss.backward()
        found = sharded.lm_head.weight.grad.full_tensor()
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()
        still = sharded.lm_head.weight is sharded.model.embed_tokens.weight
        return one and still, (found - wanted).abs().max().item(), isinstance(sharded.lm_head.weight, DTensor)

    for one, gap, is_dtensor in simulated_ranks(2, on_rank):
        assert one
        assert is_dtensor
        assert gap < 1e-6


def test_frozen_parameters_stay_frozen() -> None:
    """Stock SequenceParallel makes a frozen norm trainable (peers.md, section 6)."""
    model = build(llama())
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" not in name
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> tuple[list[str], list[str]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(copies[rank], mesh, sequence_parallel=True)
        outcome(sharded, batch(llama()))
        named = list(sharded.named_parameters())
        return [n for n, p in named if not p.requires_grad], [n for n, p in named if p.grad is None]

    for frozen, without_grad in simulated_ranks(2, on_rank):
        assert frozen == without_grad
        assert len(frozen) == 5


def test_both_head_names_are_honoured() -> None:
    """GPT-NeoX's head was `embed_out` before transformers 5, and is in checkpoints."""
    model = on_meta(neox())
    model.embed_out, model.lm_head = model.lm_head, None
    del model._modules["lm_head"]
    bound = dtplan.bind(model, tp=2)
    placed = {name: tensor for _, name, tensor in bound.tensors()}
    assert placed["embed_out.weight"].local_shape == (16, 32)
    assert bound.aliases == {"embed_out": ("lm_head",)}
    assert dtplan.bind(on_meta(neox()), tp=2).aliases == {"lm_head": ("embed_out",)}


def test_placements_are_torch_s() -> None:
    copies = [build(llama()) for _ in range(2)]

    def on_rank(rank: int) -> tuple[object, ...]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(copies[rank], mesh)
        return tuple(
            sharded.get_parameter(f"model.layers.0.{n}.weight").placements for n in ("mlp.up_proj", "mlp.down_proj")
        )

    assert simulated_ranks(2, on_rank) == [((Shard(0),), (Shard(1),))] * 2
