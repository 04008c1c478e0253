"""What every test file may use: the two worlds, and a process that is offline and takes one core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before torch and transformers read them, and for the server that the pool's ranks are forked from.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import pytest
import torch

from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.te import engine as engines
from dtplan.testing.profiles import load_profile
from tests import te_standin

torch.set_num_threads(1)
load_profile(os.environ.get("DTPLAN_PROFILE") or "ci")  # --dtplan-profile comes later, and counts more


PRELOAD = (
    "pytest",
    "hypothesis",
    "dtplan.planner.apply",
    "dtplan.weights.api",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
)
"""What most ranks import, a second of work that each would do again."""


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """Four gloo ranks; the first call of a run waits for the server that later ones fork from."""
    with GlooPool(4, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> engines.Engine:
    """TransformerEngine's interface on the CPU, in float64, in place of TransformerEngine."""
    monkeypatch.setattr(engines, "find", lambda: te_standin.ENGINE)
    te_standin.ENTERED.clear()
    return te_standin.ENGINE


@pytest.fixture(scope="session")
def simulated() -> Callable[..., list]:
    """``simulated(n, fn, *args)``: ``fn(rank, *args)`` on n threads."""
    return simulated_ranks
