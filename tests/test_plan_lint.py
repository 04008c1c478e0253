"""What a whole plan says: `extends`, variants, overlaps, and the digest that tells two plans apart."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dtplan
from dtplan._errors import Diagnostic, PlanError
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import check, config_field, holds, load_plan, parse_plan, rules_for
from dtplan.plan.spec import RESIDUAL, Move, P, R, Rule, S

_LINEARS = """\
  model.layers.*:
    self_attn.{q,k,v}_proj: colwise
    self_attn.o_proj: rowwise
    mlp.{gate,up}_proj: colwise
    mlp.down_proj: rowwise
"""
P0 = "dtplan: 1\nrules:\n" + _LINEARS


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**plans: str) -> None:
    for name, text in plans.items():
        Path(f"{name}.yaml").write_text(text, encoding="utf-8")


def rules_of(plan) -> dict[str, Rule]:
    return {rule.pattern: rule for rule in plan.rules}


# ------------------------------------------------------------------------------------------------------------ extends


def test_b05_an_overlay_joins_the_base_and_every_rule_knows_its_file(here):
    write(base=P0, overlay="dtplan: 1\nextends: base.yaml\nrules: {lm_head: colwise}\n")
    plan = load_plan("overlay.yaml")
    assert {rule.pattern: (rule.style, rule.at.file) for rule in plan.rules} == {
        "model.layers.*.self_attn.q_proj": ("colwise", "base.yaml"),
        "model.layers.*.self_attn.k_proj": ("colwise", "base.yaml"),
        "model.layers.*.self_attn.v_proj": ("colwise", "base.yaml"),
        "model.layers.*.self_attn.o_proj": ("rowwise", "base.yaml"),
        "model.layers.*.mlp.gate_proj": ("colwise", "base.yaml"),
        "model.layers.*.mlp.up_proj": ("colwise", "base.yaml"),
        "model.layers.*.mlp.down_proj": ("rowwise", "base.yaml"),
        "lm_head": ("colwise", "overlay.yaml"),
    }
    assert plan.files == ("overlay.yaml", "base.yaml")


def test_b05_the_head_of_the_overlay_is_cut_in_the_bound_plan(here):
    base = P0 + "  model.embed_tokens: vocab\n  model.layers.*.norm: norm\n"
    write(base=base, overlay="dtplan: 1\nextends: base.yaml\nrules: {lm_head: colwise}\n")
    bound = dtplan.bind(_Tiny(), "overlay.yaml", tp=2)
    (head,) = [module for module in bound.modules if module.pattern == "lm_head"]
    assert head.tensors[0].placement == S(0)
    assert head.rule.startswith("overlay.yaml:3:")
    assert {module.rule.partition(":")[0] for module in bound.modules} == {"base.yaml", "overlay.yaml"}


class _Tiny(nn.Module):
    """Linears, a norm and an embedding under the names of P0."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            layer = nn.ModuleDict(
                {
                    "self_attn": nn.ModuleDict({f"{x}_proj": nn.Linear(8, 8) for x in "qkvo"}),
                    "mlp": nn.ModuleDict({f"{x}_proj": nn.Linear(8, 8) for x in ("gate", "up", "down")}),
                    "norm": nn.LayerNorm(8),
                }
            )
            self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(8, 8), "layers": nn.ModuleList([layer])})
            self.lm_head = nn.Linear(8, 8, bias=False)


def test_a_rule_of_the_same_path_replaces_the_base_s(here):
    write(base=P0, mine="dtplan: 1\nextends: base.yaml\nrules: {model.layers.*.mlp.up_proj: replicate}\n")
    plan = load_plan("mine.yaml")
    assert len(plan.rules) == 7
    assert rules_of(plan)["model.layers.*.mlp.up_proj"].style == "replicate"
    assert rules_of(plan)["model.layers.*.mlp.gate_proj"].style == "colwise"


def test_a_rule_that_only_overlaps_the_base_s_says_which_wins(here):
    write(base=P0, mine="dtplan: 1\nextends: base.yaml\nrules: {model.layers.0.mlp.up_proj: replicate}\n")
    (finding,) = check("mine.yaml")
    assert (finding.code, finding.file, finding.line) == ("DTP301", "mine.yaml", 3)
    assert "base.yaml:6" in finding.message
    write(mine="dtplan: 1\nextends: base.yaml\nrules: {model.layers.0.mlp.up_proj: {style: norm, override: true}}\n")
    assert check("mine.yaml") == ()


_BASE = """\
dtplan: 1
name: base
serves: [A]
units: {head: n_head, ffn: n_inner}
residual: {sequence_parallel: S(0)}
rules: {q: {style: colwise, unit: head}, up: {style: colwise, unit: ffn}, o: rowwise, h.o: rowwise}
variants:
  - {when: {bias: true}, rules: {b1: norm, b2: norm}}
ties: [[q.weight, o.weight]]
names: {q: [query]}
te: {h: [{layer: Linear, linear: o}]}
fsdp: {units: [h.*]}
"""


