"""`dtplan new`: what a draft finds out from the data flow, what it leaves to a person, and how it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dtplan.author.draft import PlanDraft, RuleDraft
from dtplan.author.model import draft_plan
from dtplan.author.new import new_plan
from dtplan.author.writer import WIDTH, folded, plan_text
from dtplan.cli import cli
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import check, load_plan, parse_plan
from dtplan.plan.spec import Plan
from dtplan.planner.bind import bind
from dtplan.testing import assert_plan_equivalent
from tests.families import CONFIGS, on_meta, plan_file
from tests.models import llama, neox
from tests.models import on_meta as meta_of


def drafted(model: Any) -> Plan:
    return parse_plan(plan_text(draft_plan(model)), "draft.yaml")


def layout(model: nn.Module, plan: Plan) -> dict[str, object]:
    """Where every tensor lies at degree 2, in which sections, how its gradient is made whole, who adds it."""
    bound = bind(model, plan, tp=2)
    return {
        f"{name}.{t.name}".strip("."): (t.placement, t.sections, t.grad, t.once)
        for module in bound.modules
        for name in module.names
        for t in module.tensors
    }


# ------------------------------------------------------------------------------------------------------- what is found


def test_the_draft_for_llama_says_what_the_built_in_plan_says() -> None:
    assert drafted(meta_of(transformers.LlamaConfig(num_hidden_layers=2))).digest == load_plan("llama").digest


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("llava", "qwen3_next", "deepseek_v3")])
def test_a_draft_places_every_tensor_as_the_plan_that_a_person_wrote(name: str) -> None:
    model = on_meta(name)
    written = plan_file(name)
    assert layout(model, drafted(model)) == layout(model, load_plan(written))


def test_a_parallel_residual_is_seen_in_the_data_flow() -> None:
    for parallel in (True, False):
        model = meta_of(neox(use_parallel_residual=parallel))
        draft = draft_plan(model)
        block = next(rule for rule in draft.rules if rule.path == "gpt_neox.layers.*")
        assert block.keys == ({"parallel_residual": "hidden_states"} if parallel else {"input": "residual"})
        assert layout(model, drafted(model)) == layout(model, load_plan("gpt_neox"))


# ------------------------------------------------------------------------------------------------- names say nothing


class OddConfig(PretrainedConfig):
    """Heads, columns and a vocabulary."""

    model_type = "odd"
    vocab_size: int = 64
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    intermediate_size: int = 44


class Scramble(nn.Module):
    """Attention whose parts have each other's names, and values in front of keys in one matrix."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.out_proj = nn.Linear(width, width)  # the queries
        self.q_proj = nn.Linear(width, width)  # the last product
        self.norm = nn.Linear(width, 2 * width)  # values, then keys
        self.times = config.num_attention_heads

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        v, k = self.norm(x).chunk(2, dim=-1)
        q, k, v = (t.view(rows, length, self.times, -1).transpose(1, 2) for t in (self.out_proj(x), k, v))
        out: Tensor = self.q_proj((torch.softmax(q @ k.mT, dim=-1) @ v).transpose(1, 2).flatten(2))
        return out


class OddBlock(nn.Module):
    """A norm in front of each branch."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.mlp = Scramble(config)
        self.down_proj = nn.LayerNorm(config.hidden_size)
        self.gate = nn.LayerNorm(config.hidden_size)
        self.attention = nn.ModuleDict(
            {
                "second": nn.Linear(config.hidden_size, config.intermediate_size),
                "first": nn.Linear(config.intermediate_size, config.hidden_size),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.down_proj(x))
        return x + self.attention["first"](torch.relu(self.attention["second"](self.gate(x))))


class OddForCausalLM(PreTrainedModel):
    """Two blocks between an embedding and a head."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stack = nn.ModuleList(OddBlock(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = self.words(input_ids)
        for block in self.stack:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def odd_model() -> nn.Module:
    with torch.device("meta"):
        return OddForCausalLM(OddConfig())


def test_roles_come_from_the_data_flow_and_not_from_names() -> None:
    rules = {rule.path: dict(rule.keys) for rule in draft_plan(odd_model()).rules}
    block = "stack.*"
    assert rules[f"{block}.mlp"] == {"input": "R", "localize": ["times"]}
    assert rules[f"{block}.mlp.out_proj"] == {"style": "colwise", "unit": "head"}
    assert rules[f"{block}.mlp.norm"] == {"style": "colwise", "sections": ["head", "head"]}
    assert rules[f"{block}.mlp.q_proj"] == {"style": "rowwise", "unit": "head", "output": "residual"}
    assert rules[f"{block}.down_proj"] == rules[f"{block}.gate"] == {"style": "norm"}
    assert rules[f"{block}.attention.second"] == {"style": "colwise", "unit": "ffn"}
    assert rules[f"{block}.attention.first"] == {"style": "rowwise", "unit": "ffn", "output": "residual"}


def test_the_draft_of_the_scrambled_model_is_proved() -> None:
    assert_plan_equivalent(lambda: OddForCausalLM(OddConfig()), drafted(odd_model()), tp=2, sequence_parallel=False)
