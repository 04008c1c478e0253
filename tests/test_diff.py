"""`dtplan diff`: what counts as a difference, what does not, and that costs add up to the ledger's."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan import ApplyError
from dtplan.cli import cli
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import parse_plan
from dtplan.plan.rule_grammar import RULE_KEYS
from dtplan.plan.spec import Plan
from dtplan.planner.bound import BoundMove, BoundPlan, BoundTensor
from dtplan.planner.bound_json import BoundJsonError, bound_from_json
from dtplan.planner.ledger import ledger
from dtplan.report.diff import COLLECTIVES, Diff, diff
from dtplan.report.diff_bound import _TOLD
from dtplan.report.words import spelled, unspelled
from dtplan.te.engine import Engine
from tests import families
from tests.models import CONFIGS, build, llama, neox, on_meta

FAMILIES = sorted(Path("tests/plans").glob("*.yaml"))


def lines(found: Diff) -> list[str]:
    """The differences as text, without titles, totals and notes."""
    return [str(one) for one in found.differences]


def on_llama(rules: str) -> Plan:
    """Llama's plan with other rules, written in the usual indentation."""
    return parse_plan(f"dtplan: 1\nname: mine\nextends: llama\nrules:\n{rules}\n")


# --- what makes no difference


def flat(rules: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Rules with their whole paths, in the other order."""
    found: dict[str, Any] = {}
    for key, value in reversed(rules.items()):
        path = prefix.rstrip(".") if key == "." else prefix + key
        if isinstance(value, dict) and not value.keys() & RULE_KEYS.keys():
            found |= flat(value, path + ".")
        else:
            found[path] = {"style": value} if isinstance(value, str) else dict(reversed(value.items()))
    return found


@pytest.mark.parametrize("path", [*builtin_plans().values(), *FAMILIES], ids=lambda path: path.stem)
def test_order_nesting_and_comments_say_nothing(path: Path) -> None:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    for part in (data, *data.get("variants", [])):
        part["rules"] = flat(part.get("rules", {}))
        part["rules"] or part.pop("rules")
    for key in ("serves", "ties", "variants"):
        data[key] = data.get(key, [])[::-1]
    text = "# another file\n" + yaml.safe_dump(dict(reversed(data.items())), sort_keys=False)
    if "extends" in data and "/" in data["extends"]:
        pytest.fail("a family's plan extends a file; text in memory cannot")
    assert lines(diff(path, parse_plan(text))) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a.{b,c}: colwise", "a: {b: colwise, c: colwise}"),
        ("a: ColwiseParallel", "a: {style: colwise}"),
        ("a: RowwiseParallel", "a: {style: rowwise, output: residual}"),
        ("a: SequenceParallel", "a: {style: norm, input: residual, output: residual}"),
        ("a: colwise", "a: {style: colwise, input: R, output: S(-1)}"),
        ("a: rowwise", "a: {style: rowwise, input: keep, output: {from: P, to: residual}}"),
        ("a: {style: rowwise, output: P}", "a: {style: rowwise, output: keep}"),
        ("a: vocab", "a: {style: vocab, output: {to: residual}}"),
        ("a: replicate", "a: {style: replicate, output: R}"),
        ("a: {localize: [x, y], style: replicate}", "a: {localize: [y, x], style: replicate}"),
        ("a: {input: {x: {to: R}}}", "a: {input: {x: R}}"),
        ("a: {input: {from: residual, to: R}}", "a: {input: R}"),
    ],
)
def test_defaults_and_aliases_say_nothing(one: str, other: str) -> None:
    sides = [parse_plan(f"dtplan: 1\nrules:\n  {rules}\n") for rules in (one, other)]
    assert lines(diff(*sides)) == []


def test_defaults_of_the_other_keys_say_nothing() -> None:
    short = parse_plan("dtplan: 1\nunits: {u: n}\nrules: {a: {style: colwise, unit: u}}\nfsdp: {units: [a]}")
    long = parse_plan(
        "dtplan: 1\nname: other\nunits: {u: {field: [n], indivisible: error}}\nrules: {a: {style: colwise, unit: u}}\n"
        "residual: {sequence_parallel: S(1), otherwise: R}\nfsdp: {units: [a], reshard_after_forward: true}"
    )
    assert lines(diff(short, long)) == []


# --- what does

SAMPLES: dict[str, str] = {
    "style": "{style: rowwise}",
    "shard": "{shard: 1}",
    "sections": "{style: colwise, sections: [u, u]}",
    "unit": "{style: colwise, unit: u}",
    "grad": "{style: norm, grad: sum}",
    "once": "{once: true}",
    "like": "{style: vocab, like: Embedding}",
    "input": "{style: norm, input: R}",
    "output": "{style: rowwise, output: P}",
    "parallel_residual": "{parallel_residual: x}",
    "localize": "{style: replicate, localize: [n]}",
    "localize_per": "{style: colwise, unit: u, localize_per: {n: u}}",
    "reads": "{style: replicate, reads: [n]}",
    "below": "{style: replicate, below: true}",
    "optional": "{style: replicate, optional: true}",
    "override": "{style: replicate, override: true}",
}


@pytest.mark.parametrize("key", RULE_KEYS)
def test_every_key_of_a_rule_makes_a_difference(key: str) -> None:
    with_it = yaml.safe_load(SAMPLES[key])
    without = {name: value for name, value in with_it.items() if name != key} or {"style": "replicate"}
    units = "units: {u: n}\n" if "u" in SAMPLES[key].split("[")[-1] or key == "unit" else ""
    used = "  b: {style: colwise, unit: u}\n" if units else ""
    sides = [parse_plan(f"dtplan: 1\n{units}rules:\n{used}  a: {json.dumps(rule)}\n") for rule in (without, with_it)]
    (found,) = diff(*sides).differences
    assert found.path == "a"
    assert found.what in (key, "rule")
    assert key in (found.what if found.what == key else f"{found.before} {found.after} style")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("serves: [AForCausalLM]", ["serves added: AForCausalLM"]),
        ("units: {u: [m, n]}", ["units: u n -> [m, n]"]),
        ("units: {u: {field: n, indivisible: uneven}}", ["units: u n -> {field: n, indivisible: uneven}"]),
        ("residual: {sequence_parallel: S(0)}", ["residual: sequence_parallel S(1) -> S(0)"]),
        ("ties: [[a.weight, b.weight]]", ["ties added: a.weight = b.weight"]),
        ("names: {a: [x, y]}", ["names: a added: [x, y]"]),
        ("te: {m: [{layer: Linear, linear: a}]}", ["m: te added: {layer: Linear, linear: a}"]),
        ("fsdp: {units: [a]}", ["fsdp: units added: a"]),
        ("fsdp: {reshard_after_forward: 4}", ["fsdp: reshard_after_forward true -> 4"]),
        (
            "variants: [{when: {n: 1, m: null}, rules: {c.d: norm, c.e: norm}}]",
            ["c.{d,e} (when m: null, n: 1): rule added: {style: norm, input: residual}"],
        ),
    ],
)
def test_every_other_key_of_a_plan_makes_a_difference(text: str, told: list[str]) -> None:
    units = "" if text.startswith("units") else "units: {u: n}\n"
    rules = "rules: {a: {style: colwise, unit: u}, b: rowwise, m.a: norm}\n"
    plain = parse_plan(f"dtplan: 1\nunits: {{u: n}}\n{rules}")
    assert lines(diff(plain, parse_plan(f"dtplan: 1\n{units}{rules}{text}\n"))) == told


def test_the_order_of_fused_layers_counts() -> None:
    layers = ["{layer: Linear, linear: a}", "{layer: LayerNormLinear, norm: n, linears: [a]}"]
    text = "dtplan: 1\nrules: {{m.a: colwise, m.n: norm}}\nte: {{m: [{}, {}]}}"
    (found,) = diff(parse_plan(text.format(*layers)), parse_plan(text.format(*layers[::-1]))).differences
    assert found.what == "order of te"


def test_a_region_above_is_no_default() -> None:
    """A colwise layer in a region takes the region's input; one that prepares its own is another thing."""
    plain = parse_plan("dtplan: 1\nrules: {m: {input: R}, m.a: colwise}")
    own = parse_plan("dtplan: 1\nrules: {m: {input: R}, m.a: {style: colwise, input: R}}")
    assert lines(diff(plain, own)) == ["m.a: input added: R"]


def test_of_two_rules_on_one_path_the_marked_one_counts() -> None:
    base = "dtplan: 1\nrules:\n  a.b: {style: colwise, override: true}\n  '{a,c}.b': "
    assert lines(diff(parse_plan(base + "norm\n"), parse_plan(base + "replicate\n"))) == [
        "c.b: rule {style: norm, input: residual} -> replicate"
    ]


def test_two_built_in_plans_in_the_plans_own_words() -> None:
    told = lines(diff("llama", on_llama("  model.layers.*.self_attn.o_proj: {style: rowwise, unit: head, output: R}")))
    assert told == ["model.layers.*.self_attn.o_proj: output residual -> R"]


def test_siblings_are_told_together_only_where_they_say_the_same() -> None:
    before = parse_plan("dtplan: 1\nrules: {m.a: rowwise, m.b: rowwise, m.c: rowwise, n: rowwise}")
    outputs = "m.a: {style: rowwise, output: R}, m.b: {style: rowwise, output: P}, m.c: {style: rowwise, output: R}"
    after = parse_plan(f"dtplan: 1\nrules: {{{outputs}, n: {{style: rowwise, output: R}}}}")
    assert lines(diff(before, after)) == [
        "m.{a,c}: output residual -> R",
        "m.b: output residual -> P",
        "n: output residual -> R",
    ]


# --- bound plans


def bound(plan: str | Plan = "llama", config: Any = None, **settings: Any) -> BoundPlan:
    return dtplan.bind(on_meta(config or llama()), plan, **{"tp": 2, **settings})


UNGROUPED = on_llama("  model.layers.*.self_attn: {input: keep}")
WHOLE_MLP = on_llama("  model.layers.*.mlp: {input: keep}\n  model.layers.*.mlp.{gate,up,down}_proj: replicate")
ONE_LAYER = on_llama("  model.layers.1.mlp: {input: keep, override: true}")

PAIRS: dict[str, Callable[[], tuple[BoundPlan, BoundPlan]]] = {
    "ungrouped": lambda: (bound(), bound(UNGROUPED)),
    "ungrouped under sequence parallelism": lambda: (
        bound(sequence_parallel=True),
        bound(UNGROUPED, sequence_parallel=True),
    ),
    "whole MLP": lambda: (bound(), bound(WHOLE_MLP)),
    "one layer": lambda: (bound(), bound(ONE_LAYER)),
    "sequence parallelism": lambda: (bound(), bound(sequence_parallel=True)),
    "sequence parallelism of NeoX": lambda: (
        bound("gpt_neox", neox()),
        bound("gpt_neox", neox(), sequence_parallel=True),
    ),
    "NeoX's two residuals": lambda: (bound("gpt_neox", neox()), bound("gpt_neox", neox(use_parallel_residual=False))),
    "biases": lambda: (bound(), bound(config=CONFIGS["llama-biases"])),
    "tied": lambda: (bound(), bound(config=CONFIGS["llama-tied"])),
    "norms over ranks": lambda: (without_norms(olmo2()), olmo2()),
}


def olmo2() -> BoundPlan:
    return dtplan.bind(families.on_meta("olmo2"), families.plan_file("olmo2"), tp=2)


def without_norms(plan: BoundPlan) -> BoundPlan:
    return dataclasses.replace(plan, modules=tuple(dataclasses.replace(m, norm=None) for m in plan.modules))


@pytest.mark.parametrize("name", PAIRS)
def test_effects_add_up_to_the_difference_of_the_ledgers(name: str) -> None:
    """Calls and bytes on tp, forward and backward, and rank 0's parameters: nothing is told twice or left out."""
    before, after = PAIRS[name]()
    effects = [effect for one in diff(before, after).differences for effect in one.effects]
    books = [ledger(side) for side in (before, after)]
    calls: dict[Any, int] = {}
    sent: dict[Any, int] = {}
    summed = 0
    for sign, book, side in zip((-1, 1), books, (before, after), strict=True):
        for entry in book.entries:
            if entry.cause.startswith("gradients"):
                summed += sign * entry.wire_bytes(side.tp)
                continue
            key = (entry.direction, entry.kind)
            calls[key] = calls.get(key, 0) + sign * entry.count
            sent[key] = sent.get(key, 0) + sign * entry.wire_bytes(side.tp)
    for key, number in calls.items():
        ours = [e for e in effects if e.what in COLLECTIVES and (e.direction, e.what) == key]
        assert sum(e.calls for e in ours) == number, key
        assert sum(e.bytes for e in ours) == sent[key], key
    assert sum(e.bytes for e in effects if e.what == "gradient sum") == summed
    kept = sum(e.bytes for e in effects if e.what == "parameters")
    assert kept == after.parameter_bytes()[1] - before.parameter_bytes()[1]
    assert effects


def test_a_change_is_told_with_what_it_costs() -> None:
    before, after = PAIRS["ungrouped"]()
    found = diff(before, after, batch=1, sequence=1024)
    assert lines(found) == [
        "model.layers.*.self_attn: input R (copy) -> as it is; -1 all-reduce a layer backward, -128.00 KiB on the wire",
        (
            "model.layers.*.self_attn.{q,k,v}_proj: input as it is -> R (copy); "
            "+3 all-reduces a layer backward, +384.00 KiB on the wire"
        ),
    ]
    assert [str(total) for total in found.totals] == [
        "all-reduces backward on tp 5 -> 9",
        "sent by a rank on tp 672.00 KiB -> 928.00 KiB",
        (
            "collectives of model.layers.* on tp 2 forward + 2 backward (at least 2 + 2) -> "
            "2 forward + 4 backward (at least 2 + 2)"
        ),
    ]
    assert not found.equal
    assert found.exit_code == 1


def test_the_residual_is_called_so_where_it_is_cut() -> None:
    plan = on_llama("  model.layers.*.self_attn.o_proj: {style: rowwise, unit: head, output: R}")
    assert diff(bound(), bound(plan)).equal
    (found,) = diff(bound(sequence_parallel=True), bound(plan, sequence_parallel=True)).differences
    assert str(found).startswith("model.layers.*.self_attn.o_proj: output residual (scatter) -> R (reduce); ")
    assert "+1 all-reduce a layer forward" in str(found)


def test_what_says_nothing_at_these_degrees_is_a_note() -> None:
    plan = on_llama("  model.layers.*.self_attn.o_proj: {style: rowwise, unit: head, output: R}")
    assert diff(bound(), bound(plan)).notes == (
        "the plans differ in their text, which means nothing for this model at these degrees",
    )
    assert diff(bound(), bound()).notes == ()


def test_a_layer_that_is_not_like_the_others_is_named() -> None:
    before, after = PAIRS["one layer"]()
    assert [one.path for one in diff(before, after).differences] == [
        "model.layers.1.mlp",
        "model.layers.1.mlp.{gate,up}_proj",
    ]


def test_other_numbers_of_layers_are_one_difference() -> None:
    found = diff(bound(), bound(config=llama(num_hidden_layers=3)))
    assert lines(found) == [
        "model.layers.*: modules 2 -> 3",
        "fsdp: units model.layers.{0,1} -> model.layers.{0..2}",
    ]


def test_every_field_of_a_bound_plan_makes_a_difference() -> None:
    """A field that is added to these data classes is compared, or named here as one that follows from others."""
    plain = bound(sequence_parallel=True)
    at = next(i for i, module in enumerate(plain.modules) if module.pattern.endswith("o_proj"))
    module = plain.modules[at]
    follows = {BoundMove: {"value", "name", "length"}, BoundTensor: {"name", "local_shape", "buffer"}}
    for part, owner in (("tensors", BoundTensor), ("outputs", BoundMove)):
        (one,) = getattr(module, part)
        for field in dataclasses.fields(owner):
            if field.name in follows[owner]:
                continue
            changed = dataclasses.replace(one, **{field.name: _otherwise(getattr(one, field.name))})
            other = dataclasses.replace(module, **{part: (changed,)})  # type: ignore[arg-type]
            modules = (*plain.modules[:at], other, *plain.modules[at + 1 :])
            assert not diff(plain, dataclasses.replace(plain, modules=modules)).equal, (owner, field.name)
    assert all(set(told) <= {f.name for f in dataclasses.fields(owner)} for owner, told in _TOLD.items())


def _otherwise(value: Any) -> Any:
    """Some other value of the same kind."""
    if isinstance(value, bool):
        return not value
    others: dict[Any, Any] = {"reduce": "scatter", "scatter": "reduce", "float32": "float16", "complete": "sum"}
    if isinstance(value, tuple):
        return (*value, 8) if value else (16, 16)
    if value is None:
        return 7
    return others.get(value, dataclasses.replace(value, word="R", dim=None) if hasattr(value, "word") else "other")


# --- JSON


def test_a_bound_plan_comes_back_from_its_json() -> None:
    for one in (bound(sequence_parallel=True, shard=2), bound("gpt_neox", neox()), bound(config=CONFIGS["llama-tied"])):
        assert bound_from_json(json.loads(one.json_text())) == one


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schema_version": 1}, "written as version 1, this dtplan reads version 2"),
        ({"modules": 3}, "x.json, modules: got 3, which does not belong there"),
        ({"degrees": {"tp": "8"}}, "x.json, degrees.tp: got '8'"),
        ({"residual": "Q"}, "a layout is R, P or S(dim)"),
        ({"zzz": 1}, "unknown key `zzz`"),
        ({"modules": [{"pattern": "a"}]}, "x.json, modules[0]: missing key `kind`"),
    ],
)
def test_json_that_is_no_bound_plan_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(BoundJsonError) as error:
        bound_from_json(json.loads(bound().json_text()) | changes, "x.json")
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([""], "."),
        (["a.b"], "a.b"),
        (["a.0.b", "a.1.b"], "a.{0,1}.b"),
        (["a.0", "a.1", "a.2", "a.5"], "a.{0..2,5}"),
        (["a.x", "a.y"], "a.{x,y}"),
        ([f"a.{i}.b.{j}" for i in range(4) for j in range(8)], "a.{0..3}.b.{0..7}"),
        (["a.0", "b.1"], "a.0, b.1"),
        (["a", "a.b", ""], "a, a.b, ."),
    ],
)
def test_many_names_are_spelled_as_one_and_come_back(names: list[str], text: str) -> None:
    assert spelled(names) == text
    assert unspelled(text) == names


