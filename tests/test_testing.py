"""``dtplan.testing`` as users have it: strategies, the assertion, the plugin, the profiles."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import dtplan
import dtplan.testing
from dtplan.plan.library import builtin_plans
from dtplan.prove.pool import GlooPool
from dtplan.prove.shrink import CannotProveError
from dtplan.testing import assert_plan_equivalent, degrees, model_configs, plans, token_batches
from dtplan.testing.profiles import load_profile, share
from dtplan.testing.strategies import on_meta
from tests.models import llama, neox

ROOT = Path(__file__).parents[1]

# ------------------------------------------------------------------------------------------------------- strategies


def drawn(strategy: st.SearchStrategy[Any], condition: Callable[[Any], bool]) -> Any:
    """A draw for which the condition holds, the first that comes.

    Raises:
        NoSuchExample: none of 40 was one.
    """
    return find(strategy, condition, settings=settings(max_examples=40, phases=[Phase.generate], database=None))


ARCHITECTURES = ("llama", "gpt_neox", "qwen3", "mistral", "gemma2", "gpt2", "gpt_bigcode", "phi3", "bloom")


@given(st.data())
def test_a_drawn_config_makes_a_model_that_runs(data: st.DataObject) -> None:
    config = data.draw(model_configs(data.draw(st.sampled_from(ARCHITECTURES))))
    model = AutoModelForCausalLM.from_config(config)
    batch = data.draw(token_batches(config.vocab_size))
    assert model(input_ids=batch["input_ids"]).logits.shape == (*batch["labels"].shape, config.vocab_size)


LLAMAS = {
    "one layer": lambda c: c.num_hidden_layers == 1,
    "two layers": lambda c: c.num_hidden_layers == 2,
    "grouped queries": lambda c: c.num_attention_heads > c.num_key_value_heads > 1,
    "heads of another width": lambda c: c.head_dim * c.num_attention_heads != c.hidden_size,
    "tied": lambda c: c.tie_word_embeddings,
    "biases": lambda c: c.attention_bias and c.mlp_bias,
    "uneven vocabulary": lambda c: c.vocab_size % 2 == 1,
    "another activation": lambda c: c.hidden_act == "relu",
}


@pytest.mark.parametrize("kind", LLAMAS)
def test_configs_vary_in_what_a_plan_can_get_wrong(kind: str) -> None:
    assert LLAMAS[kind](drawn(model_configs("llama"), LLAMAS[kind]))


def test_configs_of_neox_have_both_residuals() -> None:
    for parallel in (False, True):
        drawn(model_configs("gpt_neox"), partial(_has_residual, parallel))


def _has_residual(parallel: bool, config: Any) -> bool:
    return bool(config.use_parallel_residual is parallel)


def test_fields_may_be_given_or_drawn_otherwise() -> None:
    strategy = model_configs(LlamaConfig, vocab_size=st.sampled_from((31, 37)), num_hidden_layers=1)
    with pytest.raises(NoSuchExample):
        drawn(strategy, lambda c: c.vocab_size not in (31, 37) or c.num_hidden_layers != 1)


@given(st.data())
def test_drawn_degrees_bind(data: st.DataObject) -> None:
    arch = data.draw(st.sampled_from(("llama", "gpt_neox")))
    config = data.draw(model_configs(arch))
    sizes = data.draw(degrees(config, arch, shard=(1, 2), replicate=(1, 2)))
    bound = dtplan.bind(on_meta(config), arch, tp=sizes["tp"], shard=sizes["shard"], replicate=sizes["replicate"])
    assert bound.degrees == sizes
    assert sizes["tp"] * sizes["shard"] * sizes["replicate"] <= 8


def test_degrees_leave_out_what_bind_refuses() -> None:
    config = llama(num_key_value_heads=2)
    with pytest.raises(NoSuchExample):
        drawn(degrees(config, "llama"), lambda sizes: sizes["tp"] not in (1, 2))
    with pytest.raises(ValueError, match=r"tp \(4,\), of which \(\) bind"):
        degrees(config, "llama", tp=(4,))


@given(plans())
def test_drawn_plans_mean_what_a_built_in_means(plan: dtplan.Plan) -> None:
    (builtin,) = (found for name in builtin_plans() if (found := dtplan.load_plan(name)).serves == plan.serves)
    assert plan.digest == builtin.digest


@pytest.mark.parametrize(
    "otherwise",
    [
        lambda plan, builtin: [r.path for r in plan.rules] != [r.path for r in builtin.rules],
        lambda plan, builtin: plan.name != builtin.name,
        lambda plan, builtin: plan.files != builtin.files and len(plan.files) > 1,
    ],
    ids=["reordered", "renamed", "extended"],
)
def test_plans_are_written_otherwise(otherwise: Any) -> None:
    builtin = dtplan.load_plan("llama")
    drawn(plans("llama"), lambda plan: otherwise(plan, builtin))


@given(st.data())
def test_batches_are_as_asked(data: st.DataObject) -> None:
    batch = data.draw(token_batches(17, rows=2, length=12, multiple_of=4))
    assert batch["input_ids"].shape[0] <= 2
    assert batch["input_ids"].shape[1] in (4, 8, 12)
    assert int(batch["input_ids"].max()) < 17
    kept = batch["labels"] != -100
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    assert bool(kept[:, -1].all())


# ------------------------------------------------------------------------------------------------------ the assertion


def tiny_neox() -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(neox(num_hidden_layers=1))
    return model


def test_what_was_compared_is_returned() -> None:
    proof = assert_plan_equivalent(tiny_neox, tp=[1, 2], loss_parallel="both")
    assert [str(result.leg) for result in proof.legs] == [
        f"tp {tp}{sp}{lp}" for tp in (1, 2) for sp in ("", ", sequence_parallel") for lp in ("", ", loss_parallel")
    ]
    assert {(r.verdict, r.tensors, r.steps) for r in proof.legs} == {("proved", 2 + 16, 0)}
    assert "steps" not in proof.measure


def test_steps_and_fsdp_are_compared_when_asked_for() -> None:
    proof = assert_plan_equivalent(tiny_neox, shard=2, sequence_parallel=True, steps=2)
    (leg,) = proof.legs
    assert (leg.leg.ranks, leg.steps, leg.tensors) == (4, 2, 2 + 2 * 16)
    assert proof.measure.endswith("every parameter after the steps")


WRONG = """
dtplan: 1
extends: gpt_neox
variants:
  - when: {use_parallel_residual: true}
    rules:
      gpt_neox.layers.*:
        "{input,post_attention}_layernorm": {style: norm, grad: complete}
