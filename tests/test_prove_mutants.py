"""Mutation of plans: every change that changes numbers is refused by bind or refuted by the proof."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import transformers
from transformers import GPTNeoXForCausalLM, LlamaForCausalLM, PretrainedConfig

from dtplan.plan.read import load_plan
from dtplan.plan.spec import Plan, Rule
from dtplan.planner.bind import bind
from dtplan.prove.diagnose import diagnose
from dtplan.prove.live import live_model
from dtplan.prove.proof import _run, job_of, small_failure
from dtplan.prove.ranks import Job, bound_plan
from dtplan.prove.result import Leg
from dtplan.prove.smallest import way
from tests.families import CONFIGS, VARIANTS, plan_file
from tests.models import llama, neox
from tests.mutation import mutants

BUILTINS: dict[str, tuple[str, Any, PretrainedConfig]] = {
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
FAMILIES = ("bloom", "gemma2", "gpt2", "gpt_oss", "gptj", "llava", "mixtral", "phi3", "qwen3")
SAMPLED = {
    "deepseek_v3": ("deepseek_v3", CONFIGS["deepseek_v3"]),
    "falcon": ("falcon", CONFIGS["falcon"]),
    "falcon 40B": VARIANTS["falcon 40B"],
    "falcon RW": VARIANTS["falcon RW"],
    "gpt_bigcode": ("gpt_bigcode", CONFIGS["gpt_bigcode"]),
    "olmo2": ("olmo2", CONFIGS["olmo2"]),
    "qwen3_next": ("qwen3_next", CONFIGS["qwen3_next"]),
    "starcoder2": ("starcoder2", CONFIGS["starcoder2"]),
}
"""Of these a part of the mutants is judged here, the same every time; all of them by ``python tests/mutants.py``."""
ONE_OF = 8
LEGS = (Leg(tp=2, sequence_parallel=True, loss_parallel=True), Leg(tp=2))
"""A mutant is proved where no leg refutes it; the second is not run once the first did."""

PREPARED = "the module around gives it its input whole, and sums its gradient: there is nothing left to do"
UNGROUPED = "each linear prepares its own input: more collectives, the same numbers"
UNREAD = "nothing outside reads the norm's shape: the head's own input is declared"
NOT_HERE = "the config has no such module: the rule is for others of the family"
ALIKE = "the parts are of one size in this config"
IS_SO = "the sum is left to the block in the plan itself"
_QKV = {f"model.layers.*.self_attn.{x}_proj: input kept": PREPARED for x in "qkv"}
_MLP = {
    "model.layers.*.mlp: dropped": UNGROUPED,
    "model.layers.*.mlp: input kept": UNGROUPED,
    "model.layers.*.mlp.gate_proj: input kept": PREPARED,
    "model.layers.*.mlp.up_proj: input kept": PREPARED,
}
EQUIVALENT: dict[str, dict[str, str]] = {
    "llama": {
        **_QKV,
        **_MLP,
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
    "bloom": {
        "transformer.h.*.self_attention.query_key_value: input kept": PREPARED,
        "transformer.h.*.mlp: dropped": UNGROUPED,
        "transformer.h.*.mlp: input kept": UNGROUPED,
        "transformer.h.*.mlp.dense_h_to_4h: input kept": PREPARED,
    },
    "gpt2": {
        "transformer.h.*.attn: input kept": UNGROUPED,
        "transformer.h.*.attn.c_attn: input kept": PREPARED,
        "transformer.h.*.mlp: dropped": UNGROUPED,
        "transformer.h.*.mlp: input kept": UNGROUPED,
        "transformer.h.*.mlp.c_fc: input kept": PREPARED,
    },
    "deepseek_v3": {
        **{
            f"model.layers.*.self_attn.q_proj: {what}": NOT_HERE
            for what in ("dropped", "rowwise", "input kept", "whole", "whole, gradient summed")
        },
        **{f"model.layers.*.mlp.{x}_proj: input kept": PREPARED for x in ("gate", "up")},
        **{f"model.layers.*.mlp.shared_experts.{x}_proj: input kept": PREPARED for x in ("gate", "up")},
        "model.layers.*.mlp.down_proj: sum left undone": IS_SO,
        "model.layers.*.mlp.shared_experts.down_proj: sum left undone": IS_SO,
    },
    "falcon": {
        "transformer.h.*.self_attention: input kept": UNGROUPED,
        "transformer.h.*.self_attention.query_key_value: input kept": PREPARED,
        "transformer.h.*.mlp: dropped": UNGROUPED,
        "transformer.h.*.mlp: input kept": UNGROUPED,
        "transformer.h.*.mlp.dense_h_to_4h: input kept": PREPARED,
        **{
            f"transformer.h.*.post_attention_layernorm: {what}": NOT_HERE
            for what in ("dropped", "gradient complete", "gradient summed")
        },
    },
    "falcon 40B": {
        "transformer.h.*.self_attention.query_key_value: input kept": PREPARED,
        "transformer.h.*.self_attention.dense: sum left undone": IS_SO,
        "transformer.h.*.mlp.dense_h_to_4h: input kept": PREPARED,
        "transformer.h.*.mlp.dense_4h_to_h: sum left undone": IS_SO,
        **{f"transformer.h.*.input_layernorm: {what}": NOT_HERE for what in ("dropped", "gradient complete")},
    },
    "falcon RW": {
        "transformer.h.*.self_attention: input hidden_states kept": UNGROUPED,
        "transformer.h.*.self_attention.query_key_value: input kept": PREPARED,
        "transformer.h.*.mlp: dropped": UNGROUPED,
        "transformer.h.*.mlp: input kept": UNGROUPED,
        "transformer.h.*.mlp.dense_h_to_4h: input kept": PREPARED,
    },
    "gpt_bigcode": {"transformer.h.*.attn.c_attn: input kept": PREPARED},
    "gpt_oss": _QKV,
    "gptj": {
        **{f"transformer.h.*.attn.{x}_proj: input kept": PREPARED for x in "qkv"},
        "transformer.h.*.attn.out_proj: sum left undone": IS_SO,
        "transformer.h.*.mlp.fc_in: input kept": PREPARED,
        "transformer.h.*.mlp.fc_out: sum left undone": IS_SO,
    },
    "mixtral": _QKV,
    "olmo2": {**_QKV, **_MLP},
    "qwen3_next": {
        **_QKV,
        "model.layers.*.linear_attn: input kept": UNGROUPED,
        "model.layers.*.linear_attn.in_proj_qkvz: input kept": PREPARED,
        "model.layers.*.linear_attn.in_proj_ba: input kept": PREPARED,
        "model.layers.*.linear_attn.conv1d.weight: parts in another order": ALIKE,
        "model.layers.*.mlp.shared_expert.gate_proj: input kept": PREPARED,
        "model.layers.*.mlp.shared_expert.up_proj: input kept": PREPARED,
    },
    "starcoder2": {
        **_QKV,
        "model.layers.*.mlp: dropped": UNGROUPED,
        "model.layers.*.mlp: input kept": UNGROUPED,
        "model.layers.*.mlp.c_fc: input kept": PREPARED,
    },
    "phi3": {
        "model.layers.*.self_attn.qkv_proj: input kept": PREPARED,
        "model.layers.*.mlp: dropped": UNGROUPED,
        "model.layers.*.mlp: input kept": UNGROUPED,
        "model.layers.*.mlp.gate_up_proj: input kept": PREPARED,
    },
}
"""Mutants that change no number, and why."""


@pytest.mark.parametrize("name", BUILTINS)
def test_every_mutant_of_a_built_in_plan_that_changes_numbers_is_found(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    builtin, cls, config = BUILTINS[name]

    def wanted(rule: Rule) -> bool:  # the rest is as where it is not tied
        return name != "llama, tied" or rule.pattern in {"model.embed_tokens", "lm_head", "model.norm"}

    with capsys.disabled():
        score(name, of(cls, config, load_plan(builtin), wanted))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_mutant_of_a_family_s_own_rules_is_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """But those of embeddings, norms and heads, which are as in the built-in plans unless it extends one."""
    with capsys.disabled():
        score(name, of_family(name, CONFIGS[name]()))


@pytest.mark.parametrize("name", SAMPLED)
def test_a_part_of_a_family_s_mutants_is_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan, config = SAMPLED[name]
    with capsys.disabled():
        score(name, of_family(plan, config(), one_of=ONE_OF), one_of=ONE_OF)


def of_family(name: str, config: Any, *, one_of: int = 1) -> Iterator[tuple[str, str]]:
    """The mutants of a family's own rules, with how they end."""
    plan = load_plan(plan_file(name))
    text: Any = config.get_text_config()
    if name not in ("deepseek_v3", "qwen3_next"):  # whose two layers are of two kinds
        text.num_hidden_layers = 1
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:1]

    def wanted(rule: Rule) -> bool:
        own = rule.at.file.endswith(f"{name}.yaml")
        return own and (len(plan.files) > 1 or (rule.style not in {"norm", "vocab"} and rule.pattern != "lm_head"))

    yield from of(getattr(transformers, plan.serves[0]), config, plan, wanted, one_of=one_of)


