"""TransformerEngine layers under a plan, on a stand-in of its interface: exact in float64, or refused with a reason."""

from __future__ import annotations

import copy
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from click.testing import CliRunner
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dtplan
from dtplan.cli import cli
from dtplan.plan.library import locate
from dtplan.plan.read import parse_plan
from dtplan.plan.spec import Plan, S
from dtplan.planner import collectives as coll
from dtplan.planner.apply import applied
from dtplan.planner.ledger import AGAIN, Ledger, ledger
from dtplan.prove.counter import CollectiveCounter
from dtplan.prove.oracle import BOUND, errors, outcome, relative_error, wholes
from dtplan.prove.simulated import simulated_ranks
from dtplan.te import engine as engines
from dtplan.te import overlap
from dtplan.te.choose import choose
from dtplan.te.install import Mailbox
from dtplan.te.probe import norm_of
from tests import te_standin
from tests.families import batch
from tests.models import drawing

TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attn_implementation": "sdpa",
    "use_cache": False,
}
NEOX: dict[str, Any] = {**TINY, "hidden_act": "gelu_new", "hidden_dropout": 0.0, "attention_dropout": 0.0}
LLAMA: dict[str, Any] = {**TINY, "num_key_value_heads": 2}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama, biases, tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**NEOX)),
    "neox, sequential": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**NEOX, use_parallel_residual=False)
    ),
    "neox, erf": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{**NEOX, "hidden_act": "gelu"})),
}


def build(name: str) -> nn.Module:
    with drawing(seed=0):
        model: nn.Module = MODELS[name]().double()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