"""


def test_a_plan_whose_stream_stays_whole_is_compared_without_sequence_parallelism():
    plan = dtplan.parse_plan("dtplan: 1\nextends: gpt_neox\nresidual: {sequence_parallel: R}\n")
    assert not plan.cuts_stream
    proof = assert_plan_equivalent(tiny_neox, plan)
    assert [str(leg.leg) for leg in proof.legs] == ["tp 2"]
    with pytest.raises(AssertionError, match="DTP416"):
        assert_plan_equivalent(tiny_neox, plan, sequence_parallel=True)


def test_a_wrong_plan_fails_with_the_diagnosis_of_prove() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_plan_equivalent(tiny_neox, dtplan.parse_plan(WRONG, "wrong.yaml"), sequence_parallel=False, seed=3)
    text = str(caught.value)
    assert "layernorm.weight: gradient, partial sum" in text, text
    assert "rule: wrong.yaml:8:9" in text
    assert "-> write `grad: sum` in its rule" in text
    assert "again: assert_plan_equivalent(tiny_neox, 'plan', tp=2, " in text
    assert "seed=3" in text


def test_what_cannot_be_run_does_not_pass() -> None:
    def broken() -> nn.Module:
        model = tiny_neox()
        model.forward = lambda **_: 1 / 0
        return model

    with pytest.raises(CannotProveError, match="does not run"):
        assert_plan_equivalent(broken)
    with pytest.raises(AssertionError, match=r"refused by bind\n *tensor_parallel_degree 3 does not divide"):
        assert_plan_equivalent(tiny_neox, tp=3)
    with pytest.raises(dtplan.ApplyError, match="nothing would be compared"):
        assert_plan_equivalent(tiny_neox, tp=())
    with pytest.raises(AssertionError, match="NOT RUN"):
        assert_plan_equivalent(tiny_neox, pool=GlooPool(1))  # fewer ranks than the leg takes


class Scaled(nn.Module):
    """Reads something else than tokens, and gives logits as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=8)
        self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.up(features).relu())
        return out