def test_mappings_are_joined_and_other_keys_are_kept(here):
    write(base=_BASE, mine="dtplan: 1\nextends: base.yaml\nunits: {head: heads}\nnames: {o: [out]}\n")
    plan, base_plan = load_plan("mine.yaml"), load_plan("base.yaml")
    assert plan.name == "mine"
    assert {name: unit.fields for name, unit in plan.units.items()} == {"head": ("heads",), "ffn": ("n_inner",)}
    assert plan.names == {"q": ("query",), "o": ("out",)}
    kept = ("serves", "sequence_parallel", "rules", "variants", "ties", "te", "fsdp")
    assert {key: getattr(plan, key) for key in kept} == {key: getattr(base_plan, key) for key in kept}


def test_a_key_that_is_said_replaces_the_base_s_even_with_a_default(here):
    base = "dtplan: 1\nresidual: {sequence_parallel: S(0)}\nserves: [A]\nrules: {h.o: rowwise}\n"
    base += "te: {h: [{layer: Linear, linear: o}]}\nfsdp: {units: [h]}\n"
    mine = "dtplan: 1\nextends: base.yaml\nresidual: {sequence_parallel: S(1)}\nserves: []\nte: {}\nfsdp: {}\n"
    write(base=base, mine=mine)
    plan = load_plan("mine.yaml")
    assert (plan.sequence_parallel, plan.serves, plan.te, plan.fsdp.units) == (S(1), (), (), ())


def test_what_a_plan_says_of_a_path_replaces_the_base_s_variants(here):
    base = "dtplan: 1\nvariants:\n  - {when: {bias: true}, rules: {a: norm, b: norm, c: norm}}\n"
    base += "  - {when: {bias: false}, rules: {b: norm}}\n"
    mine = "dtplan: 1\nextends: base.yaml\nrules: {a: replicate}\n"
    mine += "variants:\n  - {when: {bias: true}, rules: {b: replicate}}\n"
    write(base=base, mine=mine)
    plan = load_plan("mine.yaml")
    with_bias = {rule.pattern: rule.style for rule in rules_for(plan, {"bias": True})}
    assert with_bias == {"a": "replicate", "b": "replicate", "c": "norm"}
    assert {rule.pattern: rule.style for rule in rules_for(plan, {"bias": False})} == {"a": "replicate", "b": "norm"}


def test_a_plan_may_have_the_name_of_the_built_in_that_it_extends(here):
    write(llama="dtplan: 1\nextends: llama\nserves: [MyModel]\n")
    plan = load_plan("./llama.yaml")
    assert plan.serves == ("MyModel",)
    assert rules_of(plan).keys() == rules_of(load_plan("llama")).keys()


def test_extends_is_beside_the_file_and_not_in_the_working_directory(here):
    (here / "plans").mkdir()
    write(base="dtplan: 1\nrules: {wrong: norm}\n")
    Path("plans/base.yaml").write_text("dtplan: 1\nrules: {right: norm}\n")
    Path("plans/mine.yaml").write_text("dtplan: 1\nextends: base.yaml\n")
    assert rules_of(load_plan("plans/mine.yaml")).keys() == {"right"}


def test_text_in_memory_reads_no_file(here):
    write(base=P0)
    with pytest.raises(PlanError, match="no built-in plan"):
        parse_plan("dtplan: 1\nextends: base.yaml\n")
    assert len(parse_plan("dtplan: 1\nextends: llama\n").rules) == len(load_plan("llama").rules)


def test_extends_that_leads_back_is_refused(here):
    write(me="dtplan: 1\nextends: me.yaml\n")
    assert [(f.code, f.file, f.line) for f in check("me.yaml")] == [("DTP303", "me.yaml", 2)]
    write(
        a="dtplan: 1\nextends: ./b.yaml\n", b="dtplan: 1\nextends: c.yaml\n", c=f"dtplan: 1\nextends: {here}/a.yaml\n"
    )
    (finding,) = check("a.yaml")
    assert (finding.code, finding.file, finding.line) == ("DTP303", "c.yaml", 2)
    assert finding.hint == "break the chain: a.yaml -> b.yaml -> c.yaml -> a.yaml"


def test_a_chain_without_end_is_refused(here):
    write(**{f"p{i}": f"dtplan: 1\nextends: p{i + 1}.yaml\n" for i in range(20)})
    (finding,) = check("p0.yaml")
    assert finding.code == "DTP303"
    assert "8 plans" in finding.message


