"""Locks: a bound plan as a golden file, with the model's config, so that a change of what a plan does is seen.

A lock says the same on every machine: no places, versions or times are in it. Names of repeated modules stand as
``layers.{0..79}``, so that a lock of 80 layers can be read, and its difference reviewed.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtplan._errors import DtplanError
from dtplan.plan.library import builtin_plans
from dtplan.plan.spec import Layout
from dtplan.planner.bound import SCHEMA_VERSION as BOUND_VERSION
from dtplan.planner.bound import BoundPlan
from dtplan.planner.bound_json import bound_from_json
from dtplan.report.diff import Diff
from dtplan.report.diff_bound import diff_bound
from dtplan.report.words import spelled, unspelled

SCHEMA_VERSION = 1
WIDTH = 120
_NAMES = ("names", "fsdp_units", "allows")


class LockError(DtplanError, ValueError):
    """A lock cannot be written, or is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What a plan meant for one model at given degrees and switches."""

    plan: str
    """A built-in plan's name, or a file's path from the lock's folder, with `/`."""
    config: Mapping[str, Any]
    """The model's config, as in its config.json."""
    bound: BoundPlan

    def text(self) -> str:
        """The lock as it is written: JSON, keys in order, short things on one line."""
        data = {
            "dtplan_lock": SCHEMA_VERSION,
            "plan": self.plan,
            "config": dict(sorted(self.config.items())),
            "bound": _brief(self.bound),
        }
        return _dumped(data) + "\n"

    def rebound(self, folder: Path) -> BoundPlan:
        """The plan bound as it is today, where the lock lies in ``folder``.

        Raises:
            PlanError, BindError: the plan is gone or wrong, or does not fit the model any more.
            ModelError: transformers does not build the model any more.
        """
        return self.bound_with(self.plan if self.plan in builtin_plans() else os.path.relpath(folder / self.plan))

    def bound_with(self, plan: str) -> BoundPlan:
        """Any plan, bound to the same model at the same degrees and switches; errors as of ``rebound``."""
        from dtplan.planner.bind import bind
        from dtplan.planner.meta import model_of_config

        return bind(
            model_of_config(self.config, "the lock's config"),
            plan,
            **self.bound.degrees,
            sequence_parallel=self.bound.sequence_parallel,
            loss_parallel=self.bound.loss_parallel,
        )


def lock(plan: str, model: str, folder: Path, **settings: Any) -> Lock:
    """The lock of ``plan`` on ``model`` (as ``meta_model`` takes it); ``settings`` are those of ``bind``.

    Raises:
        PlanError, BindError, ModelError: as ``bind`` and ``meta_model``.
        LockError: the model needs no plan.
    """
    from dtplan.planner.bind import NO_PLAN, bind, find_plan
    from dtplan.planner.meta import config_data, meta_model

    built = meta_model(model)
    if find_plan(built, plan, tp=settings.get("tp", 1)) is NO_PLAN:
        raise LockError(f"no plan serves {type(built).__name__}, so there is nothing to lock: give a plan")
    bound = bind(built, plan, **settings)
    named = plan == "auto" or plan in builtin_plans()
    where = bound.plan if named else Path(os.path.relpath(plan, folder)).as_posix()
    return Lock(plan=where, config=config_data(model), bound=bound)


def read_lock(path: str | Path) -> Lock:
    """The lock in a file.

    Raises:
        LockError: there is no such file, or it is no lock, or one of another version.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LockError(f"{path}: {error.strerror}; dtplan lock --model CONFIG -o {path} writes one") from None
    except ValueError as error:
        raise LockError(f"{path}: no lock: {error}") from None
    if not isinstance(data, dict) or "dtplan_lock" not in data:
        raise LockError(f"{path}: no lock: it has no `dtplan_lock`; dtplan lock --model CONFIG writes one")
    if data["dtplan_lock"] != SCHEMA_VERSION:
        message = f"a lock of version {data['dtplan_lock']!r}, this dtplan reads version {SCHEMA_VERSION}"
        raise LockError(f"{path}: {message}: write it anew with dtplan lock --model CONFIG")
    for key, kind in (("plan", str), ("config", dict), ("bound", dict)):
        if not isinstance(data.get(key), kind):
            raise LockError(f"{path}: no lock: `{key}` is missing or of the wrong kind")
    try:
        whole = _whole(data["bound"], str(path))
    except (KeyError, TypeError, ValueError) as error:
        raise LockError(f"{path}: no lock: names or numbers that cannot be read: {error}") from None
    return Lock(plan=data["plan"], config=data["config"], bound=bound_from_json(whole, str(path)))


def compared(held: Lock, now: BoundPlan, path: str) -> Diff:
    """What the plan does today otherwise than the lock in ``path`` says."""
    found = diff_bound(held.bound, now)
    return dataclasses.replace(found, before=f"{path}: {found.before}", after=f"now: {found.after}")


# --- the bound plan's JSON, and back


def _brief(value: Any, key: str = "") -> Any:
    """JSON data without places and defaults, and with names of repeated modules taken together."""
    if key in _NAMES and value:
        return spelled(list(map(str, value)))
    if isinstance(value, Layout):
        return str(value)
    if dataclasses.is_dataclass(value):
        own = {field: getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "rule"}
        return {f.name: _brief(item, f.name) for f, item in own.items() if item != f.default}
    if isinstance(value, Mapping):
        return {name: _brief(item) for name, item in value.items()}
    return [_brief(item) for item in value] if isinstance(value, tuple) else value


def _whole(bound: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What ``_brief`` took out and ``bound_from_json`` asks for; the place of every rule is the lock."""
    empty: dict[str, Any] = {key: [] for key in ("modules", "ties", "units", "fsdp_units")}
    data = {"schema_version": BOUND_VERSION, **empty} | {key: _lengthened(key, value) for key, value in bound.items()}
    for entry in (*_entries(data, "modules"), *_entries(data, "te")):
        entry["rule"] = path
        entry.setdefault("names", [])
    for entry in _entries(data, "units"):
        entry["allows"] = [int(number) for number in entry["allows"]]
    return data


def _lengthened(key: str, value: Any) -> Any:
    if key in _NAMES and isinstance(value, str):
        return unspelled(value)
    if isinstance(value, list):
        return [_lengthened("", item) for item in value]
    if isinstance(value, dict):
        return {name: _lengthened(name, item) for name, item in value.items()}
    return value


def _entries(data: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    found = data.get(key)
    yield from (entry for entry in (found if isinstance(found, list) else []) if isinstance(entry, dict))


def _dumped(data: Any, indent: int = 0, before: int = 0) -> str:
    """JSON with what fits into a line on one line; ``before`` is the room that a key takes."""
    flat = json.dumps(data, ensure_ascii=True)
    if not isinstance(data, dict | list) or not data or (indent and indent + before + len(flat) < WIDTH):
        return flat
    inner = indent + 2
    if isinstance(data, list):
        items = [" " * inner + _dumped(item, inner) for item in data]
    else:
        keys = {json.dumps(key): value for key, value in data.items()}
        items = [f"{' ' * inner}{key}: {_dumped(value, inner, len(key) + 3)}" for key, value in keys.items()]
    opening, closing = "[]" if isinstance(data, list) else "{}"
    return opening + "\n" + ",\n".join(items) + "\n" + " " * indent + closing
