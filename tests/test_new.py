"""`dtplan new`: what a draft finds out from the data flow, what it leaves to a person, and how it is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from dtplan._errors import BindError, DtplanError
from dtplan.author.draft import PlanDraft, RuleDraft
from dtplan.author.mend import REMARK
from dtplan.author.model import draft_plan
from dtplan.author.new import WHOLE, New, new_plan, proved
from dtplan.author.opinion import with_opinion
from dtplan.author.writer import folded, plan_text
from dtplan.cli import cli
from dtplan.plan.read import check, load_plan, parse_plan
from dtplan.plan.spec import Layout, Plan, R, S
from dtplan.planner.bind import bind
from dtplan.planner.meta import meta_model
from dtplan.prove.shrink import CannotProveError
from dtplan.testing import assert_plan_equivalent
from tests.families import CONFIGS, on_meta, plan_file
from tests.models import neox
from tests.models import on_meta as meta_of


def drafted(model: Any) -> Plan:
    return parse_plan(plan_text(draft_plan(model)), "draft.yaml")


def layout(model: nn.Module, plan: Plan) -> dict[str, tuple[Layout, tuple[int, ...], str, bool]]:
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


OTHERWISE = {
    "qwen3_next": "a draft takes ten seconds: its small model is not so small",
    "deepseek_v3": "the latents' gradients are summed as parameters, and not where they are read",
    "falcon": "its branches are joined before they are summed",
}
"""Families whose draft is another than the plan that a person wrote."""


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - OTHERWISE.keys()))
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


# ---------------------------------------------------------------------------------------------- what is left undecided

KEPT_WHOLE = "{style: replicate, below: true, input: R, output: {0: residual}}"


def config_file(folder: Path, config: PretrainedConfig, cls: str) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps({**config.to_dict(), "architectures": [cls]}, default=str))
    return str(file)


@pytest.fixture(scope="module")
def norms_per_head() -> PlanDraft:
    """StableLM with a norm module for every head: which of a list a rank keeps, the language cannot say."""
    config = transformers.StableLmConfig(num_hidden_layers=2, qk_layernorm=True, pad_token_id=0)
    return draft_plan(meta_of(config))


def test_what_is_not_decided_is_todo_with_what_was_seen(norms_per_head: PlanDraft) -> None:
    todo = {rule.path: rule for rule in norms_per_head.undecided}
    assert set(todo) == {"model.layers.*.self_attn"}
    assert "q_layernorm.norms.0.weight" in todo["model.layers.*.self_attn"].notes[0]
    text = plan_text(norms_per_head).replace("\n    #  ", "")
    assert f"# choices: {KEPT_WHOLE}, with which every rank does all of it, or rules that" in text


def test_the_choice_that_is_written_above_a_todo_can_be_taken(norms_per_head: PlanDraft) -> None:
    text = plan_text(norms_per_head)
    assert text.count(" todo\n") == 1
    taken = parse_plan(text.replace(" todo\n", f" {KEPT_WHOLE}\n"))
    config = transformers.StableLmConfig(num_hidden_layers=2, qk_layernorm=True, pad_token_id=0)
    placed = layout(meta_of(config), taken)
    assert placed["model.layers.0.self_attn.q_layernorm.norms.0.weight"][0] == R
    assert placed["model.layers.0.mlp.up_proj.weight"][0] == S(0)


def test_a_parallel_block_with_a_branch_that_stays_whole_is_no_parallel_residual() -> None:
    """A whole branch hands out no term of a sum, so its block reduces branch by branch, as the choice offered says."""
    config = transformers.StableLmConfig(
        num_hidden_layers=2, qk_layernorm=True, use_parallel_residual=True, pad_token_id=0
    )
    rules = {rule.path: rule.keys for rule in draft_plan(meta_of(config)).rules}
    assert rules["model.layers.*"] == {"input": "residual"}
    assert rules["model.layers.*.mlp.down_proj"]["output"] == "residual"


def test_lint_refuses_a_todo_and_names_its_line(norms_per_head: PlanDraft, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(plan_text(norms_per_head))
    lines = file.read_text().splitlines()
    found = [f for f in check(file) if f.code == "DTP307"]
    assert [lines[f.line - 1].split(":")[0].strip() for f in found] == ["self_attn"]


def test_a_block_that_flattens_in_front_of_cut_layers_is_told() -> None:
    draft = draft_plan(meta_of(transformers.OPTConfig(num_hidden_layers=2)))
    block = next(rule for rule in draft.rules if rule.path == "model.decoder.layers.*")
    assert "flattens [batch, sequence] in front of fc1" in block.notes[0]
    assert draft.undecided == ()  # also where a relu lets nothing of a column through


# -------------------------------------------------------------------------------------------------- the second opinion


def test_where_transformers_says_something_else_a_comment_tells_it() -> None:
    theirs = {"model.layers.*.mlp.down_proj": "rowwise_split_input", "model.layers.*.mlp.up_proj": "colwise"}
    rules = (
        RuleDraft(path="model.layers.*.mlp.up_proj", keys={"style": "colwise"}),
        RuleDraft(path="model.layers.*.mlp.gate_proj", keys={"style": "colwise"}),
        RuleDraft(path="model.layers.*.mlp.down_proj", keys={"style": "rowwise"}),
    )
    told = with_opinion(PlanDraft(name="x", rules=rules), theirs)
    assert [rule.remark for rule in told.rules] == ["", "transformers: whole", "transformers: rowwise_split_input"]


def test_where_transformers_says_the_same_it_is_told_once(tmp_path: Path) -> None:
    made = new_plan(config_file(tmp_path, transformers.MistralConfig(num_hidden_layers=2), "MistralForCausalLM"))
    assert "# transformers' own plan cuts the same layers in the same way\n" in made.text
    assert "transformers:" not in made.text


# ------------------------------------------------------------------------------------------------------- how it is told


def rule(path: str, **keys: Any) -> RuleDraft:
    return RuleDraft(path=path, keys=keys)


def test_rules_that_say_the_same_are_folded_and_mean_the_same() -> None:
    rules = [rule("h.*.k_proj", style="colwise"), rule("h.*.v_proj", style="colwise"), rule("h.*.ln_1", style="norm")]
    assert [one.path for one in folded(rules)] == ["h.*.{k,v}_proj", "h.*.ln_1"]
    text = plan_text(PlanDraft(name="x", rules=tuple(rules)))
    assert {one.pattern for one in parse_plan(text).rules} == {one.path for one in rules}


def test_a_comment_keeps_rules_apart() -> None:
    rules = [rule("h.*.k_proj", style="norm"), RuleDraft(path="h.*.v_proj", keys={"style": "norm"}, remark="why")]
    assert [one.path for one in folded(rules)] == ["h.*.k_proj", "h.*.v_proj"]


def test_a_long_rule_is_written_over_several_lines() -> None:
    keys = {"input": {f"argument_{i}": {"from": "R", "to": "S(0)", "unit": "head"} for i in range(4)}}
    text = plan_text(PlanDraft(name="x", units={"head": "n"}, rules=(RuleDraft(path="a", keys=keys),)))
    assert "\n  a:\n    input: {argument_0:" in text
    assert len(parse_plan(text).rules[0].inputs) == 4


@pytest.mark.parametrize("word", ["on", "yes", "null", "1e3", "a: b", "# no", "*x"])
def test_words_that_yaml_would_read_otherwise_are_quoted(word: str) -> None:
    assert f'"{word}"' in plan_text(PlanDraft(name=word))
    assert parse_plan(plan_text(PlanDraft(name=word, rules=(rule("a", style="norm"),)))).name == word


# ------------------------------------------------------------------------------------------------------ the command


def run(*args: str) -> Any:
    return CliRunner().invoke(cli, ["new", *args])


def test_the_command_drafts_proves_and_writes_a_file(tmp_path: Path) -> None:
    model = config_file(tmp_path, CONFIGS["gpt2"](), "GPT2LMHeadModel")
    file = tmp_path / "mine.yaml"
    done = run("--model", model, "-o", str(file), "--prove", "--tp", "2")
    assert (done.exit_code, done.output) == (0, f"{file}: 13 rules; proved\n")
    assert "# proved: 4 of 4 legs at tp 2, on a small model;" in file.read_text()
    assert check(file) == ()
    assert run("--model", model, "-o", str(file)).exit_code == 2
    assert "is there already" in run("--model", model, "-o", str(file)).output


def test_a_proof_takes_what_was_not_decided_as_whole_on_every_rank(tmp_path: Path) -> None:
    config = transformers.StableLmConfig(num_hidden_layers=2, qk_layernorm=True, pad_token_id=0)
    model = config_file(tmp_path, config, "StableLmForCausalLM")
    assert run("--model", model).output.count(" todo\n") == 1
    done = run("--model", model, "--prove", "--tp", "2")
    assert done.exit_code == 0
    assert "todo" not in done.output
    assert "# proved: 4 of 4 legs at tp 2" in done.output
    assert f"# {WHOLE}\n" in done.output
    assert f"self_attn:                {KEPT_WHOLE}" in done.output


def test_a_draft_whose_todo_has_no_choice_is_not_proved() -> None:
    rules = (RuleDraft(path="a", keys={"style": "todo"}), RuleDraft(path="b", keys={"style": "norm"}))
    wrong = PlanDraft(name="x", rules=rules)
    found = proved(New(wrong, plan_text(wrong)), "no model is read", tp=[2])
    assert (found.exit_code, found.unproved) == (2, "not proved: 1 rule is `todo`")
    assert "# not proved: 1 rule is `todo`\n" in found.text


def test_what_a_proof_refutes_even_when_it_is_whole_stays_todo(tmp_path: Path) -> None:
    model = config_file(tmp_path, CONFIGS["mistral"](), "MistralForCausalLM")
    made = new_plan(model)
    wrong = tuple(
        dataclasses.replace(r, keys={"style": "todo"}, choices=({"style": "norm"},)) if r.path.endswith("q_proj") else r
        for r in made.draft.rules
    )
    draft = dataclasses.replace(made.draft, rules=wrong)
    found = proved(New(draft, plan_text(draft)), model, tp=[2])
    assert found.exit_code == 2
    assert found.unproved == "not proved: 1 rule is `todo`; where every rank does all of it, refuted"
    assert len(found.draft.undecided) == 1


def test_sequence_parallelism_that_a_proof_refutes_is_left_out_of_the_plan(tmp_path: Path) -> None:
    """OPT's blocks make one dim of batch and sequence."""
    model = config_file(tmp_path, transformers.OPTConfig(num_hidden_layers=2), "OPTForCausalLM")
    found = proved(new_plan(model), model, tp=[2])
    assert found.proof is not None
    assert [str(leg.leg) for leg in found.proof.legs] == ["tp 2", "tp 2, loss_parallel"]
    assert found.proof.verdict == "proved"
    assert "residual: {sequence_parallel: R, otherwise: R}\n" in found.text
    assert "# no sequence parallelism, since a proof refuted it: model.decoder.layers.0.fc1: crash\n" in found.text
    with pytest.raises(BindError, match="DTP416"):
        bind(meta_model(model), parse_plan(found.text), tp=2, sequence_parallel=True)