def test_a_plan_that_extends_nothing_tells_so_with_its_other_findings(here):
    write(mine="dtplan: 1\nextends: bse.yaml\nrules: {q: colwize}\n")
    assert [(f.line, f.code) for f in check("mine.yaml")] == [(2, "DTP303"), (3, "DTP205")]


def test_findings_of_the_base_are_told_with_those_of_the_plan(here):
    write(base="dtplan: 1\nrules: {q: colwize}\n", mine="dtplan: 1\nextends: base.yaml\nrules: {k: colwize}\n")
    assert [(f.file, f.line) for f in check("mine.yaml")] == [("base.yaml", 2), ("mine.yaml", 3)]


def test_a_unit_of_the_base_that_no_rule_uses_any_more_is_no_fault_of_the_plan(here):
    base = "dtplan: 1\nunits: {head: n}\nrules: {q: {style: colwise, unit: head}}\n"
    write(base=base, mine="dtplan: 1\nextends: base.yaml\nrules: {q: replicate}\n")
    assert check("mine.yaml") == ()


# ----------------------------------------------------------------------------------------------------------- overlaps


def overlaps(text: str) -> list[Diagnostic]:
    try:
        parse_plan(text)
    except PlanError as error:
        return [f for f in error.diagnostics if f.code == "DTP301"]
    return []


segments = st.sampled_from(["a", "b", "*"])
two_paths = st.lists(st.lists(segments, min_size=1, max_size=2).map(".".join), min_size=1, max_size=5, unique=True)


@given(two_paths)
@settings(deadline=None)
def test_a_plan_is_refused_where_two_rules_have_a_name_in_common(patterns):
    names = [*itertools.product("abc", repeat=1), *itertools.product("abc", repeat=2)]
    plan = "dtplan: 1\nrules:\n" + "".join(f'  "{pattern}": norm\n' for pattern in patterns)
    hits = [sum(_names(pattern, name) for pattern in patterns) for name in names]
    assert bool(overlaps(plan)) == (max(hits) > 1)


def _names(pattern: str, name: tuple[str, ...]) -> bool:
    segments = pattern.split(".")
    return len(segments) == len(name) and all(s in ("*", n) for s, n in zip(segments, name, strict=True))


def test_every_rule_that_clashes_is_told_once():
    plan = 'dtplan: 1\nrules:\n  "*.x": norm\n  a.x: norm\n  b.x: norm\n  "b.*": norm\n'
    assert [(f.line, f.message.partition(" names what ")[0]) for f in overlaps(plan)] == [
        (4, "`a.x`"),
        (5, "`b.x`"),
        (6, "`b.*`"),
    ]


def test_variants_may_name_the_same_path_under_other_conditions():
    plan = "dtplan: 1\nvariants:\n  - {when: {x: 1}, rules: {a: norm}}\n  - {when: {x: 2}, rules: {a: replicate}}\n"
    assert overlaps(plan) == []


# ---------------------------------------------------------------------------------------------------------- conditions


@pytest.mark.parametrize(
    ("when", "config", "held"),
    [
        ({"bias": True}, {"bias": True}, True),
        ({"bias": True}, {"bias": 1}, False),
        ({"layers": 1}, {"layers": True}, False),
        ({"bias": False}, {}, False),
        ({"bias": None}, {}, True),
        ({"rope.type": "yarn"}, {"rope": {"type": "yarn"}}, True),
        ({"rope.type": "yarn"}, {"rope": None}, False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, False),
    ],
)
def test_a_condition_holds_for_equal_values_of_the_same_kind(when, config, held):
    assert holds(when, config) == held


def test_a_config_field_may_lie_in_a_config_within():
    class Text:
        hidden_size = 8

    class Config:
        text_config = Text()

    assert config_field(Config(), "text_config.hidden_size") == 8
    assert config_field(Config(), "vision_config.hidden_size") is None


# ------------------------------------------------------------------------------------------------------------- digest


