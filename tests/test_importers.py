"""Plans of transformers, DeepSpeed and torch, read as plans of this one; each means what its source does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from transformers import GptOssConfig, MixtralConfig, Phi3Config, PretrainedConfig, Qwen3Config
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from dtplan.author.importers import Imported, ImportPlanError, from_deepspeed, from_hf, from_styles
from dtplan.author.importers.assemble import assemble
from dtplan.author.importers.hf import MODULE_STYLES
from dtplan.cli import cli
from dtplan.prove.proof import legs_of, prove_model
from dtplan.prove.result import Proof
from tests.models import build, llama

TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "eager",
    "use_cache": False,
    "pad_token_id": 0,
}
QWEN3 = Qwen3Config(**TINY)
PHI3 = Phi3Config(**{key: value for key, value in TINY.items() if key != "head_dim"}, eos_token_id=1, bos_token_id=1)
SPECS: list[dict[str, Any]] = [
    {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.([qkv]|gate|up)_proj\.weight$"], "partition_type": "column"},
]


def proof_of(imported: Imported, config: PretrainedConfig, *, sequence_parallel: Any = "off") -> Proof:
    legs = legs_of([2], sequence_parallel, "off")
    return prove_model(lambda: build(config).train(), imported.plan(), given="x", model="x", legs=legs, steps=0)


def rules_of(imported: Imported) -> dict[str, Any]:
    return {rule.path: dict(rule.keys) for rule in imported.draft.rules}


# ------------------------------------------------------------------------------------------------------- transformers


def test_transformers_plan_of_qwen3_is_proved_with_its_gradient_sums() -> None:
    # Said here, since transformers says so of the embedding from some release after 5.17 on.
    imported = from_hf(build(QWEN3), {"model.embed_tokens": "embedding_rowwise"})
    rules = rules_of(imported)
    layer = "model.layers.*"
    assert rules[f"{layer}.self_attn.k_proj"] == {"style": "colwise", "unit": "kv_head", "input": "sum"}
    assert rules[f"{layer}.self_attn.q_norm"] == {"style": "replicate", "grad": "sum"}
    assert rules["lm_head"] == {"style": "colwise", "unit": "vocab", "input": "sum", "output": "gather"}
    assert rules["model.embed_tokens"] == {"style": "vocab", "unit": "vocab", "output": "sum"}
    assert proof_of(imported, QWEN3, sequence_parallel="both").verdict == "proved"


def test_what_transformers_leaves_out_is_left_out_and_refuted() -> None:
    norms = {f"model.layers.*.self_attn.{each}_norm": "replicate" for each in "qk"}
    imported = from_hf(build(QWEN3), norms)
    assert rules_of(imported)["model.layers.*.self_attn.q_norm"] == {"style": "replicate", "grad": "complete"}
    (leg,) = proof_of(imported, QWEN3).legs
    assert leg.verdict == "refuted"
    assert {name.split(".")[-2] for name in leg.wrong} == {"q_norm", "k_norm"}
    assert leg.findings[0].kind == "partial sum"


def test_experts_in_halves_are_sections_and_their_inputs_are_summed() -> None:
    config = MixtralConfig(**{**TINY, "num_local_experts": 4, "experts_implementation": "eager"})
    imported = from_hf(build(config))
    rules = rules_of(imported)
    experts = "model.layers.*.mlp.experts"
    assert rules[experts] == {"input": {"hidden_states": "sum", "top_k_weights": "sum"}, "output": "sum"}
    assert rules[f"{experts}.gate_up_proj"] == {"shard": 1, "sections": ["ffn", "ffn"]}
    assert rules[f"{experts}.down_proj"] == {"shard": 2, "unit": "ffn"}
    assert proof_of(imported, config).verdict == "proved"


def test_a_style_on_a_bare_parameter_is_the_dim_that_it_cuts() -> None:
    config = GptOssConfig(**TINY, num_local_experts=4, layer_types=["full_attention"])
    rules = rules_of(from_hf(build(config), {"model.layers.*.self_attn.sinks": "colwise"}))
    assert rules["model.layers.*.self_attn.sinks"] == {"shard": 0, "unit": "head"}


def test_every_style_that_transformers_registers_is_known() -> None:
    assert set(ALL_PARALLEL_STYLES) <= set(MODULE_STYLES)


@pytest.mark.parametrize(
    ("style", "rule"),
    [
        ("colwise_gather_output", {"style": "colwise", "input": "sum", "output": "gather"}),
        ("rowwise_split_input", {"style": "rowwise", "unit": "ffn", "input": "slice", "output": "sum"}),
        ("all_reduce", {"output": "sum"}),
        ("grouped_gemm", {"style": "todo"}),
    ],
)
def test_a_style_of_transformers_in_our_words(style: str, rule: dict[str, Any]) -> None:
    imported = from_hf(build(llama(intermediate_size=40)), {"model.layers.*.mlp.down_proj": style})
    assert rules_of(imported)["model.layers.*.mlp.down_proj"] == rule


def test_a_rule_that_names_nothing_and_a_style_that_nobody_knows() -> None:
    imported = from_hf(build(llama()), {"model.layers.*.mlp.gate_up": "colwise"})
    assert imported.dead == ("model.layers.*.mlp.gate_up",)
    assert "Its rule `model.layers.*.mlp.gate_up` names nothing in this model." in imported.text()
    with pytest.raises(ImportPlanError, match=r"'colwse', which is not known; did you mean 'colwise'"):
        from_hf(build(llama()), {"lm_head": "colwse"})
    with pytest.raises(ImportPlanError, match="no tensor-parallel plan for Sequential"):
        from_hf(nn.Sequential())


class Kernel(nn.Module):
    """Reads its convolution's weight, and asks its scale through a method."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv, self.scale, self.called = nn.Conv1d(width, width, 1), Scale(), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale.times(self.called(x @ self.conv.weight[:, :, 0]))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def test_modules_that_are_read_and_not_called_are_named() -> None:
    model = nn.ModuleDict({"kernel": Kernel()})
    rules = rules_of(assemble(model, {}, source="a test"))
    assert rules["kernel"] == {"style": "replicate", "reads": ["conv", "scale"]}