def is_chosen(label: str, one_of: int) -> bool:
    """Whether a mutant is one of the part that is judged: told from its name, so that it stays."""
    return zlib.crc32(label.encode()) % one_of == 0


def of(cls: Any, config: Any, plan: Plan, wanted: Any, *, one_of: int = 1) -> Iterator[tuple[str, str]]:
    """Each mutant, or one of so many, with how it ends."""
    model = live_model(cls, config, 0)
    job, _ = job_of(model, plan, LEGS[0], LEGS, seed=0)
    units = {unit.name: unit.count for unit in bind(model, plan, tp=2).units}
    for label, mutant in mutants(plan, config, units, wanted):
        if is_chosen(label, one_of):
            yield label, judged(dataclasses.replace(job, plan=mutant))


def judged(job: Job) -> str:
    """`refused` before anything ran, `refuted` by numbers or a crash, or `proved`."""
    verdicts = set()
    for leg in LEGS:
        result = _run(dataclasses.replace(job, leg=leg), None)
        if result.findings and all(found.kind == "refused by bind" for found in result.findings):
            return "refused"
        if result.verdict == "refuted":
            return "refuted"
        verdicts.add(result.verdict)
    return verdicts.pop() if len(verdicts) == 1 else "not run"


def score(name: str, judgements: Iterator[tuple[str, str]], *, one_of: int = 1) -> None:
    """Print the score; every mutant that is not explained must be found."""
    found: dict[str, list[str]] = {"refused": [], "refuted": [], "proved": [], "not run": []}
    for label, verdict in judgements:
        found[verdict].append(label)
    explained = [label for label in EQUIVALENT.get(name, {}) if is_chosen(label, one_of)]
    caught = len(found["refused"]) + len(found["refuted"])
    total = sum(map(len, found.values())) - len(found["proved"])
    print(  # noqa: T201 - the score is for the reader of the log
        f"\n{name}: mutation score {caught}/{total} ({len(found['refused'])} refused by bind, "
        f"{len(found['refuted'])} refuted), {len(found['proved'])} equivalent and proved"
    )
    assert found["not run"] == []
    assert set(found["proved"]) == set(explained)
    assert caught == total > 0


