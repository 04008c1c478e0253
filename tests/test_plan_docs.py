"""The reference of the plan language: its examples are plans, and it leaves nothing out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtplan._errors import PlanError
from dtplan.plan.grammar import ACTIVATIONS, PLAN_KEYS, TE_KEYS, TE_LAYERS
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import parse_plan
from dtplan.plan.rule_grammar import RULE_KEYS, STYLES
from tests.families import FOLDER

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "plan-language.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
OF_A_WHOLE_PLAN = {"DTP302", "DTP305", "DTP306", "DTP308"}
"""Findings that a piece of a plan may have: units that it does not declare, modules that it has no rules for."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_plan_or_a_piece_of_one(example):
    if "dtplan: 1" in example:
        assert parse_plan(example).rules
        return
    try:
        parse_plan("dtplan: 1\n" + example)
    except PlanError as error:
        found = {finding.code for finding in error.diagnostics}
    else:
        found = set()
    assert found <= OF_A_WHOLE_PLAN


def test_examples_that_say_the_same():
    nested, flat = (parse_plan("dtplan: 1\n" + example) for example in EXAMPLES[1:3])
    assert nested.digest == flat.digest


def test_every_word_of_the_language_is_there():
    in_tables = [*PLAN_KEYS, *RULE_KEYS, *STYLES, "keep", "sum", "gather", "slice", "scatter", "residual", "logits"]
    assert [word for word in in_tables if f"\n| `{word}` |" not in PAGE] == []
    words = [*TE_KEYS, *TE_LAYERS, "global_shape", "sum_grad_of_last", "count", "width", "whole"]
    words += ["error", "uneven", "replicate", "replicate_kv"]
    assert [word for word in words if f"`{word}" not in PAGE] == []
    assert [word for word in ACTIVATIONS if word not in PAGE] == []


def test_every_plan_is_in_the_table():
    rows = {row.split("`")[-2]: row for row in PAGE.splitlines() if row.startswith("|") and ".yaml` |" in row}
    odd = {f"tests/plans/{path.stem}.yaml" for path in FOLDER.glob("*.yaml")}
    assert rows.keys() == odd | {f"plans/{name}.yaml" for name in builtin_plans()}
    assert all(row.split("|")[-2].strip().startswith("exact") for row in rows.values())
