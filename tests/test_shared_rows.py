"""What a degree does not divide: kv heads that several ranks keep, sections that all keep, regions that stay whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dtplan
from dtplan._errors import BindError
from dtplan.plan.spec import Plan, R
from dtplan.planner.ledger import ledger
from dtplan.prove.counter import CollectiveCounter
from dtplan.prove.live import live_model
from dtplan.prove.oracle import relative_error, wholes
from dtplan.prove.pool import GlooPool
from dtplan.prove.proof import prove_model
from dtplan.prove.result import Leg, Proof
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights.checkpoint import open_checkpoint
from dtplan.weights.compare import differences
from tests.families import CONFIGS, build, on_meta, plan_file

SHARED_KV = "units: {kv_head: {field: num_key_value_heads, indivisible: replicate_kv}}\n"
WHOLE_ATTENTION = (
    "units:\n  head: {field: num_attention_heads, indivisible: replicate}\n"
    "  kv_head: {field: num_key_value_heads, indivisible: replicate}\n"
)


def kin(base: str, text: str) -> Plan:
    return dtplan.parse_plan(f"dtplan: 1\nextends: {base}\n{text}", f"{base}-kin.yaml")


def proof_of(name: str, plan: Plan, *legs: Leg, explain: bool = False) -> Proof:
    cls: Any = type(on_meta(name))
    make = lambda: live_model(cls, CONFIGS[name](), 0)  # noqa: E731
    return prove_model(make, plan, given=name, model=name, legs=legs, explain=explain)


def verdicts(proof: Proof) -> list[str]:
    return [result.verdict for result in proof.legs]


def mesh(**axes: int) -> Any:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


# -------------------------------------------------------------------------------------- kv heads on several ranks


@pytest.mark.parametrize("base", ["qwen2", "olmo2", "starcoder2"])
def test_two_kv_heads_on_four_ranks_are_exact(base: str) -> None:
    """With their biases, and with norms over all of them; after steps that clip, too."""
    legs = Leg(tp=4), Leg(tp=4, sequence_parallel=True, loss_parallel=True)
    proof = proof_of(base, kin(base, SHARED_KV), *legs)
    assert verdicts(proof) == ["proved", "proved"]
    assert all(result.steps == 3 for result in proof.legs)


def test_fsdp_around_shared_kv_heads_is_exact() -> None:
    leg = Leg(tp=4, shard=2, sequence_parallel=True)
    assert verdicts(proof_of("qwen2", kin("qwen2", SHARED_KV), leg)) == ["proved"]


def test_a_number_per_kv_head_must_be_local() -> None:
    """Each rank's one q head would be given two copies of its kv head."""
    plan = kin("qwen2", SHARED_KV + "rules: {model.layers.*.self_attn: {input: R}}\n")
    assert verdicts(proof_of("qwen2", plan, Leg(tp=4), Leg(tp=2))) == ["refuted", "proved"]


def test_the_sums_of_shared_heads_are_in_the_ledger() -> None:
    plan, ids = kin("qwen2", SHARED_KV), torch.arange(16).view(2, 8)
    models = [build("qwen2") for _ in range(4)]
    entries = ledger(dtplan.bind(models[0], plan, tp=4), batch=2, sequence=8).entries
    (sums,) = [entry for entry in entries if entry.cause.startswith("gradients")]
    assert (sums.count, sums.bytes) == (2, 8 * 2 * 8 * 33)  # two layers; float64, k and v: 8 rows of 32 and a bias

    def on_rank(rank: int) -> int:
        sharded = dtplan.parallelize(models[rank], mesh(tp=4), plan)
        with CollectiveCounter() as seen:
            sharded(input_ids=ids).logits.sum().backward()
        return seen.counts["all_reduce"]

    told = sum(entry.count for entry in entries if entry.kind == "all_reduce")
    assert simulated_ranks(4, on_rank) == [told] * 4


def _gaps(rank: int) -> float:
    """The largest error of the gradients on real processes, where pairs of ranks get groups of their own."""
    model, ids = build("qwen2"), torch.arange(16).view(2, 8)
    model(input_ids=ids).logits.square().sum().backward()
    sharded = dtplan.parallelize(build("qwen2"), mesh(tp=4), kin("qwen2", SHARED_KV), sequence_parallel=True)
    sharded(input_ids=ids).logits.square().sum().backward()
    grads = {name: p.grad for name, p in sharded.named_parameters() if p.grad is not None}
    truth = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return max(relative_error(grad, truth[name]) for name, grad in wholes(sharded, grads).items())


def test_processes_that_share_heads_agree(pool: GlooPool) -> None:
    assert max(pool.run(_gaps, ranks=4)) < 1e-7  # casts to float32 inside the model


@pytest.mark.parametrize(
    ("name", "extra", "axes"),
    [("qwen2", SHARED_KV, {"shard": 2, "tp": 4}), ("gpt_bigcode", "", {"shard": 3, "tp": 2})],
    ids=["kv heads", "a section"],
)
def test_files_come_back_the_same(name: str, extra: str, axes: dict[str, int], tmp_path: Path) -> None:
    plan = kin(name, extra) if extra else dtplan.load_plan(plan_file(name))
    model: Any = build(name).float()
    model.save_pretrained(tmp_path / "source")

    def on_rank(rank: int) -> None:
        sharded = dtplan.parallelize(on_meta(name), mesh(**axes), plan)
        report = dtplan.load(sharded, tmp_path / "source")
        assert report.bytes_read == report.bytes_kept
        dtplan.save(sharded, tmp_path / "saved")

    simulated_ranks(axes["shard"] * axes["tp"], on_rank)
    assert [*differences(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "saved"), {})] == []


