"""The main job on two GPUs over nccl; `pytest -m gpu` runs it where there are any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
def test_the_main_job_on_two_gpus() -> None:
    assert torch.cuda.device_count() >= 2, "two GPUs are needed"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, "tests/gpu/main_job.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "main job: passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