# --- live models


def test_a_plan_and_a_live_model(simulated: Callable[..., list[Any]]) -> None:
    """Equal right after parallelize; then what another plan would do, and what became of the parameters."""
    model = build(llama())
    model.model.embed_tokens.weight.requires_grad_(False)

    def rank(_: int) -> tuple[Diff, Diff]:
        live = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        dtplan.parallelize(live, mesh, "llama", sequence_parallel=True)
        same = dtplan.diff("llama", live)
        for layer in live.model.layers:
            layer.mlp.extra = nn.Linear(4, 4, bias=False)
        live.lm_head.weight.requires_grad_(False)
        return same, dtplan.diff(UNGROUPED, live)

    same, other = simulated(4, rank)[0]
    assert same.equal
    assert lines(other)[0].startswith("model.layers.*.self_attn: input as it is -> R (gather from S(1)); ")
    assert lines(other)[2:] == [
        "lm_head.weight: trainable yes -> no",
        "model.layers.{0,1}.mlp.extra.weight: parameter added: [4, 4] no DTensor, under no rule",
    ]


def test_fused_layers_are_no_difference_but_told(simulated: Callable[..., list[Any]], standin: Engine) -> None:
    model = build(llama())

    def rank(_: int) -> Diff:
        live = copy.deepcopy(model)
        dtplan.parallelize(live, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "llama", te="auto")
        return dtplan.diff("llama", live)

    found = simulated(2, rank)[0]
    assert lines(found) == []
    layers = "LayerNormLinear, LayerNormMLP, Linear, RMSNorm"
    assert found.notes == (f"layers of TransformerEngine stand in for modules: {layers}",)


