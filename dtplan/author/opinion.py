"""A second opinion: the plan that transformers ships with a class, beside what was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from dtplan.author.draft import PlanDraft, RuleDraft

_SAME = {
    "embedding_rowwise": ("vocab",),
    "replicated_with_grad_allreduce": ("replicate", "norm", "sharded_norm"),
    "sequence_parallel": ("norm",),
    "replicate": ("replicate", "norm"),
}
"""Their style -> the styles here that say as much."""
_OF_EXPERTS = ("moe_tp_experts", "moe_experts_allreduce", "grouped_gemm", "all_reduce")
"""What they say of modules whose ranks hold terms of a sum; here it is the `output` of a rule."""
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
    comments = list(draft.comments)
    if missing := [f"{path}: {style}" for path, style in theirs.items() if path not in known and style in _CUT]:
        comments.append(f"transformers' own plan names what this model has not: {', '.join(missing)}")
    if any(rule != before for rule, before in zip(rules, draft.rules, strict=True)):
        comments.append("`transformers: STYLE` behind a rule is what transformers' own plan says there instead")
    elif not missing:
        comments.append("transformers' own plan cuts the same layers in the same way")
    return dataclasses.replace(draft, rules=rules, comments=tuple(comments))


def _told(rule: RuleDraft, theirs: Mapping[str, str]) -> RuleDraft:
    style, cut = theirs.get(rule.path), cut_of(rule.keys)
    words = ""
    if style is None:
        leaves_whole = cut in ("columns", "rows") and "*" in rule.path and rule.path.rpartition(".")[0] not in theirs
        words = "transformers: whole" if leaves_whole else ""
    elif style in _CUT:
        words = "" if cut in (_CUT[style], "parameter") else f"transformers: {style}"
    elif style not in _OF_EXPERTS and rule.keys.get("style") not in _SAME.get(style, ()):
        words = f"transformers: {style}"
    if not words:
        return rule
    return dataclasses.replace(rule, remark="; ".join(filter(None, (rule.remark, words))))


def cut_of(keys: Mapping[str, Any]) -> str | None:
    """`columns`, `rows` or `parameter` of a rule that cuts; None of one that does not."""
    if "shard" in keys:
        return "parameter"
    return {"colwise": "columns", "rowwise": "rows"}.get(str(keys.get("style")))