def shuffled(value, generator):
    """The same mapping with its keys in another order, at every depth."""
    if isinstance(value, dict):
        items = [(key, shuffled(item, generator)) for key, item in value.items()]
        generator.shuffle(items)
        return dict(items)
    return [shuffled(item, generator) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", builtin_plans())
def test_the_digest_does_not_depend_on_order_name_or_place(here, name):
    text = builtin_plans()[name].read_text(encoding="utf-8")
    digest = load_plan(name).digest
    for seed in range(5):
        data = shuffled(yaml.safe_load(text), random.Random(seed))  # noqa: S311 - no secret
        data["variants"] = data.get("variants", [])[::-1]
        data["serves"] = data["serves"][::-1]
        del data["name"]
        write(**{f"plan{seed}": yaml.safe_dump(data, sort_keys=False)})
        assert load_plan(f"plan{seed}.yaml").digest == digest


CHANGES = {
    "a style": ("post_attention_layernorm: norm", "post_attention_layernorm: replicate"),
    "an output": ("{style: rowwise, unit: ffn, output: residual}", "{style: rowwise, unit: ffn, output: P}"),
    "a unit's field": ("head: num_attention_heads", "head: n_heads"),
    "the order of a unit's fields": (
        "[num_key_value_heads, num_attention_heads]",
        "[num_attention_heads, num_key_value_heads]",
    ),
    "what to do when it is indivisible": ("indivisible: uneven", "indivisible: error"),
    "the sequence dim": ("sequence_parallel: S(1)", "sequence_parallel: S(0)"),
    "the classes": ("serves: [LlamaForCausalLM", "serves: [MyModel"),
    "the ties": ("ties: [[model.embed_tokens.weight, lm_head.weight]]", ""),
    "the FSDP units": ("fsdp: {units: [model.layers.*]}", "fsdp: {units: [model.layers.*, model.norm]}"),
    "an activation": ("activation: swiglu", "activation: geglu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_depends_on(change):
    text = builtin_plans()["llama"].read_text(encoding="utf-8")
    before, after = CHANGES[change]
    assert before in text
    assert parse_plan(text.replace(before, after)).digest != parse_plan(text).digest


def test_the_digest_depends_on_the_order_of_fused_layers_below_one_path():
    """A module goes into the first that takes it; the order of paths says nothing."""
    layers = ["{layer: Linear, linear: a}", "{layer: LayerNormLinear, norm: n, linears: [a]}"]
    paths = ["m", "o"]
    rules = "rules: {m.a: colwise, m.n: norm, o.a: colwise, o.n: norm}"

    def digest(paths, layers):
        te = ", ".join(f"{path}: [{', '.join(layers)}]" for path in paths)
        return parse_plan(f"dtplan: 1\n{rules}\nte: {{{te}}}\n").digest

    assert digest(paths, layers) == digest(paths[::-1], layers)
    assert digest(paths, layers) != digest(paths, layers[::-1])


def test_digests_of_the_built_in_plans_differ():
    digests = [load_plan(name).digest for name in builtin_plans()]
    assert len(set(digests)) == len(digests)


# -------------------------------------------------------------------------------------------------------------- rules


def test_torch_s_names_of_styles_mean_the_same():
    words = {"ColwiseParallel": "colwise", "RowwiseParallel": "rowwise", "SequenceParallel": "norm", "sequence": "norm"}
    plan = parse_plan("dtplan: 1\nrules: {" + ", ".join(f"r{i}: {word}" for i, word in enumerate(words)) + "}\n")
    assert [rule.style for rule in plan.rules] == list(words.values())


def test_groups_nest_and_a_dot_is_the_group_itself():
    nested = (
        "dtplan: 1\nrules:\n  a:\n    .: replicate\n    b:\n      .: norm\n      '{c,d}': colwise\n    e.f: rowwise\n"
    )
    flat = "dtplan: 1\nrules: {a: replicate, a.b: norm, a.b.c: colwise, a.b.d: colwise, a.e.f: rowwise}\n"
    assert parse_plan(nested).digest == parse_plan(flat).digest
    assert [rule.pattern for rule in parse_plan(nested).rules] == ["a", "a.b", "a.b.c", "a.b.d", "a.e.f"]


MOVES = {
    "input: R": ((0, Move(dst=R)),),
    "input: residual": ((0, Move(dst=RESIDUAL)),),
    "input: {from: S(1), to: R}": ((0, Move(src=S(1), dst=R)),),
    "input: {0: R, mask: keep}": ((0, Move(dst=R)), ("mask", Move())),
    "input: sum": ((0, Move(src=R, dst=R)),),
    "input: gather": ((0, Move(src=S(-1), dst=R)),),
    "input: slice": ((0, Move(src=R, dst=S(-1))),),
    "input: {from: S(0), to: slice}": ((0, Move(src=S(0), dst=S(-1))),),
    "output: P": ((None, Move(dst=P)),),
    "output: {0: R, 1: keep}": ((0, Move(dst=R)), (1, Move())),
    "output: sum": ((None, Move(src=P, dst=R)),),
    "output: scatter": ((None, Move(src=P, dst=S(-1))),),
    "output: {to: S(1), global_shape: true}": ((None, Move(dst=S(1), global_shape=True)),),
    "output: {sum_grad_of_last: n}": ((None, Move(sum_grad_of_last="n")),),
}


@pytest.mark.parametrize("text", MOVES)
def test_moves(text):
    (rule,) = parse_plan(f"dtplan: 1\nrules: {{a: {{{text}}}}}\n").rules
    assert (rule.inputs or rule.outputs) == MOVES[text]
