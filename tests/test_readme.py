"""Every block of the README runs, or is the real output of what runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, GraniteConfig

import dtplan
from dtplan.cli import cli
from dtplan.plan.read import parse_plan
from tests.models import build, llama
from tests.test_cli import LLAMA_70B, shell

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the checkpoint that the README's blocks name."""
    place = tmp_path_factory.mktemp("readme")
    build(llama(use_cache=True), dtype=torch.float32).save_pretrained(place / "my-llama")
    return place


def run(*command: str, cwd: Path) -> str:
    bin_folder = str(Path(sys.executable).parent)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": bin_folder + os.pathsep + os.environ["PATH"]}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_python_block_trains_and_saves(folder: Path) -> None:
    script, _test = blocks("python")
    (folder / "train.py").write_text(script)
    (torchrun,) = [block for block in blocks("sh") if "torchrun" in block]
    options = torchrun.split("torchrun", 1)[1].split()
    out = run(sys.executable, "-m", "torch.distributed.run", "--standalone", *options, cwd=folder)
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", out)]
    assert len(losses) == 3
    tuned = AutoModelForCausalLM.from_pretrained(folder / "my-llama-tuned")
    before = AutoModelForCausalLM.from_pretrained(folder / "my-llama")
    assert not torch.equal(tuned.lm_head.weight, before.lm_head.weight)


def test_the_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (block,) = [block for block in blocks("sh") if "dtplan list" in block]
    lines = [line.partition("#")[0].split() for line in block.splitlines()]
    assert len(lines) == 9
    for command, *args in lines:
        assert command == "dtplan"
        done = CliRunner().invoke(cli, args)
        assert done.exit_code == 0, f"{args}: {done.output} {done.exception}"
        assert done.output


def test_the_test_of_a_plan_passes(tmp_path: Path) -> None:
    """As the README says it; the plugin is named, so that a checkout that is not installed has it too."""
    _script, test = blocks("python")
    (plan,) = blocks("yaml")
    (command,) = [block for block in blocks("sh") if "pytest" in block]
    (tmp_path / "test_granite.py").write_text(test)
    (tmp_path / "granite.yaml").write_text(plan)
    program, *arguments = command.split()
    assert program == "pytest"
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    names = [sys.executable, "-m", program, "-p", "dtplan.testing.plugin", *arguments]
    done = subprocess.run(names, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_make_targets_exist() -> None:
    """`make test` is what runs this test; `make demo` runs what test_demo.py runs."""
    (block,) = [block for block in blocks("sh") if "make" in block]
    targets = re.findall(r"^make (\w+)", block, re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_plan_is_a_plan() -> None:
    (text,) = blocks("yaml")
    plan = parse_plan(text)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GraniteConfig(num_hidden_layers=1))
    assert dtplan.bind(model, plan, tp=8).architecture == "GraniteForCausalLM"


def test_the_outputs_are_real(tmp_path: Path) -> None:

    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_70B))
    shown = shell("show", "llama", "--model", str(config), "--tp", "8").stdout
    config.write_text(
        json.dumps(
            {
                **LLAMA_70B,
                "hidden_size": 5120,
                "intermediate_size": 13824,
                "num_attention_heads": 40,
                "num_key_value_heads": 40,
            }
        )
    )
    refused = shell("show", "llama", "--model", str(config), "--tp", "5").stderr
    outputs = blocks("text")
    assert len(outputs) == 2
    squeezed = {name: " ".join(text.split()) for name, text in (("shown", shown), ("refused", refused))}
    for line in outputs[0].splitlines()[1:]:
        for cell in re.split(r"\s{2,}", line.strip()):
            assert cell == "..." or " ".join(cell.split()) in squeezed["shown"], cell
    assert " ".join(outputs[1].split()) in squeezed["refused"]
