"""Bad input: one clear finding each, all of a file in one run, and nothing that a file holds can do harm."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtplan._errors import Diagnostic, PlanError
from dtplan.plan import paths, rule_grammar, source, syntax
from dtplan.plan.codes import CODES, markdown
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import check, load_plan, parse_plan
from tests.bad_plans import LINT, NOT_YAML, RULES, STRUCTURE, all_bad_plans
from tests.goldens import assert_golden

ROOT = Path(__file__).resolve().parent.parent
OF_THE_WHOLE_FILE = {"DTP101", "DTP103", "DTP107"}
"""Codes that may have no line."""


def findings(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(PlanError) as caught:
        parse_plan(text, "plan.yaml")
    return caught.value.diagnostics


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("not_yaml.txt", NOT_YAML),
        ("structure.txt", STRUCTURE),
        ("rules.txt", RULES),
        ("lint.txt", LINT),
    ],
)
def test_what_users_are_told(file, names):
    plans = all_bad_plans()
    assert_golden(file, {name: "\n".join(f.render() for f in findings(plans[name])) for name in names})


@pytest.mark.parametrize("name", all_bad_plans())
def test_one_finding_with_a_code_a_place_and_a_next_step(name):
    (finding,) = findings(all_bad_plans()[name])
    assert finding.code in CODES
    assert finding.hint
    assert (finding.line > 0 and finding.column > 0) or finding.code in OF_THE_WHOLE_FILE


FILES = {
    "binary": b"dtplan: 1\n\0\1\2",
    "not UTF-8": "dtplan: 1\nname: caf\u00e9\n".encode("latin-1"),
    "not UTF-8, in the first byte": b"\xfe\xff",
    "not UTF-8, after other letters": "# \u00e9\u00e9".encode() + b"\xe9",
    "too large": b"dtplan: 1\n" + b"#" * source.MAX_BYTES,
}


def test_what_users_are_told_about_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, data in FILES.items():
        Path(f"{name}.yaml").write_bytes(data)
    Path("folder.yaml").mkdir()
    plans = [
        *(f"{name}.yaml" for name in FILES),
        "folder.yaml",
        "missing.yaml",
        "lama",
        "gpt-neox.yaml",
        "x" * 300,
    ]
    assert_golden("files.txt", {plan[:40]: "\n".join(f.render() for f in check(plan)) for plan in plans})


def test_no_permission(tmp_path, monkeypatch):
    """By hand: the tests may run as root, who may read everything."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("dtplan: 1\n")
    monkeypatch.setattr(Path, "open", lambda *_args: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    (finding,) = check(plan)
    assert finding.code == "DTP101"
    assert "Permission denied" in finding.message
    assert finding.hint


def test_the_first_byte_that_is_not_utf8_is_pointed_at(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_bytes("dtplan: 1\n# \u00e9: ".encode() + b"\xe9")
    (finding,) = check(plan)
    assert (finding.line, finding.column) == (2, 6)


def test_a_byte_order_mark_is_no_text(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_bytes(b"\xef\xbb\xbfdtplan: 1\nrules: {norm: nrm}\n")
    (finding,) = check(plan)
    assert (finding.line, finding.column) == (2, 15)
    assert parse_plan("\ufeffdtplan: 1\nrules: {norm: norm}\n").rules


def test_all_findings_of_a_file_come_in_one_run():
    text = """\
dtplan: 1
nmae: llama
units: {head: n, ffn: [}
"""
    assert [f.code for f in findings(text)] == ["DTP104"], "what is not YAML cannot be read on"
    text = """\
dtplan: 1
nmae: llama
name: on
name: llama
units: {head: n, ffn: {feild: n}}
serves: LlamaForCausalLM
rules:
  q_proj: colwize
  k_proj: {style: colwise, unit: haed}
  v_proj: {style: colwise, unit: ffn}
  o_proj: {style: rowwise, shard: 1}
  "*_norm": norm
  norm: norm
  "*": todo
extends: nowhere
"""
    assert [(f.line, f.code) for f in findings(text)] == [
        (2, "DTP201"),
        (3, "DTP202"),
        (4, "DTP105"),
        (5, "DTP201"),
        (6, "DTP202"),
        (8, "DTP205"),
        (9, "DTP302"),
        (11, "DTP304"),
        (12, "DTP206"),
        (14, "DTP301"),
        (14, "DTP307"),
        (15, "DTP303"),
    ]


def test_a_finding_is_not_followed_by_those_that_it_causes():
    """A rule that cannot be read leaves its unit unused, its tie and its TE layer without a rule."""
    text = """\
dtplan: 1
units: {head: n}
rules: {a.q: {style: colwize, unit: head}}
ties: [[a.q.weight, a.q.weight]]
te: {a: [{layer: Linear, linear: q}]}
"""
    assert [f.code for f in findings(text)] == ["DTP205"]


@pytest.mark.parametrize(
    "text",
    [
        "dtplan: 1\n" + "".join(f"key{i}: 1\n" for i in range(1000)),
        "dtplan: 1\nrules:\n" + "".join(f"  a{i}: {{style: colwise, unit: b{i}}}\n" for i in range(1000)),
    ],
    ids=["of reading", "of lint"],
)
def test_findings_are_bounded(text):
    told = findings(text)
    assert len(told) == syntax.MAX_FINDINGS + 1
    assert [f.code for f in told].count("DTP107") == 1


def test_paths_are_bounded():
    rules = "".join(f"  x{i}.{{{','.join(f'a{j}' for j in range(100))}}}: norm\n" for i in range(50))
    (finding,) = findings("dtplan: 1\nrules:\n" + rules)
    assert finding.code == "DTP107"
    assert str(rule_grammar.MAX_PATHS) in finding.message


def test_a_long_line_is_shown_around_its_caret():
    (finding,) = findings("dtplan: 1\nrules: {" + ", ".join(f"a{i}: norm" for i in range(100)) + ", b: nrom}\n")
    _, line, caret, _ = finding.render().splitlines()
    assert len(line) < 180
    assert line[caret.index("^") :].startswith("nrom")


def test_nothing_that_a_plan_names_is_imported_or_run(monkeypatch):
    def refuse(name, *_args, **_kwargs):
        raise AssertionError(f"imported {name}")

    monkeypatch.setattr(builtins, "__import__", refuse)
    for tag in (
        "!!python/object/apply:os.system [ls]",
        "!!python/name:os.system",
        "!!python/module:antigravity",
    ):
        (finding,) = findings(f"dtplan: 1\nname: {tag}\n")
        assert finding.code == "DTP106"


ALPHABET = "dtplan: 1\nrules{}[],*&!|>'\"%@`#?-.\t\0\ud800\u0085\ufeff\U0001f600S(x)"


@given(st.text(st.sampled_from(ALPHABET), max_size=60) | st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_gives_a_plan_or_findings(text):
    _refused_or_read(text)


@given(st.sampled_from(sorted(builtin_plans())), st.data())
@settings(max_examples=150, deadline=None)
def test_any_change_of_a_plan_gives_a_plan_or_findings(name, data):
    text = builtin_plans()[name].read_text(encoding="utf-8")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 20))
        text = text[:at] + data.draw(st.text(st.sampled_from(ALPHABET), max_size=5)) + text[at + gone :]
    _refused_or_read(text)


@given(st.binary(max_size=80) | st.binary(max_size=20).map(lambda tail: b"dtplan: 1\nname: " + tail))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_a_plan_or_findings(tmp_path_factory, data):
    plan = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    plan.write_bytes(data)
    assert all(finding.code in CODES for finding in check(plan))


def _refused_or_read(text: str) -> None:
    """Read a text; any error but PlanError fails the test."""
    try:
        plan = parse_plan(text)
    except PlanError as error:
        told = error.diagnostics
    else:
        assert plan.digest
        return
    assert told
    assert all(finding.code in CODES and finding.render() for finding in told)


def test_every_code_of_reading_and_lint_is_shown(tmp_path):
    shown = {finding.code for text in all_bad_plans().values() for finding in findings(text)}
    (tmp_path / "binary.yaml").write_bytes(FILES["binary"])
    shown |= {finding.code for plan in ("missing.yaml", tmp_path / "binary.yaml") for finding in check(plan)}
    wanted = {code for code in CODES if code < "DTP4"}
    assert wanted <= shown


def test_the_page_of_diagnostics_lists_every_code():
    page = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    assert page == markdown(), "renew it: python -m dtplan.plan.codes > docs/diagnostics.md"
    assert all(f"| {code} | {meaning} |" in page for code, meaning in CODES.items())
    rule = "model.layers.*.mlp.up_proj: {style: colwise, unit: fnn}"
    text = f"dtplan: 1\nunits: {{ffn: intermediate_size}}\nrules:\n  {rule}\n"
    assert findings(text)[0].render() in page, "its example is what dtplan prints"


def test_a_plan_is_read_from_a_path_a_name_or_itself(tmp_path):
    plan = load_plan("llama")
    assert load_plan(plan) is plan
    copy = tmp_path / "mine.yaml"
    copy.write_text(builtin_plans()["llama"].read_text(encoding="utf-8").replace("name: llama\n", ""))
    assert load_plan(copy).name == "mine"
    assert load_plan(str(copy)).digest == plan.digest


def test_limits_leave_room_for_real_plans():
    sizes = [path.stat().st_size for path in builtin_plans().values()]
    assert max(sizes) * 20 < source.MAX_BYTES
    assert all(len(load_plan(name).rules) * 50 < rule_grammar.MAX_PATHS for name in builtin_plans())
    assert paths.MAX_ALTERNATIVES < rule_grammar.MAX_PATHS
