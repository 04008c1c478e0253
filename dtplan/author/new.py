"""A new plan for a model: drafted, compared with transformers' own, bound, and proved if that is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from dtplan._errors import BindError, PlanError
from dtplan.author.draft import PlanDraft
from dtplan.author.mend import mended
from dtplan.author.model import draft_plan
from dtplan.author.opinion import tp_plan_of, with_opinion
from dtplan.author.writer import plan_text, undecided_rules
from dtplan.plan.read import parse_plan
from dtplan.planner.bind import bind
from dtplan.planner.meta import meta_model
from dtplan.prove.edits import Edit
from dtplan.prove.proof import OnLeg, prove
from dtplan.prove.result import Finding, Proof
from dtplan.prove.shrink import CannotProveError

NOT_RUN = 2
_MOST_FINDINGS = 6
WHOLE = "whole on every rank, which a proof took; to cut it, write rules for what is in it"


@dataclass(frozen=True, slots=True)
class New:
    """A drafted plan as text, and what a proof of it said, if one was made."""

    draft: PlanDraft
    text: str
    proof: Proof | None = None
    unproved: str = ""
    """Why no proof could be made, where one was asked for."""

    @property
    def summary(self) -> str:
        """In a line: what was drafted, and what is left to do."""
        rules, undecided = len(self.draft.rules), len(self.draft.undecided)
        text = f"{rules} rules" + (f", {undecided} of them `todo`" if undecided else "")
        if self.proof is not None:
            return f"{text}; {self.proof.verdict}"
        return f"{text}; {self.unproved}" if self.unproved else text

    @property
    def exit_code(self) -> int:
        """As of `dtplan prove`; 0 where no proof was asked for."""
        if self.proof is not None:
            return self.proof.exit_code
        return NOT_RUN if self.unproved else 0


def new_plan(model: str, *, schema: str = "plan.schema.json") -> New:
    """Draft a plan for the model of a config.

    Args:
        model: a model folder, a config.json, or a name that transformers knows; its weights are not read.
        schema: where an editor finds the plan's JSON Schema, for the first line.

    Raises:
        ModelError: there is no such model.
        CannotProveError: no small model of its class can be run.
    """
    real = meta_model(model)
    draft = with_opinion(draft_plan(real), tp_plan_of(real))
    draft = dataclasses.replace(draft, comments=(*_head(real), *draft.comments))
    draft = _bound(draft, real)
    return New(draft, plan_text(draft, schema=schema))


def proved(
    new: New,
    model: str,
    *,
    tp: Sequence[int],
    file: Path | None = None,
    schema: str = "plan.schema.json",
    on_leg: OnLeg = lambda _result, _legs: None,
) -> New:
    """``new`` with what a proof of it says on top; it is written to ``file`` before, if there is one.

    Raises:
        CannotProveError, BindError: as of ``prove``.
    """
    if new.draft.undecided:
        return _with_choices(new, model, tp=tp, schema=schema, on_leg=on_leg)
    repairs: list[tuple[Edit, ...]] = []

    def proof_of(text: str, name: str | Path) -> Proof:
        plan = name if isinstance(name, Path) else parse_plan(text, name)
        return prove(plan, model, tp=tp, on_leg=on_leg, on_repair=repairs.append)

    try:
        proof = proof_of(new.text, file or f"{new.draft.name}.yaml")
        for repair in repairs[:1] if proof.verdict == "refuted" else ():
            better = mended(new.draft, repair)
            again = proof if better is None else proof_of(plan_text(better), f"{new.draft.name}.yaml")
            if better is not None and again.verdict == "proved":
                new, proof = dataclasses.replace(new, draft=better), again
        if proof.verdict == "refuted" and (found := _where_cut(proof)):
            new = _uncut(new, found)
            proof = proof_of(plan_text(new.draft), f"{new.draft.name}.yaml")
    except (BindError, PlanError, CannotProveError) as error:
        why = f"not proved: {_first_line(error)}"
        return _commented(new, (why,), schema, unproved=why)
    return _commented(dataclasses.replace(new, proof=proof), _verdict(proof), schema)


def _where_cut(proof: Proof) -> Finding | None:
    """What was found where sequence parallelism cut the stream, if everything else was proved."""
    found = [(leg.leg.sequence_parallel, finding) for leg in proof.legs for finding in leg.findings]
    others = [leg.verdict for leg in proof.legs if not leg.leg.sequence_parallel]
    return found[0][1] if found and all(cut for cut, _ in found) and set(others) == {"proved"} else None


def _uncut(new: New, found: Finding) -> New:
    """Without sequence parallelism, and why."""
    seen = f"no sequence parallelism, since a proof refuted it: {found.name}: {found.kind}"
    draft = dataclasses.replace(new.draft, cuts_stream=False, comments=(*new.draft.comments, seen))
    return dataclasses.replace(new, draft=draft)


def _with_choices(new: New, model: str, *, tp: Sequence[int], schema: str, on_leg: OnLeg) -> New:
    """A draft in which every rank does all of what is `todo`, if a proof takes that."""
    undecided = new.draft.undecided
    why = f"not proved: {undecided_rules(new.draft)} `todo`"
    most = max(len(rule.choices) for rule in undecided) if all(rule.choices for rule in undecided) else 0
    for number in range(most):
        draft = dataclasses.replace(new.draft, rules=tuple(rule.chosen(number, WHOLE) for rule in new.draft.rules))
        tried = dataclasses.replace(new, draft=draft, text=plan_text(draft))
        found = proved(tried, model, tp=tp, schema=schema, on_leg=on_leg)
        if found.proof is not None and found.proof.verdict == "proved":
            return found
        if number == 0:
            said = "refuted" if found.proof is not None else found.unproved.removeprefix("not proved: ")
            why += f"; where every rank does all of it, {said}"
    return _commented(new, (why,), schema, unproved=why)


def _head(real: nn.Module) -> tuple[str, ...]:
    return (f"Drafted by `dtplan new` for {type(real).__name__} from the data flow of a small model of its class.",)


def _bound(draft: PlanDraft, real: nn.Module) -> PlanDraft:
    """What binding to the real model says of the draft, as comments on top."""
    if draft.undecided:
        return draft
    try:
        bind(real, parse_plan(plan_text(draft), f"{draft.name}.yaml"), tp=1)
    except (BindError, PlanError) as error:
        told = tuple(f"to be mended: {found.code} {found.message}" for found in error.diagnostics)
        return dataclasses.replace(draft, comments=(*draft.comments, *told))
    return draft


def _verdict(proof: Proof) -> tuple[str, ...]:
    degrees = ", ".join(str(d) for d in sorted({leg.leg.tp for leg in proof.legs}))
    versions = ", ".join(f"{name} {version}" for name, version in proof.versions.items() if name != "python")
    count = sum(leg.verdict == "proved" for leg in proof.legs)
    head = f"{proof.verdict}: {count} of {len(proof.legs)} legs at tp {degrees}, on a small model; {versions}"
    seen: dict[str, list[str]] = {}
    for leg in proof.legs:
        if leg.verdict == "not run":
            seen.setdefault(leg.reason, []).append(str(leg.leg))
        for finding in leg.findings:
            says = finding.says if finding.what == "plan" else finding.kind
            text = f"{finding.name}: {says}" + (f" -> {finding.advice}" if finding.advice else "")
            seen.setdefault(text, []).append(str(leg.leg))
    told = [
        f"- {text} ({legs[0]}{f' and {len(legs) - 1} more' if len(legs) > 1 else ''})" for text, legs in seen.items()
    ]
    return (head, *told[:_MOST_FINDINGS])


def _commented(new: New, lines: tuple[str, ...], schema: str, unproved: str = "") -> New:
    draft = dataclasses.replace(new.draft, comments=(*new.draft.comments, *lines))
    return dataclasses.replace(new, draft=draft, text=plan_text(draft, schema=schema), unproved=unproved)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
