"""For tests of sharding plans: Hypothesis strategies, one assertion, and worlds of ranks on a CPU.

Loaded name by name on first use, so that the pytest plugin costs nothing where it is not used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtplan.prove.pool import GlooPool
    from dtplan.prove.simulated import simulated_ranks
    from dtplan.testing.equivalent import assert_plan_equivalent
    from dtplan.testing.profiles import load_profile
    from dtplan.testing.strategies import degrees, model_configs, plans, token_batches

_HOMES = {
    "GlooPool": "dtplan.prove.pool",
    "assert_plan_equivalent": "dtplan.testing.equivalent",
    "degrees": "dtplan.testing.strategies",
    "load_profile": "dtplan.testing.profiles",
    "model_configs": "dtplan.testing.strategies",
    "plans": "dtplan.testing.strategies",
    "simulated_ranks": "dtplan.prove.simulated",
    "token_batches": "dtplan.testing.strategies",
}

__all__ = [
    "GlooPool",
    "assert_plan_equivalent",
    "degrees",
    "load_profile",
    "model_configs",
    "plans",
    "simulated_ranks",
    "token_batches",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dtplan.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