def test_numbers_that_every_column_reads_are_whole() -> None:
    """Apertus' activation has two learned numbers, each of which moves only some columns of a batch."""
    config = transformers.ApertusConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
    rules = {rule.path: dict(rule.keys) for rule in draft_plan(meta_of(config)).rules}
    assert rules["model.layers.*.mlp.up_proj"] == {"style": "colwise", "unit": "ffn"}
    assert rules["model.layers.*.mlp.act_fn"] == {"style": "replicate", "grad": "sum"}


def test_products_of_one_sum_over_different_columns_are_left_undecided() -> None:
    """CTRL numbers the two products of its MLP as if they were alike."""
    config = transformers.CTRLConfig(n_layer=2, n_embd=64, n_head=8, dff=96, vocab_size=64)
    todo = [rule for rule in draft_plan(meta_of(config)).rules if rule.undecided]
    assert any("sum over different columns" in note for rule in todo for note in rule.notes)


def test_a_wrong_draft_is_mended_by_what_its_proof_found(tmp_path: Path) -> None:
    model = config_file(tmp_path, CONFIGS["phi3"](), "Phi3ForCausalLM")
    made = new_plan(model)
    path = "model.layers.*.mlp.gate_up_proj"
    keys = {"style": "colwise", "unit": "ffn"}
    rules = (dataclasses.replace(r, keys=keys) if r.path == path else r for r in made.draft.rules)
    wrong = dataclasses.replace(made.draft, rules=tuple(rules))
    found = proved(New(wrong, plan_text(wrong)), model, tp=[2])
    assert found.proof is not None
    assert found.proof.verdict == "proved"
    assert next(one for one in found.draft.rules if one.path == path).keys["sections"] == ["ffn", "ffn"]
    assert REMARK in found.text


