"""Mutation of the built-in plans: every change that changes numbers is refused by bind or refuted by the proof."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import GPTNeoXForCausalLM, LlamaForCausalLM, PretrainedConfig

from dtplan.plan.read import load_plan
from dtplan.plan.spec import LOGITS, RESIDUAL, Move, P, Plan, R, Rule
from dtplan.prove.proof import prove_model
from dtplan.prove.result import Leg
from dtplan.prove.shrink import live_model
from tests.models import llama, neox

KEEP = Move()
MODELS: dict[str, tuple[str, Any, PretrainedConfig]] = {
    "llama": (
        "llama",
        LlamaForCausalLM,
        llama(num_hidden_layers=1, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    ),
    "llama, tied": ("llama", LlamaForCausalLM, llama(num_hidden_layers=1, tie_word_embeddings=True)),
    "neox": ("gpt_neox", GPTNeoXForCausalLM, neox(num_hidden_layers=1)),
    "neox, sequential": (
        "gpt_neox",
        GPTNeoXForCausalLM,
        neox(num_hidden_layers=1, use_parallel_residual=False),
    ),
}
LEGS = (Leg(tp=2, sequence_parallel=True, loss_parallel=True), Leg(tp=2))
"""A mutant is proved where no leg refutes it; the second is not run once the first did."""


def mutants_of(rule: Rule) -> Iterator[tuple[str, Rule | None]]:  # noqa: PLR0912 - a list, in branches
    """Every way in which a rule goes wrong by one word."""

    def changed(**fields: Any) -> Rule:
        return dataclasses.replace(rule, **fields)

    cut = rule.style in ("colwise", "rowwise", "vocab")
    whole = {"style": "replicate", "unit": None, "inputs": (), "outputs": ()}
    yield "dropped", None
    if rule.style == "colwise":
        yield "rowwise", changed(style="rowwise", inputs=(), outputs=())
        yield "input kept", changed(inputs=((0, KEEP),))
    if rule.style == "rowwise":
        yield "colwise", changed(style="colwise", inputs=(), outputs=())
    if cut:
        yield "whole", changed(**whole, grad="complete")
        yield "whole, gradient summed", changed(**whole, grad="sum")
    if rule.style in ("rowwise", "vocab"):
        yield "sum left undone", changed(outputs=((None, Move(dst=P)),))
    if rule.style == "norm" or rule.grad == "sum":
        yield "gradient complete", changed(grad="complete")
    if rule.style == "norm" and rule.grad != "sum":
        yield "gradient summed", changed(grad="sum")
    if rule.parallel_residual:
        yield "residual on every rank", changed(parallel_residual=None)
    for value, move in rule.inputs:
        if move.dst == R:
            yield "input kept", changed(inputs=((value, KEEP),))
        if move.dst == RESIDUAL:
            yield "input whole", changed(inputs=((value, dataclasses.replace(move, dst=R)),))
    for position, move in rule.outputs:
        if move.dst in (RESIDUAL, P):
            yield "output whole", changed(outputs=((position, dataclasses.replace(move, dst=R)),))
        if move.dst == LOGITS:
            yield "logits left cut", changed(outputs=((position, KEEP),))
        if move.global_shape:
            yield "local shape shown", changed(outputs=((position, dataclasses.replace(move, global_shape=False)),))


def mutants(plan: Plan, use_parallel_residual: bool | None) -> Iterator[tuple[str, Plan]]:
    """Every plan that differs from ``plan`` by one mutant of one rule that is in force."""
    for i, rule in enumerate(plan.rules):
        for label, mutant in mutants_of(rule):
            rules = (*plan.rules[:i], *([mutant] if mutant else []), *plan.rules[i + 1 :])
            yield f"{rule.pattern}: {label}", dataclasses.replace(plan, rules=rules)
    for v, variant in enumerate(plan.variants):
        if variant.when["use_parallel_residual"] is not use_parallel_residual:
            continue
        for i, rule in enumerate(variant.rules):
            for label, mutant in mutants_of(rule):
                rules = (*variant.rules[:i], *([mutant] if mutant else []), *variant.rules[i + 1 :])
                variants = list(plan.variants)
                variants[v] = dataclasses.replace(variant, rules=rules)
                yield f"{rule.pattern}: {label}", dataclasses.replace(plan, variants=tuple(variants))


def judged(name: str, plan: Plan) -> str:
    """How a mutant ends: `refused` before anything ran, `refuted` by numbers or a crash, or `proved`."""
    _, cls, config = MODELS[name]
    verdicts = set()
    for leg in LEGS:
        proof = prove_model(
            lambda: live_model(cls, config, 0), plan, given=plan.name, model=name, legs=[leg], explain=False
        )
        findings = [found for result in proof.legs for found in result.findings]
        if findings and all(found.kind == "refused by bind" for found in findings):
            return "refused"
        if proof.verdict == "refuted":
            return "refuted"
        verdicts.add(proof.verdict)
    return verdicts.pop() if len(verdicts) == 1 else "not run"


PREPARED = "the module around gives it its input whole, and sums its gradient: there is nothing left to do"
UNGROUPED = "each linear prepares its own input: more collectives, the same numbers"
UNREAD = "nothing outside reads the norm's shape: the head's own input is declared"
IS_SO = "the sum is left to the block in the plan itself"
EQUIVALENT: dict[str, dict[str, str]] = {
    "llama": {
        "model.layers.*.self_attn.q_proj: input kept": PREPARED,
        "model.layers.*.self_attn.k_proj: input kept": PREPARED,
        "model.layers.*.self_attn.v_proj: input kept": PREPARED,
        "model.layers.*.mlp: dropped": UNGROUPED,
        "model.layers.*.mlp: input kept": UNGROUPED,
        "model.layers.*.mlp.gate_proj: input kept": PREPARED,
        "model.layers.*.mlp.up_proj: input kept": PREPARED,
        "model.norm: local shape shown": UNREAD,
    },
    "llama, tied": {"model.norm: local shape shown": UNREAD},
    "neox": {
        "gpt_neox.layers.*.attention.query_key_value: input kept": PREPARED,
        "gpt_neox.layers.*.mlp.dense_h_to_4h: input kept": PREPARED,
        "gpt_neox.layers.*.attention.dense: sum left undone": IS_SO,
        "gpt_neox.layers.*.mlp.dense_4h_to_h: sum left undone": IS_SO,
        "gpt_neox.final_layer_norm: local shape shown": UNREAD,
    },
    "neox, sequential": {
        "gpt_neox.layers.*.attention.query_key_value: input kept": PREPARED,
        "gpt_neox.layers.*.mlp.dense_h_to_4h: input kept": PREPARED,
        "gpt_neox.layers.*.mlp: dropped": UNGROUPED,
        "gpt_neox.layers.*.mlp: input kept": UNGROUPED,
        "gpt_neox.final_layer_norm: local shape shown": UNREAD,
    },
}
"""Mutants that change no number, and why."""


@pytest.mark.parametrize("name", MODELS)
def test_every_mutant_that_changes_numbers_is_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    builtin, _, config = MODELS[name]
    found: dict[str, list[str]] = {"refused": [], "refuted": [], "proved": [], "not run": []}
    for label, mutant in mutants(load_plan(builtin), getattr(config, "use_parallel_residual", None)):
        if name == "llama, tied" and not label.startswith(("model.embed_tokens", "lm_head", "model.norm")):
            continue  # as where it is not tied
        found[judged(name, mutant)].append(label)
    score = len(found["refused"]) + len(found["refuted"])
    total = sum(map(len, found.values())) - len(EQUIVALENT[name])
    with capsys.disabled():
        print(  # noqa: T201 - the score is for the reader of the log
            f"\n{name}: mutation score {score}/{total} ({len(found['refused'])} refused by bind, "
            f"{len(found['refuted'])} refuted), {len(found['proved'])} equivalent and proved"
        )
    assert found["not run"] == []
    assert sorted(found["proved"]) == sorted(EQUIVALENT[name])
    assert score == total > 0