def found_on_ranks(
    name: str, axes: dict[str, int], check: Any = None, *, rows: int = 2, **options: Any
) -> dict[str, float]:
    """The largest error of each tensor over the ranks of a mesh."""
    model = build(name)
    two = batch("llama", images=False)
    data = {key: torch.cat([part.roll(i, 1) for i in range(rows // 2)]) for key, part in two.items()}
    truth = outcome(copy.deepcopy(model), data)
    ranks = torch.Size(axes.values()).numel()
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def on_rank(rank: int) -> dict[str, float]:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        sharded = dtplan.parallelize(copies[rank], mesh, **options)
        if check is not None:
            check(sharded)
        return errors(outcome(sharded, data), truth)

    found = simulated_ranks(ranks, on_rank)
    assert all(each.keys() == found[0].keys() for each in found)
    return {key: max(each[key] for each in found) for key in found[0]}


def fused_layers(model: nn.Module) -> set[str]:
    return {module.kind for module in applied(model).bound.modules if module.style == "te"}


# ---------------------------------------------------------------------------------------------------------- exactness

ALL_OF_LLAMA = {"te.LayerNormLinear", "te.Linear", "te.LayerNormMLP", "te.RMSNorm"}
ALL_OF_NEOX = {"te.LayerNormLinear", "te.Linear", "te.LayerNormMLP", "te.LayerNorm"}
LAYERS = {
    "llama": ALL_OF_LLAMA,
    "llama, biases, tied": ALL_OF_LLAMA,
    "neox": ALL_OF_NEOX,
    "neox, sequential": ALL_OF_NEOX,
    "neox, erf": ALL_OF_NEOX - {"te.LayerNormMLP"},
}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("axes", [{"tp": 1}, {"tp": 2}, {"shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_fused_layers_are_exact(standin, name, axes, sequence_parallel):
    """Logits and every gradient, by the names and shapes of the unfused model."""

    def check(model: nn.Module) -> None:
        assert fused_layers(model) == LAYERS[name]
        assert all(isinstance(p, DTensor) for p in model.parameters())

    found = found_on_ranks(name, axes, check, sequence_parallel=sequence_parallel, loss_parallel=True)
    assert max(found.values()) <= BOUND


@pytest.mark.parametrize(("name", "plan"), [("llama", "llama"), ("neox", "gpt_neox")])
def test_the_stream_may_be_cut_along_the_batch(standin, name, plan):
    """Four rows on two ranks, all layers fused as they are along the sequence."""
    rows = dataclasses.replace(dtplan.load_plan(plan), sequence_parallel=S(0))

    def check(model: nn.Module) -> None:
        assert fused_layers(model) == LAYERS[name]

    options = {"plan": rows, "te": "require", "sequence_parallel": True}
    assert max(found_on_ranks(name, {"tp": 2}, check, rows=4, **options).values()) <= BOUND


def test_a_stream_that_is_cut_otherwise_is_not_for_transformer_engine(standin):
    plan = dataclasses.replace(dtplan.load_plan("llama"), sequence_parallel=S(-2))
    bound = dtplan.bind(build("llama"), plan, tp=2, sequence_parallel=True)
    kept = choose(build("llama"), bound).kept
    assert {k.layer for k in kept} == {"LayerNormLinear", "Linear", "LayerNormMLP"}
    assert all("the plan cuts S(-2)" in k.reason for k in kept)
    options: dict[str, Any] = {"plan": plan, "te": "auto", "sequence_parallel": True}
    assert max(found_on_ranks("llama", {"tp": 2}, **options).values()) <= BOUND


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
def test_replicas_and_recomputation_around_fused_layers(standin, sequence_parallel):
    """Casts to float32 inside the model bound the comparison: what is recomputed is out of the oracle's reach."""
    model, ids = build("llama"), batch("llama", images=False)["input_ids"]
    reference = copy.deepcopy(model)
    reference(input_ids=ids, labels=ids).loss.backward()
    copies = [copy.deepcopy(model) for _ in range(4)]

    def on_rank(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        sharded = dtplan.parallelize(
            copies[rank], mesh, te="require", sequence_parallel=sequence_parallel, activation_checkpointing=True
        )
        sharded(input_ids=ids, labels=ids).loss.backward()
        found = wholes(sharded, {name: p.grad for name, p in sharded.named_parameters() if p.grad is not None})
        return max(relative_error(found[name], p.grad) for name, p in reference.named_parameters())  # type: ignore[arg-type]

    assert max(simulated_ranks(4, on_rank)) < 1e-6


def test_the_parts_of_a_fused_weight_may_come_in_any_order(standin):
    """Each outlet hands out its own part, so the order of `linears` is free."""
    text = plan_text("llama")
    other = text.replace("self_attn.k_proj, self_attn.v_proj]", "self_attn.v_proj, self_attn.k_proj]")
    assert other != text
    plan = parse_plan(other)
    assert max(found_on_ranks("llama", {"tp": 2}, plan=plan, te="require").values()) <= BOUND


def test_gate_and_up_exchanged_do_not_compute_the_same_and_are_kept(standin):
    text = plan_text("llama")
    wrong = text.replace("gate: mlp.gate_proj, up: mlp.up_proj", "gate: mlp.up_proj, up: mlp.gate_proj")
    plan = parse_plan(wrong)
    model = build("llama")
    kept = choose(model, dtplan.bind(model, plan)).kept
    assert [k.layer for k in kept] == ["LayerNormMLP"]
    assert "does not compute" in kept[0].reason


def test_a_norm_s_gradient_that_is_not_summed_is_seen(standin, monkeypatch):
    """The gradients of norms and row biases inside fused layers are partial sums under sequence parallelism."""
    from dtplan.te import choose as chooser

    summed = chooser._Chooser._norm_tensors

    def not_summed(self: Any, norm: str, *, inside: bool) -> Any:
        for tensor in summed(self, norm, inside=inside):
            yield dataclasses.replace(tensor, bound=dataclasses.replace(tensor.bound, grad="complete"))

    monkeypatch.setattr(chooser._Chooser, "_norm_tensors", not_summed)
    found = found_on_ranks("llama", {"tp": 2}, sequence_parallel=True)
    wrong = {name for name, error in found.items() if error > BOUND}
    layers = [
        f"grad model.layers.{i}.{n}.weight" for i in (0, 1) for n in ("input_layernorm", "post_attention_layernorm")
    ]
    assert wrong == set(layers)


def plan_text(name: str) -> str:
    return locate(name)[0].read_text(encoding="utf-8")


def with_attention() -> Plan:
    """Llama's plan, with TransformerEngine's attention too."""
    text = plan_text("llama")
    linear = "    - {layer: Linear, linear: self_attn.o_proj}\n"
    assert linear in text
    return parse_plan(text.replace(linear, linear + "    - {layer: DotProductAttention, attention: self_attn}\n"))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
def test_fused_attention_is_exact(standin, sequence_parallel):
    """Grouped heads, two of four on each rank; the model's own config stays as it is."""

    def check(model: Any) -> None:
        attention = model.model.layers[0].self_attn
        assert attention.config._attn_implementation == "dtplan_te"
        assert model.config._attn_implementation == "sdpa"

    options = {"plan": with_attention(), "te": "require", "sequence_parallel": sequence_parallel}
    assert max(found_on_ranks("llama", {"tp": 2}, check, **options).values()) <= BOUND


# --------------------------------------------------------------------------------------------------------- collectives


Counts = dict[tuple[str, str], int]


def counted_on_ranks(models: list[nn.Module], **options: Any) -> tuple[Counts, Ledger]:
    """Collectives of a step by direction and kind, and the ledger of the bound plan as it was applied."""
    ids = batch("llama", images=False)["input_ids"]

    def on_rank(rank: int) -> Counts:
        mesh = init_device_mesh("cpu", (len(models),), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(models[rank], mesh, **options)
        sharded(input_ids=ids)  # the first call compares batches over ranks: not a part of a step
        with CollectiveCounter() as forward:
            loss = sharded(input_ids=ids, labels=ids).loss
        with CollectiveCounter() as backward:
            loss.backward()
        ways = {"forward": forward, "backward": backward}
        return {(way, kind): number for way, seen in ways.items() for kind, number in seen.counts.items()}

    found = simulated_ranks(len(models), on_rank)
    assert all(each == found[0] for each in found)
    book = ledger(applied(models[0]).bound, batch=ids.shape[0], sequence=ids.shape[1], dtype="float64")
    return found[0], book


@pytest.fixture
def seen_sums(standin, monkeypatch):
    """Sums of the stand-in that the counter sees: torch does not dispatch what is called of a group of threads."""

    def all_reduce(x: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False) -> SimpleNamespace:
        x.copy_(coll.all_reduce(x, coll.Group.of(group)))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(te_standin, "dist", SimpleNamespace(all_reduce=all_reduce, get_world_size=dist.get_world_size))


def gathered_again(book: Ledger) -> set[str]:
    return {entry.cause.removesuffix(AGAIN) for entry in book.entries if entry.cause.endswith(AGAIN)}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("llama", {"model.layers.*.self_attn.te_qkv_proj", "model.layers.*.mlp"}),
        ("neox", set()),  # the block gathers for both, and keeps it
        ("neox, sequential", {"gpt_neox.layers.*.attention.te_query_key_value", "gpt_neox.layers.*.mlp"}),
    ],
)
@pytest.mark.usefixtures("seen_sums")
def test_the_ledger_counts_what_fused_layers_do(name, columns, sequence_parallel):
    models = [build(name) for _ in range(2)]
    counts, book = counted_on_ranks(models, sequence_parallel=sequence_parallel, loss_parallel=True)
    assert counts == book.counts()
    assert gathered_again(book) == (columns if sequence_parallel else set())
    (floor,) = book.floors
    again = len(columns) if sequence_parallel else 0
    assert (floor.forward, floor.backward) == (floor.floor_forward, floor.floor_backward + again)
    assert len(floor.excess) == again


@pytest.mark.usefixtures("seen_sums")
def test_the_input_of_a_frozen_weight_is_not_gathered_again():
    models = [build("llama") for _ in range(2)]
    for model in models:
        for layer in model.get_submodule("model.layers").children():
            layer.get_submodule("self_attn").requires_grad_(False)
    counts, book = counted_on_ranks(models, sequence_parallel=True, loss_parallel=True)
    assert counts == book.counts()
    assert gathered_again(book) == {"model.layers.*.mlp"}


# ------------------------------------------------------------------------------------------- what is read, and by whom


def test_nothing_but_the_fused_layer_may_read_a_fused_norm(standin):
    mailbox = Mailbox("model.layers.0.input_layernorm")
    x = torch.ones(2, 3)
    assert mailbox.put(x).isnan().all()
    with pytest.raises(dtplan.ApplyError, match=r"attention does not read what model.layers.0.input_layernorm returns"):
        mailbox.take(x, "attention")


def test_a_second_reader_of_a_fused_norm_turns_the_loss_into_nan(standin):
    model = build("llama")
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    attend = attention.forward

    def also_reading(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        out, weights = attend(hidden_states, **kwargs)
        return out + 0 * hidden_states, weights

    attention.forward = also_reading
    losses = []

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(model, mesh, te="require")
        ids = batch("llama", images=False)["input_ids"]
        losses.append(sharded(input_ids=ids, labels=ids).loss)

    simulated_ranks(1, on_rank)
    assert losses[0].isnan()


def test_the_state_dict_has_no_extra_state_and_loads(standin):
    def check(model: nn.Module) -> None:
        state = model.state_dict()
        assert not [key for key in state if "extra_state" in key]
        model.load_state_dict(state)

    assert max(found_on_ranks("llama", {"tp": 2}, check, te="require").values()) <= BOUND


# ------------------------------------------------------------------------------------------------------------- choices


def reasons(model: nn.Module, plan: Any = "auto", *, tp: int = 2, fp8: bool = False) -> dict[str, str]:
    return {k.layer: k.reason for k in choose(model, dtplan.bind(model, plan, tp=tp), fp8=fp8).kept}


def test_erf_gelu_is_kept_unless_the_plan_accepts_the_tanh_form(standin):
    model = build("neox, erf")
    assert "erf form" in reasons(model)["LayerNormMLP"]
    assert "approximate_gelu: true" in reasons(model)["LayerNormMLP"]
    plan = parse_plan(plan_text("gpt_neox").replace("activation: gelu}", "activation: gelu, approximate_gelu: true}"))
    assert "LayerNormMLP" not in reasons(model, plan)


def test_a_layer_norm_without_a_bias_is_kept():
    """Cohere's; TransformerEngine's has one, with nothing to load into it."""
    model = build("neox")
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_parameter("bias", None)
    kept = reasons(model)
    assert kept["LayerNorm"] == "final_layer_norm is a LayerNorm with no bias, unlike TransformerEngine's"
    assert {"LayerNormLinear", "LayerNormMLP"} <= kept.keys()


def test_fp8_needs_multiples_of_16_on_every_rank():
    model = build("llama")
    assert reasons(model, fp8=True, tp=1) == {}
    kept = reasons(model, fp8=True, tp=2)
    assert kept["LayerNormLinear"] == "FP8 needs multiples of 16; k_proj has [8, 32] on a rank"


def test_attention_that_is_not_sdpa_is_kept():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "attn_implementation": "eager"}))
    assert "its config chooses eager attention" in reasons(model, with_attention())["DotProductAttention"]


def test_dropout_inside_the_mlp_is_kept(standin):
    model = build("neox")
    for layer in model.gpt_neox.layers:  # type: ignore[union-attr]
        layer.mlp.dropout = nn.Dropout(0.1)
    assert reasons(model)["LayerNormMLP"] == "it has dropout inside (dropout)"


def test_layers_that_are_frozen_in_part_are_kept():
    model = build("llama")
    model.get_parameter("model.layers.1.self_attn.k_proj.weight").requires_grad_(False)
    choice = choose(model, dtplan.bind(model, tp=2))
    assert "differ in dtype or in what is trained" in choice.kept[0].reason
    assert {f.name for f in choice.fused if f.layer == "LayerNormLinear"} == {"model.layers.0.self_attn.te_qkv_proj"}


@pytest.mark.parametrize(
    ("norm", "kind", "zero_centered"),
    [
        (nn.LayerNorm(24, eps=1e-3), "LayerNorm", False),
        (nn.RMSNorm(24, eps=1e-6), "RMSNorm", False),
        (transformers.models.llama.modeling_llama.LlamaRMSNorm(24, eps=1e-6), "RMSNorm", False),
        (transformers.models.gemma.modeling_gemma.GemmaRMSNorm(24, eps=1e-6), "RMSNorm", True),
    ],
    ids=["torch layer norm", "torch rms norm", "llama", "gemma"],
)
def test_norms_are_told_by_what_they_compute(norm, kind, zero_centered):
    found = norm_of(norm)
    assert found is not None
    assert (found.kind, found.zero_centered, found.bias) == (kind, zero_centered, kind == "LayerNorm")


def test_a_norm_that_computes_something_else_is_none_that_is_known():
    class Halved(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    assert norm_of(Halved(24, eps=1e-6)) is None
    wrong_eps: Any = nn.RMSNorm(24, eps=1e-6)
    wrong_eps.variance_epsilon = 1e-5
    assert norm_of(wrong_eps) is None
    assert norm_of(nn.Linear(24, 24)) is None
    assert norm_of(nn.RMSNorm(24, eps=1e-6).to("meta")) is not None


# ------------------------------------------------------------------------------------------------------------ refusals


def refusal(name: str = "llama", dtype: torch.dtype = torch.float64, **options: Any) -> str:
    def on_rank(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(dtplan.ApplyError) as caught:
            dtplan.parallelize(models[rank], mesh, **options)
        assert all(type(p) is nn.Parameter for p in models[rank].parameters())
        return str(caught.value)

    models = [build(name).to(dtype) for _ in range(2)]
    first, second = simulated_ranks(2, on_rank)
    assert first == second
    return first


def test_without_transformer_engine_auto_is_off_and_require_says_why(monkeypatch):
    monkeypatch.setattr(engines, "find", lambda: "TransformerEngine cannot be imported (no)")

    def check(model: nn.Module) -> None:
        assert not fused_layers(model)

    found = found_on_ranks("llama", {"tp": 2}, check)
    assert max(found.values()) <= BOUND
    assert refusal(te="require") == "te='require': TransformerEngine cannot be imported (no)"
    assert refusal(fp8="current").startswith("fp8='current' needs fused layers: TransformerEngine cannot be imported")


def test_this_machine_has_none_or_says_which():
    found = engines.find()
    assert isinstance(found, engines.Engine) or "pip install 'dtplan[te]'" in found


def test_refusals(standin):
    assert refusal(te="maybe") == "te='maybe': give 'auto', 'require' or 'off'"
    assert "compute in float64, the model in float32" in refusal(te="require", dtype=torch.float32)
    assert "not every layer can be fused" in refusal("neox, erf", te="require")
    assert "give one of current, delayed, block" in refusal(fp8="e4m3")
    assert "need Blackwell" in refusal(fp8="mxfp8")
    assert "fp8='current' needs fused layers: te='off'" in refusal(te="off", fp8="current")


def test_a_mesh_of_another_device_is_told(monkeypatch):
    real = dataclasses.replace(te_standin.ENGINE, devices=frozenset({"cuda"}))
    monkeypatch.setattr(engines, "find", lambda: real)
    assert refusal(te="require") == "te='require': its layers run on cuda, the mesh is of cpu"


# ----------------------------------------------------------------------------------------------------------------- FP8


def test_recomputation_with_fp8_is_transformer_engine_s_own(standin, monkeypatch):
    calls: list[int] = []
    recompute = te_standin.checkpoint

    def counted(forward: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return recompute(forward, *args, **kwargs)

    monkeypatch.setattr(standin.layers, "checkpoint", counted)
    model = build("neox")
    ids = batch("llama", images=False)["input_ids"]

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        dtplan.parallelize(model, mesh, fp8="current", activation_checkpointing=True)(input_ids=ids)

    simulated_ranks(1, on_rank)
    assert len(calls) == 2  # layers


def test_delayed_scaling_keeps_the_gradients_of_its_first_step(standin):
    """Of a loss as small as that of a real batch, whose gradients E5M2 does not hold unless they are scaled."""
    small = 2.0**-12
    model, data = build("llama"), batch("llama", images=False)
    reference = copy.deepcopy(model)
    (reference(**data).loss * small).backward()
    truth = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}

    def on_rank(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        sharded = dtplan.parallelize(model, mesh, te="require", fp8="delayed")
        steps = []
        for _ in range(2):
            sharded.zero_grad()
            (sharded(**data).loss * small).backward()
            found = wholes(sharded, {name: p.grad for name, p in sharded.named_parameters() if p.grad is not None})
            assert found.keys() == truth.keys()
            steps.append(max(float((found[n] - truth[n]).norm() / truth[n].norm()) for n in truth))
        return steps

    [[first, second]] = simulated_ranks(1, on_rank)
    assert 1e-3 < second < 0.2  # of rounding; the first loses no more
    assert first < 0.2


def test_overlap_names_the_layers_of_a_unit(standin, monkeypatch):
    monkeypatch.setattr(overlap._Session, "made", None)
    te_standin.BUFFERS.clear()
    layers: dict[str, str | None] = {}

    def check(model: nn.Module) -> None:
        for name in ("self_attn.te_qkv_proj", "self_attn.o_proj", "mlp"):
            module: Any = model.get_submodule(f"model.layers.1.{name}")
            assert module.overlaps
            layers[name] = module.ub_name

    found = found_on_ranks("llama", {"tp": 2}, check, sequence_parallel=True, overlap_tokens=16)
    assert max(found.values()) <= BOUND
    assert layers == {"self_attn.te_qkv_proj": "qkv", "self_attn.o_proj": "proj", "mlp": None}
    assert te_standin.BUFFERS[0][0] == ([16, 32], 2)
    assert te_standin.BUFFERS[0][1]["quantization_modes"] == ["NONE"]
    assert "for 16 tokens of 32 features" in refusal(sequence_parallel=True, overlap_tokens=32)
    assert "te='off'" in refusal(te="off", sequence_parallel=True, overlap_tokens=16)


def test_quantised_parameters_are_refused(standin):
    """`quantized_model_init` with tensor parallelism: a scale for each rank's part would differ."""

    class Quantised(torch.Tensor):
        _quantizer = object()

    model = build("llama")
    weight = model.get_submodule("model.layers.0.self_attn.q_proj")
    data = torch.zeros(32, 32, dtype=torch.float64).as_subclass(Quantised)
    weight.weight = nn.Parameter(data, requires_grad=False)

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        with pytest.raises(dtplan.ApplyError, match=r"q_proj.weight is quantised already"):
            dtplan.parallelize(model, mesh)

    simulated_ranks(1, on_rank)


# ---------------------------------------------------------------------------------------------------------------- show


def shown(tmp_path, name: str, *options: str, command: str = "show") -> str:
    MODELS[name]().config.save_pretrained(tmp_path)
    found = CliRunner().invoke(cli, [command, "--model", str(tmp_path), "--tp", "2", "--te", *options])
    assert found.exit_code == 0
    return found.output


def test_show_lists_what_is_fused_and_why_not_the_rest(tmp_path):
    text = shown(tmp_path, "neox, erf")
    assert "gpt_neox.layers.*.mlp.te_dense_h_to_4h x2: LayerNormLinear <- post_attention_layernorm, mlp.dense" in text
    assert "kept: gpt_neox.layers.*: LayerNormMLP <- " in text
    assert "the model's gelu is the erf form" in text
    llama = shown(tmp_path, "llama")
    assert "self_attn.te_qkv_proj x2: LayerNormLinear <- input_layernorm, self_attn.q_proj" in llama
    assert "its collectives inside" in llama
    assert "kept:" not in llama


def test_show_of_fused_layers_as_json(tmp_path):
    found = json.loads(shown(tmp_path, "llama", "--fp8", "--json"))["fused"]
    assert {entry["layer"] for entry in found["fused"]} == {"LayerNormMLP", "Linear", "RMSNorm"}
    assert [entry["layer"] for entry in found["kept"]] == ["LayerNormLinear"]
    assert "multiples of 16" in found["kept"][0]["reason"]


def test_the_ledger_that_is_shown_is_that_of_the_fused_layers(tmp_path):
    """In FP8 the MLP and o_proj are fused here, qkv is not: what is gathered for it has the model's dtype."""
    step = ("--sequence-parallel", "--batch", "1", "--seq", "64")
    file = tmp_path / "report.html"
    assert "self_attn.te_qkv_proj: its input again" in shown(tmp_path, "llama", *step)
    shown(tmp_path, "llama", *step, "-o", str(file), command="report")
    assert "self_attn.te_qkv_proj: its input again" in file.read_text()
    book = json.loads(shown(tmp_path, "llama", *step, "--fp8", "--json"))["ledger"]
    whole = 64 * 32  # tokens, features
    found = {
        (entry["cause"].partition("*.")[2], entry["direction"], entry["bytes"] // whole)
        for entry in book["entries"]
        if entry["kind"] == "all_gather" and entry["layer"] == "model.layers.*"
    }
    assert found == {
        ("self_attn", "forward", 2),
        ("self_attn.o_proj", "backward", 1),
        ("mlp", "forward", 1),
        ("mlp: its input again", "backward", 1),
        ("mlp", "backward", 1),
    }
