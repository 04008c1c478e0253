"""`dtplan doctor`: what it says of this machine, of broken torches, and of machines that are not here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dtplan.cli import cli
from dtplan.doctor.checks import PYTHON, TORCH, TRANSFORMERS, Checkup, checkup
from dtplan.doctor.facts import Facts, probe

ROOT = Path(__file__).resolve().parent.parent
H200 = {"name": "NVIDIA H200", "bytes": 150_000_000_000, "capability": [9, 0]}


def machine(**changes: Any) -> Facts:
    """Eight H200 joined by NVLink, with everything installed."""
    probed: dict[str, dict[str, Any]] = {
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0", "gloo": True, "nccl": "2.28.3"},
        "devices": {"devices": [H200] * 8, "apart": []},
        "simulated": {"ranks": [3, 3]},
        "te": {"version": "2.20.0"},
    }
    for stage, said in changes.pop("probed", {}).items():
        probed[stage] = said if "error" in said or "reason" in said else probed[stage] | said
    whole = Facts(
        python="3.12.1",
        platform="Linux",
        dtplan="1",
        packages={"transformers": "5.24.0", "hypothesis": "6.140.0", "pytest": "9.0"},
        probed=probed,
        driver="580.65",
        gpus=("NVIDIA H200",) * 8,
        nvlinks=28,
        cores=128,
        memory=1 << 40,
        shared_memory=1 << 38,
        open_files=1 << 20,
        locked_memory=None,
        infiniband=True,
    )
    return dataclasses.replace(whole, **changes)


def told(found: Checkup) -> dict[str, str]:
    """Name -> what was found, of all that is not ok."""
    return {check.name: check.found for check in found.checks if check.state != "ok"}


def test_a_machine_with_everything_has_nothing_to_be_told() -> None:
    found = checkup(machine())
    assert told(found) == {}
    assert found.exit_code == 0
    text = found.as_text()
    assert "8 x NVIDIA H200 (139.70 GiB), driver 580.65" in text
    assert "all 28 pairs of GPUs reach each other's memory" in text
    assert text.endswith("all that is required is there")


NO_DEVICES: dict[str, Any] = {"devices": {"devices": [], "apart": []}}


@pytest.mark.parametrize(
    ("changes", "name", "found"),
    [
        ({"python": "3.10.4"}, "python", "3.10.4"),
        ({"probed": {"torch": {"version": "2.8.0"}}}, "torch", "2.8.0, built for CUDA 13.0"),
        ({"probed": {"torch": {"version": "2.15.0.dev1"}}}, "torch", "2.15.0.dev1, built for CUDA 13.0"),
        ({"packages": {"hypothesis": "6", "pytest": "9"}}, "transformers", "not installed"),
        (
            {"packages": {"hypothesis": "6", "pytest": "9", "transformers": "4.57.0"}},
            "transformers",
            "4.57.0",
        ),
        ({"packages": {"transformers": "5.20", "pytest": "9"}}, "testing", "hypothesis not installed"),
        ({"probed": {"simulated": {"error": "ImportError: no"}}}, "simulated ranks", "ImportError: no"),
        ({"probed": {"simulated": {"ranks": [1, 2]}}}, "simulated ranks", "a sum over two ranks came out as [1, 2]"),
        ({"probed": {"torch": {"gloo": False}}}, "gloo", "torch was built without"),
        ({"probed": {"torch": {"nccl": None}}}, "nccl", "torch was built without"),
        (
            {"probed": {"devices": {"apart": [[0, 4], [1, 5]]}}},
            "P2P",
            "2 of 28 pairs of GPUs do not reach each other's memory (0-4, 1-5)",
        ),
        ({"nvlinks": 4}, "NVLink", "4 of 28 pairs of GPUs"),
        ({"probed": {"te": {"reason": "it does not load (libx)"}}}, "TransformerEngine", "it does not load (libx)"),
        (
            {"probed": {"te": {"error": "ended the process with code -11"}}},
            "TransformerEngine",
            "ended the process with code -11",
        ),
        ({"shared_memory": 64 << 20}, "shared memory", "64.00 MiB free in /dev/shm"),
        ({"open_files": 1024}, "open files", "1024 at most"),
        ({"locked_memory": 65536}, "locked memory", "64.00 KiB may be locked, and there is InfiniBand"),
        ({"variables": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE", "is 1"),
    ],
)
def test_one_missing_thing_is_told_with_what_it_costs(changes: dict[str, Any], name: str, found: str) -> None:
    checked = checkup(machine(**changes))
    assert told(checked) == {name: found}
    (check,) = (check for check in checked.checks if check.name == name)
    assert check.costs
    assert check.do
    required = name == "python" or (name == "torch" and "2.8" in found)
    assert checked.exit_code == (1 if required else 0)
    assert check.state == ("required" if required else "missing")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"probed": NO_DEVICES, "gpus": (), "driver": None, "nvlinks": None}, "none"),
        (
            {"probed": {**NO_DEVICES, "torch": {"cuda": None, "nccl": None}}},
            "8 x NVIDIA H200, driver 580.65, and torch sees none: it was built for the CPU",
        ),
        (
            {"probed": NO_DEVICES},
            "8 x NVIDIA H200, driver 580.65, and torch sees none: is the driver too old for CUDA 13.0?",
        ),
        (
            {"probed": {"devices": {"error": "RuntimeError: No HIP"}}, "gpus": (), "driver": None},
            "RuntimeError: No HIP",
        ),
    ],
)
def test_gpus_that_are_not_seen(changes: dict[str, Any], found: str) -> None:
    assert told(checkup(machine(**changes)))["GPUs"] == found


def test_gpus_without_fp8_are_told() -> None:
    a100 = {"name": "NVIDIA A100", "bytes": 1 << 36, "capability": [8, 0]}
    found = checkup(machine(probed={"devices": {"devices": [a100]}}))
    assert told(found) == {"TransformerEngine": "2.20.0; NVIDIA A100 has no FP8"}


def test_a_variable_that_hides_gpus_is_named_and_one_that_is_off_is_not_blamed() -> None:
    found = checkup(machine(variables={"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_IB_DISABLE": "0"}))
    assert told(found) == {}
    assert "is '0,1': only these GPUs are seen" in found.as_text()


def test_the_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least, below, hf = (".".join(map(str, version)) for version in (*TORCH, TRANSFORMERS))
    assert f"torch>={least},<{below}" in project["dependencies"]
    assert f"transformers>={hf}" in project["optional-dependencies"]["hf"]
    assert project["requires-python"] == ">=" + ".".join(map(str, PYTHON))


# --- this machine


@pytest.fixture(scope="module")
def here() -> Any:
    """The command on this machine, whose Python has all that the tests need."""
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_this_machine_is_fit(here: Any) -> None:
    assert here["ok"] is True
    states = {check["name"]: check["state"] for check in here["checks"]}
    assert {states[name] for name in ("python", "torch", "transformers", "simulated ranks", "gloo")} == {"ok"}
    assert set(states) >= {"GPUs", "TransformerEngine", "CPU"}
    assert all(check["costs"] for check in here["checks"] if check["state"] != "ok")


# --- torch that is absent, broken, old

TORCHES = {
    "absent": (
        "raise ModuleNotFoundError(\"No module named 'torch'\")",
        "ModuleNotFoundError: No module named 'torch'",
    ),
    "broken": ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
    "crashing": ("import os; os.abort()", "ended the process with code -6"),
}


def doctor_with(torch: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command where ``import torch`` runs the code ``torch``; it must not do so in its own process."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(torch)
    paths = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "dtplan.cli", "doctor"],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("kind", TORCHES)
def test_torch_that_cannot_be_imported_is_told(tmp_path: Path, kind: str) -> None:
    code, found = TORCHES[kind]
    done = doctor_with(code, tmp_path)
    assert done.returncode == 1, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("!!"))
    assert line.split(maxsplit=2)[1:] == ["torch", f"cannot be imported: {found}"]
    assert "costs: only plans are read" in done.stdout
    assert "pip install 'torch>=2.11,<2.15'" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("required and missing: torch")
    assert done.stderr == ""


def test_torch_that_is_old_is_told(tmp_path: Path) -> None:
    old = (
        "import types, sys\n__version__ = '2.4.1'\nversion = types.SimpleNamespace(cuda=None)\n"
        "distributed = sys.modules['torch.distributed'] = types.ModuleType('torch.distributed')\n"
        "distributed.is_available = lambda: False\ncuda = types.SimpleNamespace(is_available=lambda: False)\n"
    )
    done = doctor_with(old, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "2.4.1, built for the CPU" in done.stdout
    assert "nothing is promised below 2.11" in done.stdout
    assert "gloo" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_torch_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = probe(timeout_s=1)
    assert said["torch"] == {"error": "did not answer within 1 s"}
    assert said["devices"] == {"error": "was not asked: the process had ended"}
