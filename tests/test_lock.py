"""plan.lock: every built-in plan has one that holds; a plan that does something else is told, with what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import dtplan
from dtplan.cli import cli
from dtplan.plan.library import builtin_plans
from dtplan.report.diff import diff
from dtplan.report.lock import Lock, LockError, lock, read_lock
from tests import families
from tests.models import llama
from tests.pages import check, steps

LOCKS = sorted((Path(__file__).parent / "locks").glob("*.lock"))


# --- the built-in plans'


@pytest.mark.parametrize("plan", builtin_plans())
def test_every_built_in_plan_has_a_lock(plan: str) -> None:
    """Write one: dtplan lock PLAN --model CONFIG --tp 8 -o tests/locks/PLAN-SIZE.lock, with a real config."""
    assert plan in {read_lock(path).plan for path in LOCKS}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_a_lock_is_what_its_plan_gives_today(path: Path) -> None:
    """To the byte, on every machine. Read the difference, then renew: dtplan lock --update tests/locks/*.lock."""
    held = read_lock(path)
    now = Lock(plan=held.plan, config=held.config, bound=held.rebound(path.parent))
    assert now.text() == path.read_text(encoding="utf-8")
    assert read_lock(path).text() == now.text()


def test_the_sizes_that_are_locked_are_the_real_ones() -> None:
    sizes = {path.stem: read_lock(path).bound.parameter_bytes()[0] // 4 for path in LOCKS}
    assert sizes["llama-2-7b"] == 6_738_415_616
    assert sizes["llama-2-70b"] == 68_976_648_192
    assert sizes["gpt_neox-20b"] == 20_554_567_680


# --- the command


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["lock", *map(str, args)])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config, a plan of its own, and a lock of the two in another folder."""
    monkeypatch.chdir(tmp_path)
    fields = llama().to_dict() | {"architectures": ["LlamaForCausalLM"], "transformers_version": "5.0"}
    Path("config.json").write_text(json.dumps(fields))
    Path("mine.yaml").write_text("dtplan: 1\nextends: llama\n")
    Path("locks").mkdir()
    made = run("mine.yaml", "--model", "config.json", "--tp", "2", "--sequence-parallel", "-o", "locks/plan.lock")
    assert made.exit_code == 0, made.output
    Path("config.json").unlink()
    return tmp_path


def edit(text: str) -> None:
    Path("mine.yaml").write_text(f"dtplan: 1\nextends: llama\n{text}")


DRIFT = "rules:\n  model.layers.*.self_attn.o_proj: {style: rowwise, unit: head, output: R}\n"
TOLD = "model.layers.*.self_attn.o_proj: output residual (scatter) -> R (reduce); -1 reduce-scatter a layer forward"


def test_a_lock_holds_wherever_it_is_checked_from(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = json.loads((here / "locks" / "plan.lock").read_text(encoding="utf-8"))
    assert held["plan"] == "../mine.yaml"
    assert "transformers_version" not in held["config"]
    assert str(here) not in json.dumps(held)
    assert read_lock("locks/plan.lock").bound.modules[0].rule == "locks/plan.lock"
    for place, path in (
        (here, "locks/plan.lock"),
        (here / "locks", "plan.lock"),
        (here.parent, here / "locks/plan.lock"),
    ):
        monkeypatch.chdir(place)
        found = run("--check", path)
        assert (found.exit_code, found.output) == (0, f"{path}: holds (../mine.yaml on LlamaForCausalLM)\n")
    monkeypatch.chdir(here / "locks")
    assert run("--check").exit_code == 0  # plan.lock, where none is named


def test_a_lock_of_any_family_comes_back(tmp_path: Path) -> None:
    """Experts, sections, buffers without a dim, rules on parameters, renamed modules, ties."""
    for family in families.CONFIGS:
        bound = dtplan.bind(families.on_meta(family), families.plan_file(family), tp=2, shard=2)
        made = Lock(plan="x", config={}, bound=bound)
        (tmp_path / "plan.lock").write_text(made.text())
        back = read_lock(tmp_path / "plan.lock")
        assert back.text() == made.text()
        assert diff(bound, back.bound).equal
        assert [m.names for m in back.bound.modules] == [m.names for m in bound.modules]


def test_drift_is_told_and_taken_over(here: Path) -> None:
    before = (here / "locks" / "plan.lock").read_text(encoding="utf-8")
    edit(DRIFT)
    found = run("--check", "locks/plan.lock")
    assert found.exit_code == 1
    assert TOLD in found.output
    assert "locks/plan.lock: if this is meant: dtplan lock --update locks/plan.lock" in found.output
    assert (here / "locks" / "plan.lock").read_text(encoding="utf-8") == before
    updated = run("--update", "locks/plan.lock")
    assert updated.exit_code == 0
    assert TOLD in updated.output
    assert run("--check", "locks/plan.lock").exit_code == 0
    assert (here / "locks" / "plan.lock").read_text(encoding="utf-8") != before


def test_comments_and_spelling_are_no_drift(here: Path) -> None:
    edit(
        "# of no meaning\nrules:\n"
        "  model.layers.*.self_attn.o_proj: {output: residual, unit: head, style: RowwiseParallel}\n"
    )
    assert run("--check", "locks/plan.lock").exit_code == 0


def test_drift_for_machines(here: Path) -> None:
    edit(DRIFT)
    found = run("--check", "locks/plan.lock", "--format", "json")
    (one,) = json.loads(found.output)["locks"]
    assert (one["lock"], one["holds"], one["diff"]["equal"]) == ("locks/plan.lock", False, False)
    annotation = run("--check", "locks/plan.lock", "--format", "github").output
    assert annotation.startswith(
        "::error file=locks/plan.lock,title=the plan does something else::--- locks/plan.lock: "
    )
    assert annotation.count("\n") == 1
    assert "%0A" + TOLD in annotation


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rules:\n  model.zzz: norm\n", "DTP401 the rule `model.zzz` names nothing"),
        ("rules:\n  model.norm: nrom\n", "did you mean 'norm'?"),
        (None, "DTP101 there is no file"),
    ],
)
def test_a_plan_that_cannot_be_bound_any_more_is_drift(here: Path, text: str | None, told: str) -> None:
    edit(text) if text is not None else Path("mine.yaml").unlink()
    for how in ("--check", "--update"):
        found = run(how, "locks/plan.lock")
        assert found.exit_code == 1
        assert "locks/plan.lock: the plan cannot be bound any more" in found.output
        assert told in found.output
    (one,) = json.loads(run("--check", "locks/plan.lock", "--format", "json").output)["locks"]
    assert one["holds"] is False
    assert told in one["error"]


def test_a_lock_of_the_built_in_plan_is_printed(here: Path) -> None:
    Path("config.json").write_text(json.dumps(llama().to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    first, second = (run("--model", "config.json", "--tp", "4", "-o", "-").output for _ in range(2))
    assert first == second
    assert json.loads(first)["plan"] == "llama"
    assert not Path("plan.lock").exists()


def test_a_plan_beside_a_lock_is_bound_as_the_lock_says(here: Path) -> None:
    edit(DRIFT)
    found = CliRunner().invoke(cli, ["diff", "locks/plan.lock", "mine.yaml"])
    assert found.exit_code == 1
    assert TOLD in found.output
    assert CliRunner().invoke(cli, ["diff", "locks/plan.lock", "llama"]).exit_code == 0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "give --model CONFIG to write a lock, or --check LOCK to check one"),
        (("--check", "locks/plan.lock", "--tp", "2"), "--tp is for writing a lock"),
        (("--model", "m", "a", "b"), "one plan for a lock, got a, b"),
    ],
)
def test_misuse_is_told_with_what_to_do(here: Path, args: tuple[str, ...], told: str) -> None:
    found = run(*args)
    assert found.exit_code == 2
    assert told in found.output


def test_a_model_that_needs_no_plan_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "num_hidden_layers": 1, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LockError, match="no plan serves OPTForCausalLM"):
        lock("auto", str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtplan_lock": 2}, "a lock of version 2, this dtplan reads version 1"),
        ({"config": None}, "`config` is missing or of the wrong kind"),
        ({"bound": {"modules": 1}}, "got 1, which does not belong there"),
        ({"bound": {"fsdp_units": "layers.{0..x}"}}, "names or numbers that cannot be read"),
        ({"bound": {"units": [{}]}}, "names or numbers that cannot be read"),
        ({"bound": {"zzz": 1}}, "unknown key `zzz`"),
    ],
)
def test_a_broken_lock_is_refused(here: Path, changes: dict[str, Any], told: str) -> None:
    file = here / "locks" / "plan.lock"
    data = json.loads(file.read_text(encoding="utf-8"))
    inside = changes.pop("bound", {})
    file.write_text(json.dumps(data | changes | {"bound": data["bound"] | inside}))
    with pytest.raises(ValueError) as error:  # noqa: PT011 - LockError, or that of the bound plan inside
        read_lock(file)
    assert told in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("text", "told"), [("{", "no lock: "), ("[]", "it has no `dtplan_lock`"), (None, "No such file")]
)
def test_what_is_no_lock_is_refused(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "plan.lock"
    file.write_text(text) if text is not None else None
    with pytest.raises(LockError) as error:
        read_lock(file)
    assert told in str(error.value)


def test_the_page_s_commands_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/compare.md: every console block, in order, in a folder with the page's two files."""
    monkeypatch.chdir(tmp_path)
    told = list(steps("compare.md", tmp_path))
    for command, output in told:
        check(command, output, tmp_path)
    assert len(told) == 4
