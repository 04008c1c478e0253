"""Facts about this machine and this installation, gathered without torch in this process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dtplan
from dtplan.doctor.probe import STAGES

PACKAGES = ("transformers", "safetensors", "hypothesis", "pytest", "transformer-engine")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
)
PROBE_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found; None where it could not be."""

    python: str
    platform: str
    dtplan: str
    packages: Mapping[str, str | None]
    """Version of what is installed."""
    probed: Mapping[str, Mapping[str, Any]]
    """Stage of the probe -> what torch said there, or its ``error``."""
    driver: str | None
    """Of the CUDA driver, as nvidia-smi has it."""
    gpus: tuple[str, ...]
    """Devices that the driver sees."""
    nvlinks: int | None
    """Pairs of devices that NVLink joins."""
    cores: int
    memory: int | None
    """Bytes of memory that are free."""
    shared_memory: int | None
    """Bytes that are free in /dev/shm."""
    open_files: int | None
    """Files that a process may have open; None is no limit."""
    locked_memory: int | None
    """Bytes that a process may lock; None is no limit."""
    infiniband: bool
    variables: Mapping[str, str] = field(default_factory=dict)


def gather() -> Facts:
    """The facts of this machine; takes as long as torch takes to import."""
    gpus = _smi("--query-gpu=name,driver_version", "--format=csv,noheader")
    rows = [line.rpartition(", ") for line in (gpus or "").splitlines() if ", " in line]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Facts(
        python=platform.python_version(),
        platform=platform.platform(),
        dtplan=dtplan.__version__,
        packages={name: _version(name) for name in PACKAGES},
        probed=probe(),
        driver=rows[0][2] if rows else None,
        gpus=tuple(name for name, _, _ in rows),
        nvlinks=_nvlinks() if len(rows) > 1 else None,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_free_memory(),
        shared_memory=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,  # noqa: S108
        open_files=None if files == resource.RLIM_INFINITY else files,
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        infiniband=Path("/dev/infiniband").is_dir(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def probe(timeout_s: float = PROBE_S) -> dict[str, dict[str, Any]]:
    """What torch says, stage by stage, from a process of its own: it may crash or hang."""
    root = str(Path(dtplan.__file__).parent.parent)
    paths = os.pathsep.join(path for path in (os.environ.get("PYTHONPATH"), root) if path)
    command = [sys.executable, "-m", "dtplan.doctor.probe"]
    ended = f"did not answer within {timeout_s:.0f} s"
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        out, err = done.stdout, done.stderr
        if done.returncode:
            last = (err.strip().splitlines() or [""])[-1]
            ended = f"ended the process with code {done.returncode}{': ' * bool(last)}{last}"
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode() if isinstance(late.stdout, bytes) else ""  # bytes, also where text was asked for
    found: dict[str, dict[str, Any]] = {}
    for line in out.splitlines():
        if line.startswith('{"stage"'):
            said = json.loads(line)
            found[said.pop("stage")] = said
    for name in STAGES:
        if found.get(name, {"begins": True}).pop("begins", False):
            found[name] = {"error": ended if name in found else "was not asked: the process had ended"}
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _smi(*args: str) -> str | None:
    """What nvidia-smi prints; it asks the driver and sets up nothing on a device."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a system tool with fixed arguments
            [tool, *args], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _nvlinks() -> int | None:
    """Pairs of devices with NVLink between them: entries ``NV<n>`` of the topology, which has each twice."""
    table = _smi("topo", "-m")
    if table is None:
        return None
    words = [word for line in table.splitlines() if line.startswith("GPU") for word in line.split()]
    return sum(word.startswith("NV") and word[2:].isdigit() for word in words) // 2


def _free_memory() -> int | None:
    """MemAvailable, where the kernel tells it."""
    file = Path("/proc/meminfo")
    if not file.is_file():
        return None
    lines = dict(line.split(":", 1) for line in file.read_text(encoding="ascii").splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None