# ---------------------------------------------------------------------------------------------------------- DeepSpeed


def test_layer_specs_are_proved_and_what_they_do_not_name_stays_whole() -> None:
    given = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": SPECS}}}
    imported = from_deepspeed(build(llama()), given)
    rules = rules_of(imported)
    assert rules["model.layers.*.self_attn.o_proj"] == {"style": "rowwise", "unit": "head", "output": "sum"}
    assert rules["lm_head"] == rules["model.embed_tokens"] == {"style": "replicate"}
    assert proof_of(imported, llama()).verdict == "proved"


def test_the_first_spec_that_matches_counts_and_sums_are_read() -> None:
    specs = [
        {"patterns": [r".*q_proj\.weight$"], "partition_type": "skip"},
        {"patterns": [r".*_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
        *SPECS,
        {"patterns": ["lm_head"], "partition_type": "row"},
        {"patterns": ["never"], "model_types": ["bloom"]},
    ]
    imported = from_deepspeed(build(QWEN3), {"layer_specs": specs})
    rules = rules_of(imported)
    assert rules["model.layers.*.self_attn.q_proj"] == {"style": "replicate", "grad": "complete"}
    assert rules["model.layers.*.self_attn.q_norm.weight"] == {"style": "replicate", "grad": "sum"}
    assert rules["lm_head"]["input"] == "slice"
    assert imported.dead == ("layer_specs 6: never",)


def test_parts_of_a_fused_dim_become_sections() -> None:
    specs = [
        {"patterns": [r".*qkv_proj\.weight"], "shape": [[32, 16, 16], -1], "partition_dim": 0},
        {"patterns": [r".*gate_up_proj\.weight"], "shape": [2, -1]},
        {"patterns": [r".*(o|down)_proj\.weight"], "partition_type": "row", "shape": [4, 1, -1]},
    ]
    rules = rules_of(from_deepspeed(build(PHI3), {"layer_specs": specs}))
    assert rules["model.layers.*.self_attn.qkv_proj"]["sections"] == ["head", "kv_head", "kv_head"]
    assert rules["model.layers.*.mlp.gate_up_proj"]["sections"] == ["ffn", "ffn"]
    assert rules["model.layers.*.mlp.down_proj"] == {"style": "todo"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"zero_optimization": {}}, "no `layer_specs`"),
        ({"tensor_parallel": {"preset_model": "llama"}}, "write them out as `layer_specs`"),
        ({"layer_specs": [{"pattern": ["a"]}]}, "layer_specs 1: a spec is a mapping with a list of `patterns`"),
        ({"layer_specs": [{"patterns": ["a"], "partition_typ": "row"}]}, "did you mean 'partition_type'"),
        ({"layer_specs": [{"patterns": ["("]}]}, "'\\(' is no regular expression"),
        ({"layer_specs": [{"patterns": ["a"], "partition_type": "rows"}]}, "column, row or skip"),
        ({"layer_specs": SPECS, "strict_mode": True}, "strict_mode: no spec of layer_specs matches"),
    ],
)
def test_a_config_that_is_no_plan_says_what_is_wrong(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ImportPlanError, match=says):
        from_deepspeed(build(llama()), given)


