"""The JSON Schema that editors read: committed as the grammar gives it, and of one mind with the reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from dtplan.plan.grammar import PLAN_KEYS
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import parse_plan
from dtplan.plan.rule_grammar import RULE_KEYS, STYLES
from dtplan.plan.schema import EXAMPLES, RULE_EXAMPLES, plan_schema, schema_text
from tests.bad_plans import LINT, RULES, STRUCTURE, all_bad_plans

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "dtplan" / "plan.schema.json"
PLANS = {path.stem: path for path in [*builtin_plans().values(), *sorted((ROOT / "tests" / "plans").glob("*.yaml"))]}

LAXER = {
    # YAML's, before a schema sees anything
    "duplicate key": "YAML keeps the last",
    "duplicate path": "YAML keeps the last",
    "duplicate key in a rule": "YAML keeps the last",
    "switch, given yes": "a boolean to YAML 1.1, text to YAML 1.2",
    "dim in octal": "eight to YAML 1.1",
    "boolean for a key": "the text `True` to YAML 1.1",
    "merge key": "YAML merges",
    # of values, not of their kinds
    "variant that says nothing": "one of three keys",
    "names of a pattern": "keys are free",
    "residual that is not cut": "a layout is a layout",
    "residual that is otherwise cut": "a layout is a layout",
    "rule that is only optional": "keys that say something alone are not told apart",
    "section without a unit": "one of two keys",
    "section of a count that is cut": "one key asks for another",
    "section that is cut and summed": "one key asks for another",
    "dim out of all bounds": "a number is a number",
    # any key may be a path
    "misspelt style key": "a module may be named so",
    **{name: "a path is any text" for name, text in RULES.items() if name.startswith(("path ", "brace", "B11"))},
}
"""Plans that the reader refuses and the schema lets pass, and why."""
del LAXER["path inside a rule"]


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(plan_schema())


def as_json(text: str) -> Any:
    """A plan as an editor's language server sees it: plain data, with text for keys."""
    return _with_text_keys(yaml.safe_load(text))


def _with_text_keys(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _with_text_keys(value) for key, value in data.items()}
    return [_with_text_keys(item) for item in data] if isinstance(data, list) else data


def test_the_committed_schema_is_what_the_grammar_gives():
    assert COMMITTED.read_text(encoding="utf-8") == schema_text(), (
        "renew it: python -m dtplan.plan.schema > dtplan/plan.schema.json"
    )


def test_the_command_that_renews_it_prints_it():
    command = [sys.executable, "-m", "dtplan.plan.schema"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == schema_text()


def test_the_schema_is_one():
    Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_valid(validator, name):
    text = PLANS[name].read_text(encoding="utf-8")
    assert [error.message for error in validator.iter_errors(as_json(text))] == []


@pytest.mark.parametrize("name", PLANS)
def test_plans_name_the_schema_where_it_is(name):
    first = PLANS[name].read_text(encoding="utf-8").partition("\n")[0]
    key, _, where = first.partition("$schema=")
    assert key == "# yaml-language-server: "
    assert (PLANS[name].parent / where).resolve() == COMMITTED


@pytest.mark.parametrize("name", [*STRUCTURE, *RULES])
def test_the_schema_refuses_what_the_reader_refuses(validator, name):
    text = all_bad_plans()[name]
    if name in ("condition on a date", "list for a key"):
        with pytest.raises((ValueError, yaml.YAMLError)):  # YAML refuses it itself
            as_json(text)
        return
    assert validator.is_valid(as_json(text)) == (name in LAXER)


@pytest.mark.parametrize("name", LINT)
def test_what_parts_of_a_plan_say_about_each_other_is_lint_s(validator, name):
    assert validator.is_valid(as_json(all_bad_plans()[name]))


def test_every_key_is_explained_where_it_is_written(validator):
    """Hover text: the description of each key of a plan and of a rule."""
    schema = plan_schema()
    assert all(schema["properties"][key]["description"] for key in PLAN_KEYS)
    rule = schema["$defs"]["rules"]["additionalProperties"]["anyOf"][0]["anyOf"][1]
    assert all(rule["properties"][key]["description"] for key in RULE_KEYS)
    assert all(style in rule["properties"]["style"]["description"] for style in STYLES)


def test_every_key_has_an_example_that_the_schema_and_the_reader_take(validator):
    """Keys of a plan one by one; keys of a rule with the style, unit or path that they need beside them."""
    assert EXAMPLES.keys() == PLAN_KEYS.keys()
    assert RULE_EXAMPLES.keys() == RULE_KEYS.keys()
    properties = plan_schema()["properties"]
    for key, example in EXAMPLES.items():
        assert properties[key]["examples"] == [example]
        assert validator.is_valid({"dtplan": 1, key: example}), key
    plain = {"style", "shard", "input", "parallel_residual", "once"}  # keys that say enough alone
    needs = {"like": "vocab", "output": "vocab"} | dict.fromkeys(("unit", "sections", "localize_per"), "colwise")
    for key, example in RULE_EXAMPLES.items():
        rule = ({} if key in plain else {"style": needs.get(key, "replicate")}) | {key: example}
        text = json.dumps(example)
        units = {unit: unit for unit in ("head", "kv_head") if f'"{unit}"' in text}
        plan = {"dtplan": 1, "units": units, "rules": {"a.b": rule}}
        assert validator.is_valid(plan), key
        parse_plan(yaml.safe_dump(plan, sort_keys=False))


def test_every_key_anywhere_is_explained():
    """Sections, moves, units, fused layers and FSDP's keys, too."""
    assert list(_unexplained(plan_schema(), "")) == []


def _unexplained(schema: Any, path: str):
    if isinstance(schema, list):
        schema = dict(enumerate(schema))
    if isinstance(schema, dict):
        keys = schema.get("properties", {})
        yield from (f"{path}/{key}" for key, value in keys.items() if not value.get("description"))
        for key, value in schema.items():
            yield from _unexplained(value, f"{path}/{key}")


def test_a_style_is_explained_where_it_is_offered():
    rule = plan_schema()["$defs"]["rules"]["additionalProperties"]["anyOf"][0]["anyOf"]
    for styles in (rule[0], rule[1]["properties"]["style"]):
        meanings = dict(zip(styles["enum"], styles["enumDescriptions"], strict=True))
        assert meanings["colwise"] == STYLES["colwise"]
        assert meanings["RowwiseParallel"] == "the same as rowwise"
