"""What editors, shells, GitHub and pre-commit are given: completion, annotations, hooks."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dtplan.cli import cli
from dtplan.cli.completion import SHELLS
from dtplan.plan.codes import CODES
from dtplan.plan.library import builtin_plans

ROOT = Path(__file__).resolve().parent.parent
BAD = "dtplan: 1\nrules:\n  a: colwse\n"


def completed(words: str, tmp_path: Path) -> list[str]:
    """What bash offers after ``words`` and a tab, with the printed script sourced; importing torch there fails."""
    shim = tmp_path / "bin" / "dtplan"
    if not shim.exists():
        shim.parent.mkdir()
        code = "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'dtplan'; "
        code += "from dtplan.cli import main; main()"
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" {shlex.quote(str(ROOT))} "$@"\n')
        shim.chmod(0o755)
    given = shlex.split(words.replace("<tab>", "''"))
    array = " ".join(shlex.quote(word) for word in given)
    script = (
        f"compopt() {{ :; }}\ncomplete() {{ :; }}\nsource <(dtplan completion bash)\nCOMP_WORDS=({array})\n"
        f"COMP_CWORD={len(given) - 1}\n_dtplan_completion dtplan\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    )
    bash = shutil.which("bash")
    assert bash
    path = f"{shim.parent}:/usr/bin:/bin"
    done = subprocess.run(
        [bash, "-c", script], env={"PATH": path}, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_shell_completes_names_files_codes_and_choices(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(BAD)
    (tmp_path / "plan.lock").write_text("{}")
    assert "lint" in completed("dtplan l", tmp_path)
    assert completed("dtplan lint <tab>", tmp_path) == [*builtin_plans(), "mine.yaml"]
    assert completed("dtplan show gpt_n", tmp_path) == ["gpt_neox"]
    assert completed("dtplan diff llama p", tmp_path)[-1] == "plan.lock"
    assert completed("dtplan explain dtp40", tmp_path) == [code for code in CODES if code.startswith("DTP40")]
    assert completed("dtplan lint --format <tab>", tmp_path) == ["text", "json", "github"]
    assert completed("dtplan lint nothing", tmp_path) == [""]  # the shell's own files


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_for_three_shells(shell: str) -> None:
    found = CliRunner().invoke(cli, ["completion", shell])
    assert found.exit_code == 0
    assert f"_DTPLAN_COMPLETE={shell}_complete" in found.output
    assert found.output.startswith("# in ~/")


def test_annotations_are_one_line_whatever_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner reads a command to the end of its line, its properties to a comma or colon, and %XX as a character."""
    monkeypatch.chdir(tmp_path)
    Path("50%,a:b.yaml").write_text(BAD.replace("colwse", '"col\\nwse 100%"'))
    found = CliRunner().invoke(cli, ["lint", "--format", "github", "50%,a:b.yaml"])
    assert found.exit_code == 1
    assert found.output.count("\n") == 1
    head, _, message = found.output.removeprefix("::error ").partition("::")
    assert head == "file=50%25%2Ca%3Ab.yaml,line=3,col=6,title=DTP205"
    assert "col%0Awse 100%25" in message


HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))}


def test_the_hooks_have_what_pre_commit_asks_for() -> None:
    assert set(HOOKS) == {"dtplan-lint", "dtplan-lock"}
    for hook in HOOKS.values():
        assert {"id", "name", "entry", "language", "files"} <= hook.keys()
        assert hook["language"] == "system"


def test_the_lint_hook_takes_plans_and_fails_on_a_bad_one(tmp_path: Path) -> None:
    hook = HOOKS["dtplan-lint"]
    assert [bool(re.search(hook["files"], path)) for path in ("plans/a.yaml", "x/plans/b.yml", ".github/ci.yaml")] == [
        True,
        True,
        False,
    ]
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD)
    program, *args = shlex.split(hook["entry"])
    assert program == "dtplan"
    assert CliRunner().invoke(cli, [*args, "llama", str(bad)]).exit_code == 1
    assert CliRunner().invoke(cli, [*args, "llama"]).exit_code == 0


def test_the_lock_hook_checks(tmp_path: Path) -> None:
    program, *args = shlex.split(HOOKS["dtplan-lock"]["entry"])
    assert program == "dtplan"
    assert CliRunner().invoke(cli, [*args, str(ROOT / "tests" / "locks" / "llama-2-7b.lock")]).exit_code == 0
    assert CliRunner().invoke(cli, [*args, str(tmp_path / "none.lock")]).exit_code != 0