# -------------------------------------------------------------------------------------------------------------- torch


def megatron() -> dict[str, ParallelStyle]:
    """What torch's tutorials write for Llama with sequence parallelism."""
    layer = "model.layers.*"
    attention: dict[str, Any] = {"hidden_states": Shard(1)}
    return {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        f"{layer}.input_layernorm": SequenceParallel(),
        f"{layer}.self_attn": PrepareModuleInput(
            input_kwarg_layouts=attention, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        f"{layer}.self_attn.[qkv]_proj": ColwiseParallel(),
        f"{layer}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        f"{layer}.post_attention_layernorm": SequenceParallel(),
        f"{layer}.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        f"{layer}.mlp.gate_proj": ColwiseParallel(),
        f"{layer}.mlp.up_proj": ColwiseParallel(),
        f"{layer}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def test_torch_styles_with_sequence_parallelism_are_proved_on_both_sides_of_the_switch() -> None:
    imported = from_styles(build(llama()), megatron())
    rules = rules_of(imported)
    assert rules["model.layers.*.self_attn"] == {"input": {"hidden_states": "R"}}
    assert rules["model.layers.*.self_attn.q_proj"] == {"style": "colwise", "unit": "head"}
    assert proof_of(imported, llama(), sequence_parallel="both").verdict == "proved"


def test_without_a_region_every_column_layer_sums_for_itself() -> None:
    styles = {key: style for key, style in megatron().items() if ".mlp" in key or key.endswith("mlp")}
    styles["model.layers.*.mlp"] = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True
    )
    rules = rules_of(from_styles(build(llama()), styles))
    assert rules["model.layers.*.mlp.up_proj"]["input"] == "sum"


def test_styles_that_cannot_be_read() -> None:
    model = build(llama())
    with pytest.raises(ImportPlanError, match="both name `lm_head`, which torch refuses"):
        from_styles(model, {"lm_head": ColwiseParallel(), "lm_*": ColwiseParallel()})
    with pytest.raises(ImportPlanError, match="`lm_head` is a str, no torch ParallelStyle"):
        from_styles(model, {"lm_head": "colwise"})  # type: ignore[dict-item]
    imported = from_styles(model, {"lm_head": SequenceParallel(sequence_dim=0)})
    assert rules_of(imported)["lm_head"] == {"style": "todo"}
    assert "no words for this: SequenceParallel along" in imported.text()


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **{k: v for k, v in TINY.items() if k[:4] != "attn"}}))
    return file


def new(*args: object) -> Any:
    return CliRunner().invoke(cli, ["new", *map(str, args)])


def test_the_command_writes_a_plan_from_each_source(config: Path, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"layer_specs": SPECS}))
    (tmp_path / "own.py").write_text(
        "from torch.distributed.tensor.parallel import ColwiseParallel\n"
        "def styles(model):\n"
        "    return {'lm_head': ColwiseParallel()}\n"
    )
    given = {
        ("hf",): r"lm_head: +{style: colwise, unit: vocab, input: sum, output: gather}",
        ("deepspeed", tmp_path / "ds.json"): r"lm_head: +replicate",
        ("styles", f"{tmp_path / 'own.py'}:styles"): r"lm_head: +{style: colwise, unit: vocab, input: sum}",
    }
    for source, head in given.items():
        found = new("--model", config, "--from", *source)
        assert found.exit_code == 0, found.output
        assert "serves: [LlamaForCausalLM]" in found.output
        assert re.search(head, found.output), found.output


def test_the_command_says_what_it_needs(config: Path, tmp_path: Path) -> None:
    assert isinstance(new("--model", config, "--from", "deepspeed").exception, ImportPlanError)
    assert "MODULE:ATTRIBUTE" in str(new("--model", config, "--from", "styles", "own.py").exception)
    assert "no such file" in str(new("--model", config, "--from", "styles", tmp_path / "no.py:x").exception)
    assert "cannot be read as JSON" in str(new("--model", config, "--from", "hf", tmp_path / "no.json").exception)
    found = new("--model", config, "some.json")
    assert found.exit_code == 2
    assert "read with --from only" in found.output