def test_a_mutant_of_each_kind_shrinks_to_a_small_config() -> None:
    """One layer, a head or two a rank, one sequence of four tokens: and it fails in the same way there."""
    config = llama(num_hidden_layers=2, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    plan, leg = load_plan("llama"), LEGS[0]
    job, walk = job_of(live_model(LlamaForCausalLM, config, 0), plan, leg, LEGS, seed=0)
    units = {unit.name: unit.count for unit in bind(job.model, plan, tp=2).units}
    kinds: set[str] = set()
    for label, mutant in mutants(plan, config, units, lambda rule: rule.path[:2] != ("model", "embed_tokens")):
        kind = label.split(": ")[1]
        trial = dataclasses.replace(job, plan=mutant)
        if kind in kinds or not ran_and_failed(trial):
            continue
        failed = diagnose(trial, bound_plan(trial), walk)[0].finding
        small = small_failure(LlamaForCausalLM, config, mutant, leg, failed, batch=(4, 16), seed=0, seconds=math.inf)
        assert small is not None, label
        assert way(small.finding) == way(failed)
        assert small.batch == (1, 4) or failed.name == "the model", label  # the loss fails at labels of another rank
        assert small.changes["num_hidden_layers"] == 1, label
        assert small.changes.get("num_attention_heads", 4) <= 4
        kinds.add(kind)
    assert len(kinds) >= 10, kinds


def ran_and_failed(job: Job) -> bool:
    result = _run(job, None)
    return result.verdict == "refuted" and not result.findings
