"""The README's demo, whole: SmolLM2-135M fine-tuned at tp 3 and at tp 3 x shard 2 (about three minutes)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(900)
def test_every_claim_of_the_demo_holds() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("tp 3") >= 8, done.stdout[-3000:]