def test_a_class_without_blocks_is_refused_in_words(tmp_path: Path) -> None:
    done = run("--model", config_file(tmp_path, transformers.MambaConfig(), "MambaForCausalLM"))
    assert isinstance(done.exception, CannotProveError)


def test_a_config_with_numbers_that_json_has_no_words_for_is_read(tmp_path: Path) -> None:
    """transformers writes {"__float__": "Infinity"} for them, Mamba's `time_step_limit` say."""
    transformers.BambaConfig(num_hidden_layers=2, architectures=["BambaForCausalLM"]).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    config: Any = meta_model(str(tmp_path)).config
    assert config.time_step_limit[1] == float("inf")


def test_a_config_that_its_class_refuses_is_told_in_a_line(tmp_path: Path) -> None:
    broken = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(broken))
    done = run("--model", str(tmp_path))
    assert isinstance(done.exception, DtplanError)
    assert "transformers cannot read the config" in str(done.exception)


def test_what_only_chooses_is_whole_and_has_no_gradient() -> None:
    """DeepSeek-V3.2's indexer says which keys are looked at; no gradient comes back from that."""
    config = transformers.DeepseekV32Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=8,
        mlp_layer_types=["dense", "sparse"],
    )
    rules = {rule.path: dict(rule.keys) for rule in draft_plan(meta_of(config)).rules}
    assert rules["model.layers.*.self_attn.indexer.wq_b"] == {"style": "replicate", "grad": "complete"}
    assert rules["model.layers.*.self_attn.q_b_proj"] == {"style": "colwise", "unit": "head"}
