"""The command line as a user meets it: what it prints, where, and its exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dtplan.cli import cli, main
from dtplan.plan.library import builtin_plans

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


@dataclass(frozen=True)
class Told:
    """What a command printed, and its exit code."""

    stdout: str
    stderr: str
    returncode: int


def shell(*args: str) -> Told:
    """What the installed command does, which is ``main``: it makes the error texts and exit codes."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dtplan", *args])
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Told(out.getvalue(), err.getvalue(), code)


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    return str(file)


def test_list_names_the_built_in_plans_and_what_they_serve() -> None:
    found = run("list")
    assert found.exit_code == 0
    assert [line.split()[0] for line in found.output.splitlines()] == sorted(builtin_plans())
    rows = json.loads(run("list", "--json").output)["plans"]
    assert [row["name"] for row in rows] == sorted(builtin_plans())
    serves = {row["name"]: row["serves"] for row in rows}
    assert serves["llama"] == ["LlamaForCausalLM"]
    assert serves["mistral"] == ["MistralForCausalLM"]


def test_lint_gives_0_for_clean_1_for_findings_and_2_for_misuse(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("dtplan: 1\nrules:\n  a: colwse\n")
    assert run("lint", "llama", "gpt_neox").exit_code == 0
    found = run("lint", "llama", str(bad))
    assert found.exit_code == 1
    assert f"{bad}:3:6: DTP205" in found.output
    assert "did you mean 'colwise'?" in found.output
    assert "llama: no findings" in found.output
    assert run("lint").exit_code == 2
    assert run("lint", "--format", "yaml", "llama").exit_code == 2


def test_lint_for_machines(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("dtplan: 1\nrules:\n  a: colwse\n")
    (finding,) = json.loads(run("lint", "--format", "json", str(bad)).output)["findings"]
    assert (finding["code"], finding["line"], finding["column"]) == ("DTP205", 3, 6)
    github = run("lint", "--format", "github", str(bad)).output
    assert github.startswith(f"::error file={bad},line=3,col=6,title=DTP205::")


def test_show_a_70b_model_without_its_weights(config: str) -> None:
    found = run("show", "llama", "--model", config, "--tp", "8")
    assert found.exit_code == 0, found.output
    assert "llama on LlamaForCausalLM   replicate 1 x shard 1 x tp 8" in found.output
    assert "[1024, 8192]" in found.output
    assert "model.layers.*.self_attn.q_proj x80" in found.output
    assert "model.layers.* x80: 2 forward + 2 backward collectives on tp a layer, the floor (2 + 2)" in found.output
    assert "parameters: 256.96 GiB in all, 32.12 GiB on rank 0" in found.output


def test_show_as_json_is_the_bound_plan_and_the_ledger(config: str) -> None:
    args = ("show", "--model", config, "--tp", "8", "--shard", "4", "--sequence-parallel", "--json")
    first, second = run(*args), run(*args)
    assert first.exit_code == 0
    assert first.output == second.output
    data = json.loads(first.output)
    assert data["degrees"] == {"replicate": 1, "shard": 4, "tp": 8}
    q_proj = next(m for m in data["modules"] if m["pattern"] == "model.layers.*.self_attn.q_proj")
    assert len(q_proj["names"]) == 80
    assert q_proj["tensors"][0]["placement"] == "S(0)"
    assert q_proj["tensors"][0]["local_shape"] == [1024, 8192]
    assert data["ledger"]["floors"][0]["forward"] == 4
    assert data["parameter_bytes"]["rank"] * 32 == pytest.approx(data["parameter_bytes"]["model"], rel=1e-3)


def test_show_warns_above_the_floor(tmp_path: Path, config: str) -> None:
    plan = tmp_path / "ungrouped.yaml"
    plan.write_text("dtplan: 1\nextends: llama\nrules:\n  model.layers.*.self_attn: {input: keep}\n")
    found = run("show", str(plan), "--model", config, "--tp", "8")
    assert "warning: the floor is 2 + 2" in found.output
    assert "q_proj, k_proj, v_proj each prepare their input" in found.output


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("show", "--model", "CONFIG", "--tp", "16"), 1, "DTP405 tensor_parallel_degree 16 does not divide kv_head"),
        (("show", "gpt_neox", "--model", "CONFIG"), 1, "DTP407 plan `gpt_neox` serves GPTNeoXForCausalLM"),
        (("show", "lama", "--model", "CONFIG"), 1, "did you mean 'llama'?"),
        (("show", "--model", "no/such/config.json"), 2, "no such file"),
        (("show", "--model", "EMPTY"), 2, "the folder has no config.json"),
        (("show", "--model", "NOT_A_CONFIG"), 2, "it has no `model_type`"),
    ],
)
def test_errors_have_one_clear_text_and_no_traceback(
    tmp_path: Path, config: str, args: tuple[str, ...], code: int, text: str
) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    (tmp_path / "empty").mkdir()
    places = {"CONFIG": config, "EMPTY": str(tmp_path / "empty"), "NOT_A_CONFIG": str(other)}
    done = shell(*(places.get(arg, arg) for arg in args))
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert text in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_schema_and_explain() -> None:
    assert json.loads(run("schema").output)["title"].startswith("dtplan sharding plan")
    assert run("explain", "dtp405").output.startswith("DTP405: ")
    assert run("explain", "DTP999").exit_code == 2


def test_a_name_is_looked_for_in_the_cache_before_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking takes its time, half a minute where there is no network."""
    import transformers

    asked: list[bool] = []

    def from_pretrained(name: str, *, local_files_only: bool = False) -> Any:
        asked.append(local_files_only)
        if local_files_only and name == "of/others":
            raise OSError("not cached")
        if name == "of/nobody":
            raise OSError(f"{name} is not a local folder\nand more")
        return transformers.LlamaConfig(num_hidden_layers=1)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    for name, calls, code in (("of/mine", [True], 0), ("of/others", [True, False], 0), ("of/nobody", [True, False], 1)):
        asked.clear()
        found = run("show", "--model", name, "--tp", "2")
        assert (asked, found.exit_code) == (calls, code), found.output
    assert "of/nobody: neither a folder, nor a config file, nor a name that is cached here" in str(found.exception)