def test_a_batch_of_one_s_own() -> None:
    plan = dtplan.parse_plan(
        "dtplan: 1\nunits: {column: width}\nrules:\n"
        "  up: {style: colwise, unit: column}\n  head: {style: rowwise, unit: column}\n"
    )
    batch = {"features": torch.randn(2, 5, 4, dtype=torch.float64), "labels": torch.randint(0, 6, (2, 5))}
    proof = assert_plan_equivalent(Scaled, plan, tp=(2, 4), sequence_parallel=False, batch=batch)
    assert proof.batch == (2, 5)


# ---------------------------------------------------------------------------------------------- plugin and profiles


def pytest_run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A user's run, with no plugin but ours: it is named, so that a checkout that is not installed has it too."""
    kept = {key: value for key, value in os.environ.items() if key not in ("CI", "DTPLAN_PROFILE")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "dtplan.testing.plugin", *arguments],
        cwd=folder,
        env={**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )


HEAVY = """
import sys

def heavy():
    return sorted({"hypothesis", "torch", "transformers", "yaml"} & set(sys.modules))
"""


def test_the_plugin_costs_nothing_where_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(HEAVY + "\ndef test_light():\n    assert heavy() == []\n")
    done = pytest_run(tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_check_of_the_plugin_s_cost_sees_torch(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(HEAVY + "\ndef test_heavy(gloo_pool):\n    assert heavy() == []\n")
    done = pytest_run(tmp_path)
    assert done.returncode == 1
    assert "'torch'" in done.stdout


PROFILE = """
from hypothesis import settings

settings.register_profile("own", max_examples=7)
settings.load_profile("own")

def test_examples():
    print("examples:", settings().max_examples, settings().derandomize)
"""


@pytest.mark.parametrize(
    ("arguments", "env", "found"),
    [
        ((), {}, "100 False"),
        (("--dtplan-profile", "ci"), {}, "25 True"),
        ((), {"DTPLAN_PROFILE": "nightly"}, "500 False"),
        (("--dtplan-profile", "default"), {"DTPLAN_PROFILE": "nightly"}, "10 False"),
    ],
)
def test_a_profile_is_loaded_only_when_asked_for(
    tmp_path: Path, arguments: tuple[str, ...], env: dict[str, str], found: str
) -> None:
    (tmp_path / "test_mine.py").write_text(PROFILE.replace('settings.load_profile("own")', ""))
    assert f"examples: {found}" in pytest_run(tmp_path, "-s", *arguments, **env).stdout


def test_a_user_s_own_profile_stays(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(PROFILE)
    assert "examples: 7 " in pytest_run(tmp_path, "-s").stdout


def test_an_unknown_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("def test_nothing(): pass\n")
    assert "profiles are default, ci, nightly" in pytest_run(tmp_path, DTPLAN_PROFILE="fast").stderr
    with pytest.raises(ValueError, match="profiles are default, ci, nightly"):
        load_profile("fast")


def test_costly_properties_take_a_share() -> None:
    assert [share(part) for part in (0.0, 1.0)] == [2, settings().max_examples]


def test_the_page_s_example_passes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    (test,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (plan,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "test_mine.py").write_text(test)
    (tmp_path / "mine.yaml").write_text(plan)
    done = pytest_run(tmp_path)
    assert "3 passed" in done.stdout, done.stdout[-3000:]
    names: dict[str, Any] = {}
    exec(test, names)  # noqa: S102 - the page's own class, with a plan that is wrong
    wrong = plan.replace("down: {style: rowwise, unit: column}", "down: {style: rowwise, unit: column, output: P}")
    with pytest.raises(AssertionError, match="output: residual"):
        assert_plan_equivalent(names["Mine"], dtplan.parse_plan(wrong), sequence_parallel=False)


def test_every_name_is_there() -> None:
    for name in dtplan.testing.__all__:
        assert callable(getattr(dtplan.testing, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dtplan.testing.nothing
    assert json.dumps(sorted(dtplan.testing.__all__)) == json.dumps(dtplan.testing.__all__)
