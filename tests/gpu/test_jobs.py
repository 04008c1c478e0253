"""The scripts beside this file on two GPUs over nccl; `pytest -m gpu` runs them where there are any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("script", "ends"), [("main_job.py", "main job: passed"), ("te_job.py", "te job: passed")])
def test_a_job_on_two_gpus(script: str, ends: str) -> None:
    assert torch.cuda.device_count() >= 2, "two GPUs are needed"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, f"tests/gpu/{script}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ends in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
