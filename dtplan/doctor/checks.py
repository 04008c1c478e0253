"""From facts to findings: what is there, what is missing, what that costs, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dtplan.doctor.facts import Facts
from dtplan.report.words import size

SCHEMA_VERSION = 1
PYTHON = (3, 11)
TORCH = ((2, 11), (2, 15))
"""From, and below: as in pyproject.toml."""
TRANSFORMERS = (5, 17)
_SHARED_MEMORY = 1 << 30
_OPEN_FILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing: what was found, and, if it is not as it could be, what that costs and what to do."""

    name: str
    state: Literal["ok", "missing", "required"]
    """``missing`` costs something; ``required`` is missing, and nothing much works without it."""
    found: str
    costs: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """All checks of one machine."""

    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> int:
        """1 if something required is missing."""
        return 1 if any(check.state == "required" for check in self.checks) else 0

    def to_json(self) -> dict[str, Any]:
        """The same as JSON data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": self.exit_code == 0,
            "checks": [asdict(check) for check in self.checks],
        }

    def as_text(self) -> str:
        """A line for each check; below one that is not ok, what it costs and what to do."""
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            mark = {"ok": "ok  ", "missing": "--  ", "required": "!!  "}[check.state]
            lines.append(f"{mark}{check.name:<{width}}  {check.found}")
            indent = " " * (width + 6)
            lines += [f"{indent}costs: {check.costs}"] if check.costs else []
            lines += [f"{indent}do:    {check.do}"] if check.do else []
        missing = sum(check.state == "missing" for check in self.checks)
        required = [check.name for check in self.checks if check.state == "required"]
        end = f"required and missing: {', '.join(required)}" if required else "all that is required is there"
        return "\n".join([*lines, f"{end}; {missing} other things could be better" if missing else end])


def checkup(facts: Facts) -> Checkup:
    """Every check of ``facts``, in the order in which they are told."""
    parts = (_python, _torch, _transformers, _simulated, _backends, _gpus, _peers, _fused, _testing, _limits, _told)
    return Checkup(checks=tuple(check for part in parts for check in part(facts)))


def _python(facts: Facts) -> Iterator[Check]:
    yield Check(name="dtplan", state="ok", found=facts.dtplan)
    oldest = ".".join(map(str, PYTHON))
    if _numbers(facts.python) < PYTHON:
        costs = f"dtplan is written for Python {oldest} or newer"
        yield Check(name="python", state="required", found=facts.python, costs=costs, do=f"install Python {oldest}")
    else:
        yield Check(name="python", state="ok", found=f"{facts.python} on {facts.platform}")


def _torch(facts: Facts) -> Iterator[Check]:
    said = facts.probed["torch"]
    least, below = (".".join(map(str, version)) for version in TORCH)
    do = f"pip install 'torch>={least},<{below}'"
    if "error" in said:
        costs = (
            "only plans are read: list, lint, explain, schema, and diff of plans; nothing is bound, proved or trained"
        )
        yield Check(name="torch", state="required", found=f"cannot be imported: {said['error']}", costs=costs, do=do)
        return
    built = f"built for CUDA {said['cuda']}" if said["cuda"] else "built for the CPU"
    found = f"{said['version']}, {built}"
    version = _numbers(said["version"])
    if version < TORCH[0]:
        costs = f"nothing is promised below {least}: proofs are refused, and applying a plan may fail"
        yield Check(name="torch", state="required", found=found, costs=costs, do=do)
    elif version >= TORCH[1]:
        costs = f"not tried with it yet: dtplan was tested below {below}"
        yield Check(name="torch", state="missing", found=found, costs=costs, do=do)
    else:
        yield Check(name="torch", state="ok", found=found)


def _transformers(facts: Facts) -> Iterator[Check]:
    found = facts.packages.get("transformers")
    least = ".".join(map(str, TRANSFORMERS))
    if found is None or _numbers(found) < TRANSFORMERS:
        costs = "no model is built from a config: show, lock, prove and whatever takes --model do not work"
        told = found or "not installed"
        yield Check(
            name="transformers", state="missing", found=told, costs=costs, do=f"pip install 'transformers>={least}'"
        )
    else:
        yield Check(name="transformers", state="ok", found=found)


def _simulated(facts: Facts) -> Iterator[Check]:
    if not _has_torch(facts):
        return
    said = facts.probed["simulated"]
    if said.get("ranks") == [3, 3]:
        yield Check(name="simulated ranks", state="ok", found="two ranks added their numbers")
    else:
        found = said.get("error", f"a sum over two ranks came out as {said.get('ranks')}")
        costs = "no dtplan prove, no roundtrip: both run ranks as threads of one process"
        yield Check(
            name="simulated ranks",
            state="missing",
            found=found,
            costs=costs,
            do="use a version of torch that dtplan supports",
        )


def _backends(facts: Facts) -> Iterator[Check]:
    if not _has_torch(facts):
        return
    said = facts.probed["torch"]
    if said["gloo"]:
        yield Check(name="gloo", state="ok", found="available")
    else:
        costs = "no ranks on CPUs: no training there, and no leg on processes in dtplan prove --fsdp"
        yield Check(
            name="gloo", state="missing", found="torch was built without", costs=costs, do="install torch's own build"
        )
    if said["nccl"]:
        yield Check(name="nccl", state="ok", found=said["nccl"])
    elif facts.gpus:
        costs = "GPUs cannot talk to each other: one GPU a job"
        yield Check(
            name="nccl",
            state="missing",
            found="torch was built without",
            costs=costs,
            do="install a CUDA build of torch",
        )


def _gpus(facts: Facts) -> Iterator[Check]:
    if not _has_torch(facts):
        return
    said, built = facts.probed["devices"], facts.probed["torch"]["cuda"]
    driver = f", driver {facts.driver}" if facts.driver else ""
    seen = said.get("devices", [])
    if seen:
        kinds: dict[str, int] = {}
        for device in seen:
            name = f"{device['name']} ({size(device['bytes'])})"
            kinds[name] = kinds.get(name, 0) + 1
        found = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        yield Check(name="GPUs", state="ok", found=found + driver)
    elif facts.gpus:
        idle = f"{len(facts.gpus)} x {facts.gpus[0]}{driver}, and torch sees none"
        why = (
            "it was built for the CPU" if not built else said.get("error") or f"is the driver too old for CUDA {built}?"
        )
        do = (
            "install a CUDA build of torch"
            if not built
            else "install a newer driver, or a torch built for an older CUDA"
        )
        yield Check(name="GPUs", state="missing", found=f"{idle}: {why}", costs="everything runs on the CPU", do=do)
    elif "error" in said:
        costs = "everything runs on the CPU"
        yield Check(name="GPUs", state="missing", found=said["error"], costs=costs, do="nvidia-smi tells more")
    else:
        costs = "training runs on CPUs, which is for tests; plans are written, proved and compared without a GPU"
        yield Check(name="GPUs", state="missing", found="none", costs=costs)


def _peers(facts: Facts) -> Iterator[Check]:
    said = facts.probed["devices"]
    number = len(said.get("devices", []))
    if number < 2:
        return
    pairs = number * (number - 1) // 2
    if apart := said["apart"]:
        few = ", ".join(f"{a}-{b}" for a, b in apart[:4]) + (", ..." if len(apart) > 4 else "")
        costs = (
            "what tp sends between them goes through host memory, several times slower: keep a tp group among others"
        )
        found = f"{len(apart)} of {pairs} pairs of GPUs do not reach each other's memory ({few})"
        do = "CUDA_VISIBLE_DEVICES picks the GPUs; nvidia-smi topo -m shows how they are joined"
        yield Check(name="P2P", state="missing", found=found, costs=costs, do=do)
    else:
        yield Check(name="P2P", state="ok", found=f"all {pairs} pairs of GPUs reach each other's memory")
    if facts.nvlinks is None:
        return
    if facts.nvlinks < pairs:
        found = f"{facts.nvlinks} of {pairs} pairs of GPUs"
        costs = "tp sends several times a layer, over PCIe where there is no NVLink: keep tp within pairs that have it"
        yield Check(name="NVLink", state="missing", found=found, costs=costs, do="nvidia-smi topo -m shows the pairs")
    else:
        yield Check(name="NVLink", state="ok", found=f"between all {pairs} pairs of GPUs")


def _fused(facts: Facts) -> Iterator[Check]:
    if not _has_torch(facts):
        return
    said = facts.probed["te"]
    costs = "layers stay torch's own: none is fused, no FP8, no collectives beside matrix products"
    devices = facts.probed["devices"].get("devices", [])
    old = [device["name"] for device in devices if tuple(device["capability"]) < (8, 9)]
    if "version" not in said:
        reason = said.get("reason") or said["error"]
        do = "pip install 'dtplan[te]'" if devices else "nothing on this machine: its layers run on GPUs only"
        yield Check(name="TransformerEngine", state="missing", found=reason.partition(": pip")[0], costs=costs, do=do)
    elif not devices:
        found = f"{said['version']}, and no GPU to run it on"
        yield Check(name="TransformerEngine", state="missing", found=found, costs=costs)
    elif old:
        found = f"{said['version']}; {old[0]} has no FP8"
        yield Check(name="TransformerEngine", state="missing", found=found, costs="fp8= is refused; fused layers work")
    else:
        yield Check(name="TransformerEngine", state="ok", found=f"{said['version']}, with FP8")


def _testing(facts: Facts) -> Iterator[Check]:
    gone = [name for name in ("hypothesis", "pytest") if facts.packages.get(name) is None]
    if gone:
        costs = "no dtplan.testing: no strategies, assertions and fixtures for tests of your own"
        found = f"{' and '.join(gone)} not installed"
        yield Check(name="testing", state="missing", found=found, costs=costs, do="pip install 'dtplan[testing]'")


def _limits(facts: Facts) -> Iterator[Check]:
    memory = f", {size(facts.memory)} of memory free" if facts.memory is not None else ""
    yield Check(name="CPU", state="ok", found=f"{facts.cores} cores{memory}")
    if facts.shared_memory is not None:
        found = f"{size(facts.shared_memory)} free in /dev/shm"
        if facts.shared_memory < _SHARED_MEMORY:
            costs = "NCCL and data loaders pass data there: ranks of one host may fail with a bus error"
            do = "docker run --ipc=host, or --shm-size=8g"
            yield Check(name="shared memory", state="missing", found=found, costs=costs, do=do)
        else:
            yield Check(name="shared memory", state="ok", found=found)
    if facts.open_files is not None and facts.open_files < _OPEN_FILES:
        costs = "ranks with many shards and loaders may fail with `too many open files`"
        found = f"{facts.open_files} at most"
        yield Check(name="open files", state="missing", found=found, costs=costs, do=f"ulimit -n {_OPEN_FILES * 16}")
    if facts.infiniband and facts.locked_memory is not None:
        costs = "NCCL cannot register memory with InfiniBand: jobs over hosts fail or fall back to TCP"
        found = f"{size(facts.locked_memory)} may be locked, and there is InfiniBand"
        yield Check(name="locked memory", state="missing", found=found, costs=costs, do="ulimit -l unlimited")


_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs of one host talk through host memory",
    "NCCL_SHM_DISABLE": "GPUs that do not reach each other talk through sockets",
    "NCCL_IB_DISABLE": "hosts talk through sockets, and not InfiniBand",
}


def _told(facts: Facts) -> Iterator[Check]:
    """Variables of the environment that change what runs."""
    for name, value in facts.variables.items():
        if name in _SLOW and value not in ("", "0"):
            yield Check(name=name, state="missing", found=f"is {value}", costs=_SLOW[name], do=f"unset {name}")
        elif name not in _SLOW:
            yield Check(name=name, state="ok", found=f"is {value!r}: only these GPUs are seen")


def _has_torch(facts: Facts) -> bool:
    return "error" not in facts.probed["torch"]


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
