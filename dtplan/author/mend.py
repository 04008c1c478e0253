"""A draft with what a proof found out: repairs that were run and with which the leg was proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from dtplan.author.draft import PlanDraft, RuleDraft
from dtplan.prove.edits import Edit, pattern_of

REMARK = "mended: a proof refuted the draft, and proved it with this"


def mended(draft: PlanDraft, edits: Iterable[Edit]) -> PlanDraft | None:
    """``draft`` with ``edits`` written into its rules; None where one of them cannot be written so."""
    rules = {rule.path: rule for rule in draft.rules}
    for edit in edits:
        keys = keys_of(edit)
        path = pattern_of(edit.name)
        if keys is None:
            return None
        rule = rules.get(path, RuleDraft(path=path, keys={}))
        rules[path] = dataclasses.replace(rule, keys=_written(rule.keys, keys), notes=(*rule.notes, REMARK))
    return dataclasses.replace(draft, rules=tuple(rules.values()))


def keys_of(edit: Edit) -> Mapping[str, Any] | None:
    """The keys of a rule that an edit's text writes; None of one that is about an input by its name."""
    if "for its input" in edit.note:
        return None
    if not edit.text:
        return {"localize": None}
    keys: Mapping[str, Any] = yaml.safe_load("{" + edit.text + "}")
    return keys


def _written(before: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    instead = {"sections": "unit", "unit": "sections"}
    dropped = {instead[key] for key in keys if key in instead}
    merged = {**{key: value for key, value in before.items() if key not in dropped}, **keys}
    return {key: value for key, value in merged.items() if value is not None}