def test_a_parameter_that_is_placed_otherwise_is_seen(simulated: Callable[..., list[Any]]) -> None:
    model = build(llama())

    def rank(_: int) -> Diff:
        live = copy.deepcopy(model)
        dtplan.parallelize(live, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "llama")
        norm = live.model.norm
        norm.weight = live.model.layers[0].mlp.up_proj.weight
        del live.lm_head.weight
        return dtplan.diff(dtplan.bind(model, "llama", tp=2), live)

    assert lines(simulated(2, rank)[0]) == [
        "model.norm.weight: placement R -> S(0)",
        "model.norm.weight: shape [32] -> [64, 32]",
        "lm_head.weight: parameter removed: applied",
    ]


def test_a_model_that_was_not_parallelized_is_refused() -> None:
    with pytest.raises(ApplyError, match="is not parallelized"):
        dtplan.diff("llama", on_meta(llama()))


def test_a_plan_and_a_bound_plan_are_refused() -> None:
    with pytest.raises(TypeError, match="a plan and a BoundPlan cannot be compared"):
        dtplan.diff("llama", bound())


# --- the command


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["diff", *map(str, args)])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(llama().to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    return file


def test_exit_code_is_0_for_equal_and_1_for_different(tmp_path: Path) -> None:
    copied = tmp_path / "copy.yaml"
    copied.write_text("# the same\n" + builtin_plans()["llama"].read_text(encoding="utf-8"))
    same, other = run("llama", copied), run("llama", "gpt_neox")
    assert (same.exit_code, other.exit_code) == (0, 1)
    assert same.output.startswith("no difference: ")
    assert "model.layers.*.self_attn.{k,v}_proj: rule removed: {style: colwise, unit: kv_head}" in other.output


def test_one_plan_at_two_settings(config: Path) -> None:
    found = run("llama", "--model", config, "--tp", "2,4", "--sequence-parallel", "off,on", "--json")
    assert found.exit_code == 1, found.output
    data = json.loads(found.output)
    assert data["equal"] is False
    assert data["differences"][0] == {
        "path": "",
        "what": "tp",
        "before": "2",
        "after": "4",
        "effects": [],
        "when": "",
    }
    embedding = next(one for one in data["differences"] if one["path"] == "model.embed_tokens")
    assert [effect["what"] for effect in embedding["effects"]] == ["all_reduce", "reduce_scatter", "all_gather"]
    assert run("llama", "llama", "--model", config, "--tp", "2").exit_code == 0


def test_the_json_of_show_is_a_side(tmp_path: Path, config: Path) -> None:
    shown = CliRunner().invoke(cli, ["show", "--model", str(config), "--tp", "2", "--json"])
    (tmp_path / "bound.json").write_text(shown.output)
    assert run(tmp_path / "bound.json", "llama", "--model", config, "--tp", "2").exit_code == 0
    other = run(tmp_path / "bound.json", "llama", "--model", config, "--tp", "4")
    assert f"--- {tmp_path}/bound.json: plan llama on LlamaForCausalLM, tp 2" in other.output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("llama",), "give B, or two settings for A"),
        (("llama", "llama", "--tp", "4"), "--tp is for plans that are bound: give the --model, too"),
        (("llama", "no.json"), "no.json: No such file or directory"),
        (("llama", "llama", "--model", "a", "--model", "b", "--model", "c"), "once for each of A and B"),
        (("llama", "--model", "CONFIG", "--tp", "2,4,8"), "or two of them with a comma between"),
        (("llama", "--model", "CONFIG", "--loss-parallel", "yes"), "'yes' is not off or on"),
    ],
)
def test_misuse_is_told_with_what_to_do(config: Path, args: tuple[str, ...], told: str) -> None:
    found = run(*(str(config) if arg == "CONFIG" else arg for arg in args))
    assert found.exit_code == 2
    assert told in found.output


