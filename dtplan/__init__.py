"""DTensor-native sharding plans for Hugging Face models: write a plan, check it, apply it, load, train, save."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dtplan._errors import (
    ApplyError,
    BindError,
    DegreesError,
    Diagnostic,
    DtplanError,
    PlanError,
    WeightsError,
)

if TYPE_CHECKING:
    from dtplan.plan.read import check, load_plan, parse_plan
    from dtplan.plan.spec import Plan
    from dtplan.planner.apply import applied, parallelize
    from dtplan.planner.bind import bind
    from dtplan.planner.bound import BoundPlan
    from dtplan.planner.clip import clip_grad_norm_
    from dtplan.planner.compiled import compile_model
    from dtplan.planner.degrees import Degrees
    from dtplan.planner.graphed import GraphedStep
    from dtplan.planner.loss import cross_entropy, entropy, log_probs
    from dtplan.report.diff import diff
    from dtplan.smp import State, get_state, init, is_initialized, reset, transform
    from dtplan.training.checkpoints import Resumed, TrainingCheckpoints
    from dtplan.weights.api import load, save
    from dtplan.weights.initialize import initialize

__version__ = "0.1.0.dev0"

# Loaded on first use, so that reading and checking plans needs no torch.
_HOMES = {
    "Plan": "dtplan.plan.spec",
    "check": "dtplan.plan.read",
    "load_plan": "dtplan.plan.read",
    "parse_plan": "dtplan.plan.read",
    "BoundPlan": "dtplan.planner.bound",
    "Degrees": "dtplan.planner.degrees",
    "GraphedStep": "dtplan.planner.graphed",
    "applied": "dtplan.planner.apply",
    "bind": "dtplan.planner.bind",
    "clip_grad_norm_": "dtplan.planner.clip",
    "compile_model": "dtplan.planner.compiled",
    "cross_entropy": "dtplan.planner.loss",
    "entropy": "dtplan.planner.loss",
    "log_probs": "dtplan.planner.loss",
    "diff": "dtplan.report.diff",
    "parallelize": "dtplan.planner.apply",
    "State": "dtplan.smp",
    "get_state": "dtplan.smp",
    "init": "dtplan.smp",
    "is_initialized": "dtplan.smp",
    "reset": "dtplan.smp",
    "transform": "dtplan.smp",
    "Resumed": "dtplan.training.checkpoints",
    "TrainingCheckpoints": "dtplan.training.checkpoints",
    "initialize": "dtplan.weights.initialize",
    "load": "dtplan.weights.api",
    "save": "dtplan.weights.api",
}

__all__ = [
    "ApplyError",
    "BindError",
    "BoundPlan",
    "Degrees",
    "DegreesError",
    "Diagnostic",
    "DtplanError",
    "GraphedStep",
    "Plan",
    "PlanError",
    "Resumed",
    "State",
    "TrainingCheckpoints",
    "WeightsError",
    "__version__",
    "applied",
    "bind",
    "check",
    "clip_grad_norm_",
    "compile_model",
    "cross_entropy",
    "diff",
    "entropy",
    "get_state",
    "init",
    "initialize",
    "is_initialized",
    "load",
    "load_plan",
    "log_probs",
    "parallelize",
    "parse_plan",
    "reset",
    "save",
    "transform",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dtplan' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