def test_the_norm_counts_what_ranks_share_once() -> None:
    """FSDP2 over three cuts through the heads that two of four ranks share."""
    model, ids = build("qwen2"), torch.arange(24).view(3, 8)
    model(input_ids=ids).logits.square().sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    truth = {p: grads.norm(p).item() for p in (2.0, 1.0, float("inf"))}
    copies = [build("qwen2") for _ in range(12)]

    def on_rank(rank: int) -> dict[float, float]:
        sharded = dtplan.parallelize(copies[rank], mesh(shard=3, tp=4), kin("qwen2", SHARED_KV))
        sharded(input_ids=ids).logits.square().sum().backward()
        return {p: dtplan.clip_grad_norm_(sharded, 1e99, p).item() for p in truth}

    for found in simulated_ranks(12, on_rank):
        assert found == pytest.approx(truth, rel=1e-12)


ATTENTION = "rules: {model.layers.*.self_attn"
REFUSED = {
    "neither divides the other": (SHARED_KV, 3, "DTP405", "kv_head = 2 (num_key_value_heads) allows 1, 2, 4, 6, 8"),
    "rows that ranks share": (
        SHARED_KV + ATTENTION + ".o_proj: {style: rowwise, unit: kv_head, output: residual}}\n",
        4,
        "DTP405",
        "of which 2 ranks keep one: sums would count it so often",
    ),
    "a number that is none": (
        SHARED_KV + ATTENTION + ": {input: R, localize_per: {layer_idx: kv_head, scaling: kv_head}}}\n",
        4,
        "DTP412",
        "needs a whole number that 2 divides, it is",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    text, tp, code, says = REFUSED[case]
    with pytest.raises(BindError) as caught:
        dtplan.bind(on_meta("qwen2"), kin("qwen2", text), tp=tp)
    assert code in {finding.code for finding in caught.value.diagnostics}
    assert says in str(caught.value)


# ------------------------------------------------------------------------------------------ sections that all keep


def test_a_rank_keeps_its_q_heads_and_all_of_k_and_v() -> None:
    models = [build("gpt_bigcode") for _ in range(2)]
    q, kv = models[0].get_parameter("transformer.h.0.attn.c_attn.weight").detach().clone().split([32, 16])

    def on_rank(rank: int) -> bool:
        sharded = dtplan.parallelize(models[rank], mesh(tp=2), plan_file("gpt_bigcode"))
        own = sharded.get_parameter("transformer.h.0.attn.c_attn.weight")
        assert isinstance(own, DTensor)
        return torch.equal(own.to_local(), torch.cat([q.chunk(2)[rank], kv]))

    assert simulated_ranks(2, on_rank) == [True, True]


def starcoder(grad: str) -> Plan:
    text = plan_file("gpt_bigcode").read_text(encoding="utf-8")
    assert "whole: true, grad: sum" in text
    return dtplan.parse_plan(text.replace("whole: true, grad: sum", f"whole: true{grad}"), "starcoder.yaml")


def test_a_whole_section_must_say_what_its_gradient_is() -> None:
    with pytest.raises(BindError, match="a section stays whole among cut ones") as caught:
        dtplan.bind(on_meta("gpt_bigcode"), starcoder(""), tp=2)
    assert {finding.code for finding in caught.value.diagnostics} == {"DTP415"}


def test_a_section_whose_gradient_is_not_summed_is_named() -> None:
    (leg,) = proof_of("gpt_bigcode", starcoder(", grad: complete"), Leg(tp=2), explain=True).legs
    found = next(f for f in leg.findings if f.name == "transformer.h.1.attn.c_attn.weight")
    assert (found.what, found.kind) == ("gradient", "partial sum")
    assert "write `grad: sum` in the section that is whole" in found.advice
    assert found.tried == "with this, the leg is proved"


# ----------------------------------------------------------------------------------------- regions that stay whole


def test_attention_that_does_not_divide_stays_whole_and_the_mlp_is_cut() -> None:
    """Its norms of heads say `grad: sum`, for the degrees at which it is cut: whole, their gradients are complete."""
    plan = kin("qwen3", WHOLE_ATTENTION)
    placed = {name: tensor for _, name, tensor in dtplan.bind(on_meta("qwen3"), plan, tp=8).tensors()}
    assert placed["model.layers.0.self_attn.q_proj.weight"].placement == R
    assert placed["model.layers.0.self_attn.q_norm.weight"].grad == "complete"
    assert placed["model.layers.0.mlp.up_proj.weight"].local_shape == (8, 32)
    assert verdicts(proof_of("qwen3", plan, Leg(tp=8, sequence_parallel=True))) == ["proved"]


def test_fused_sections_that_do_not_divide_stay_whole() -> None:
    """With the numbers that its forward counts with."""
    plan = kin("phi3", WHOLE_ATTENTION)
    bound = dtplan.bind(on_meta("phi3"), plan, tp=8)
    (attention,) = [module for module in bound.modules if module.pattern.endswith("self_attn")]
    assert attention.localize == ()
    assert verdicts(proof_of("phi3", plan, Leg(tp=8))) == ["proved"]
