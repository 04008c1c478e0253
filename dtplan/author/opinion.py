"""A second opinion: the plan that transformers ships with a class, beside what was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from dtplan.author.draft import PlanDraft, RuleDraft

_CUT = {"colwise": "columns", "packed_colwise": "columns", "rowwise": "rows", "packed_rowwise": "rows"}


def tp_plan_of(real: nn.Module) -> dict[str, str]:
    """The class's `base_model_tp_plan`, with the base model's prefix; styles by the name that transformers gives."""
    config = getattr(real, "config", None)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    prefix = str(getattr(real, "base_model_prefix", ""))
    return {f"{prefix}.{path}" if prefix else path: str(style) for path, style in plan.items()}


def with_opinion(draft: PlanDraft, theirs: Mapping[str, str]) -> PlanDraft:
    """``draft`` with a comment wherever transformers' own plan says something else."""
    if not theirs:
        told = "transformers ships no tensor-parallel plan for this class, so there is no second opinion"
        return dataclasses.replace(draft, comments=(*draft.comments, told))
    rules = tuple(_told(rule, theirs) for rule in draft.rules)
    known = {rule.path for rule in rules}
    missing = [f"{path}: {style}" for path, style in theirs.items() if path not in known and _CUT.get(style)]
    comments = draft.comments
    if missing:
        comments = (*comments, f"transformers' own plan names what this model has not: {', '.join(missing)}")
    same = all(rule == before for rule, before in zip(rules, draft.rules, strict=True)) and not missing
    if same:
        comments = (*comments, "transformers' own plan cuts the same layers in the same way")
    return dataclasses.replace(draft, rules=rules, comments=comments)


def _told(rule: RuleDraft, theirs: Mapping[str, str]) -> RuleDraft:
    style, cut = theirs.get(rule.path), cut_of(rule.keys)
    if style is None:
        differs = cut in ("columns", "rows") and rule.path not in ("lm_head",) and "*" in rule.path
        words = "transformers: whole" if differs and not _by_parameter(rule.path, theirs) else ""
    elif style in _CUT:
        words = "" if _CUT[style] == cut or cut == "parameter" else f"transformers: {style}"
    else:
        words = f"transformers: {style}" if cut in ("columns", "rows", None) else ""
    if not words:
        return rule
    return dataclasses.replace(rule, remark="; ".join(filter(None, (rule.remark, words))))


def _by_parameter(path: str, theirs: Mapping[str, str]) -> bool:
    """Whether their plan names the module of a parameter that is ruled by itself here."""
    return path.rpartition(".")[0] in theirs


def cut_of(keys: Mapping[str, Any]) -> str | None:
    """`columns`, `rows` or `parameter` of a rule that cuts; None of one that does not."""
    if "shard" in keys:
        return "parameter"
    return {"colwise": "columns", "rowwise": "rows"}.get(str(keys.get("style")))