def test_what_cannot_be_bound_or_read_is_no_difference(config: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("dtplan: 1\nrules: {a: colwse}\n")
    for args, told in (
        (("llama", wrong), "did you mean 'colwise'?"),
        (("llama", "--model", config, "--tp", "2,8"), "DTP405 tensor_parallel_degree 8 does not divide head"),
        (("llama", tmp_path / "none.lock"), "No such file or directory"),
    ):
        found = run(*args)
        assert found.exit_code == 2
        assert told in found.output


def test_heads_on_several_ranks_are_told_in_words(tmp_path: Path) -> None:
    text = "dtplan: 1\nextends: llama\nunits: {kv_head: {field: num_key_value_heads, indivisible: replicate_kv}}\n"
    model = llama(num_key_value_heads=2)
    told = lines(diff(*(bound(parse_plan(text), model, tp=tp) for tp in (2, 4))))
    assert "model.layers.*.self_attn: localize_per added: num_key_value_groups / 2" in told
    assert "model.layers.*.self_attn.{k,v}_proj: weight ranks that keep a part 1 -> 2" in told


def test_plans_are_compared_without_torch() -> None:
    code = (
        "import sys; from dtplan.report.diff import diff; from dtplan.cli import cli\n"
        "assert not diff('llama', 'gpt_neox').equal; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
