"""The plans that are shipped: clean, served classes real, every tensor placed under each switch and variant."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import dtplan
from dtplan.plan.library import builtin_plans, locate
from dtplan.plan.read import check, load_plan
from tests.models import CONFIGS, on_meta

PLANS = sorted(builtin_plans())


def test_the_plans():
    llama_s_kin = {"gemma2", "llama", "mistral", "qwen2", "qwen3"}
    assert set(PLANS) == llama_s_kin | {"falcon", "gpt2", "gpt_neox", "mixtral", "olmo2", "phi3", "starcoder2"}


@pytest.mark.parametrize("name", PLANS)
def test_lint_finds_nothing(name):
    assert check(name) == ()


@pytest.mark.parametrize("name", PLANS)
def test_the_name_is_the_file_s(name):
    assert load_plan(name).name == name


@pytest.mark.parametrize("name", PLANS)
def test_the_classes_that_it_serves_are_there(name):
    plan = load_plan(name)
    assert plan.serves
    assert all(hasattr(transformers, served) for served in plan.serves)


def test_no_two_plans_serve_one_class():
    served = list(itertools.chain.from_iterable(load_plan(name).serves for name in PLANS))
    assert len(set(served)) == len(served)


@pytest.mark.parametrize("name", PLANS)
def test_it_fits_on_a_screen_and_says_what_it_is_for(name):
    lines = builtin_plans()[name].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert lines[1].startswith("# ")
    assert lines[2].startswith(("# ", "dtplan: 1"))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("loss_parallel", [False, True], ids=["", "loss-parallel"])
def test_every_tensor_is_placed_and_no_rule_is_dead(name, sequence_parallel, loss_parallel):
    model = on_meta(CONFIGS[name])
    bound = dtplan.bind(model, tp=2, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    tensors = [n for n, _ in model.named_parameters(remove_duplicate=False)] + [n for n, _ in model.named_buffers()]
    assert sorted(n for _, n, _ in bound.tensors()) == sorted(tensors)


@pytest.mark.parametrize("name", PLANS)
def test_the_default_config_of_each_class_binds(name):
    """Real sizes, without storage."""
    for served in load_plan(name).serves:
        config = getattr(transformers, served).config_class(num_hidden_layers=2)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert dtplan.bind(model, tp=2).plan == name


def test_a_built_in_name_wins_over_a_file_and_a_path_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").write_text("dtplan: 1\nrules: {mine: norm}\n")
    assert locate("llama")[0] == builtin_plans()["llama"]
    path, shown = locate(f".{os.sep}llama")
    assert (path.resolve(), shown) == (tmp_path / "llama", "llama")
