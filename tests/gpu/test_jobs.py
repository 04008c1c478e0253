"""The scripts beside this file on two ranks; `pytest -m gpu` runs them where there are GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", ["main_job.py", "te_job.py"])
def test_a_job_on_two_ranks(script: str) -> None:
    assert torch.cuda.is_available(), "a GPU is needed"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, f"tests/gpu/{script}"], cwd=ROOT, capture_output=True, text=True, check=False)
    ends = script.removesuffix(".py").replace("_", " ") + ": passed"
    assert ends in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
