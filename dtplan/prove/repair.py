"""What to write instead: repairs of a wrong plan that were run, and what came of it.

A diagnosis knows the word that is missing for most faults. For a fused dim that is cut in the wrong pieces, heads
that do not belong together, or sizes of the whole in a module's code it does not: the layouts that the plan's own
units allow are tried one after another. Nothing is advised as right that was not run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from dtplan._errors import BindError
from dtplan.plan.read import config_field
from dtplan.plan.spec import P
from dtplan.planner.bound import BoundModule, BoundPlan
from dtplan.planner.stored import Stored
from dtplan.prove import edits
from dtplan.prove.diagnose import UNEXPLAINED, Cause, diagnose
from dtplan.prove.edits import Edit
from dtplan.prove.oracle import BOUND
from dtplan.prove.ranks import Job, bound_plan, errors_on_rank
from dtplan.prove.result import Finding
from dtplan.prove.simulated import simulated_ranks
from dtplan.prove.walk import Walk

Edits = tuple[Edit, ...]
TRIES = 12
"""Runs of a leg, a few tenths of a second each."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A run with some edits: how far it got, and what is wrong then."""

    edits: Edits
    reach: float
    then: Finding | None
    """None where the leg is proved."""


class Repairs:
    """The findings of refuted legs, with repairs. What helped in one leg is tried first in those after it, and is all
    that is tried where a leg fails as an earlier one did.
    """

    def __init__(self, truth: Walk) -> None:
        self._truth = truth
        self._known: dict[tuple[str, str], Edits] = {}
        self.proved: list[Edits] = []
        """Each with which a leg was proved."""

    def findings(self, job: Job, bound: BoundPlan, error: Exception | None = None) -> tuple[Finding, ...]:
        """Why the leg failed, and what a run with the advice gave."""
        causes = diagnose(job, bound, self._truth, error)
        if not causes:
            return (UNEXPLAINED,)
        told = [cause.finding for cause in causes]
        if job.leg.ranks > job.leg.tp or job.leg.world != "simulated ranks":
            return tuple(told)  # the legs without FSDP2 say more; and no run elsewhere stands for one on processes
        bench = _Bench(job, bound, self._truth)
        first = causes[0]
        key = first.finding.kind, first.finding.rule or edits.pattern_of(first.finding.name)
        if key in self._known:
            tries = [self._known[key]]
        else:
            tries = [*self._known.values(), *_said(causes), *bench.layouts(first)]
        best = bench.best(first, (wanted for wanted in dict.fromkeys(tries) if wanted))
        self._known.setdefault(key, best.edits if best else ())
        if best is not None:
            self.proved += [best.edits] * (best.then is None)
            return tuple(bench.told(causes, best))
        if bench.ran:
            what = "this or another layout" if first.edits in bench.ran else "another layout"
            told[0] = dataclasses.replace(told[0], tried=f"still wrong with {what} ({len(bench.ran)} runs)")
        return tuple(told)


def _said(causes: Sequence[Cause]) -> Iterator[Edits]:
    """What the diagnosis says to write: for the first cause, then for all of them."""
    yield causes[0].edits
    if len(causes) > 1:
        yield tuple(edit for cause in causes for edit in cause.edits)


class _Bench:
    """One refuted leg, and runs of it with other plans."""

    def __init__(self, job: Job, bound: BoundPlan, truth: Walk) -> None:
        self.job, self.truth = job, truth
        self.ran: list[Edits] = []
        self.modules: dict[str, BoundModule] = {name: m for m in bound.modules for name in m.names}
        self.units = [unit for unit in _units(job) if unit.count % bound.tp == 0]

    # --- runs

    def best(self, cause: Cause, tries: Iterable[Edits]) -> _Attempt | None:
        """The first of ``tries`` with which the leg is proved, else the one that leads furthest beyond ``cause``."""
        found, reach = None, cause.reach
        for wanted in tries:
            if len(self.ran) == TRIES:
                break
            attempt = self._run(wanted)
            if attempt is not None and attempt.then is None:
                return self._least(attempt)
            if attempt is not None and attempt.reach > reach:
                found, reach = attempt, attempt.reach
        return found

    def _run(self, wanted: Edits) -> _Attempt | None:
        trial = dataclasses.replace(self.job, plan=edits.edited(self.job.plan, self.job.model, wanted))
        try:
            bound = bound_plan(trial)
        except BindError:
            return None
        self.ran.append(wanted)
        causes = diagnose(trial, bound, self.truth)
        if causes:
            return _Attempt(wanted, causes[0].reach, causes[0].finding)
        ranks = simulated_ranks(trial.leg.ranks, errors_on_rank, trial)
        proved = all(error <= BOUND for found in ranks for error in found.values())
        return _Attempt(wanted, math.inf, None if proved else UNEXPLAINED)

    def _least(self, proved: _Attempt) -> _Attempt:
        """Without the localized numbers that are not needed."""
        for edit in proved.edits:
            alone = edits.edited(self.job.plan, self.job.model, (edit,))
            rule = edits.rule_of(alone, self.job.model, edit.name)
            numbers = list(rule.localize) if rule and edit.text.startswith("localize") else []
            for number in tuple(numbers):
                rest = [kept for kept in numbers if kept != number]
                fewer = (edits.localize(edit.name, rest),) if rest else ()
                others = tuple(e for e in proved.edits if e.name != edit.name or not e.text.startswith("localize"))
                again = self._run((*others, *fewer))
                if again is not None and again.then is None:
                    proved, numbers = again, rest
        return proved

    # --- what to try

    def layouts(self, cause: Cause) -> Iterator[Edits]:
        """Other cuts of what was computed before a wrong output, and other numbers for the code that reads it."""
        if cause.finding.name not in self.truth.finished:
            return
        call = cause.finding.name.split("#")[0]
        suspects = self._suspects(cause.finding.name)
        if self._is_whole_on_parts(call):
            yield (edits.whole_inside(call),)
        cuts = [edit for name in suspects for edit in self._cuts(name)]
        joined = self._joined(suspects)
        sums = [name for name in suspects if any(move.dst == P for move in self.modules[name].outputs)]
        yield from ((edits.output_residual(name),) for name in sums)
        yield tuple(edits.output_residual(name) for name in sums)
        several: list[Edits] = [*joined, *((cut,) for cut in cuts)]
        yield from joined
        if cause.finding.what == "crash":
            numbers = tuple(self._numbers(call, suspects))
            for wanted in ((), *several) if numbers else ():
                yield (*wanted, *numbers)
        yield from several[len(joined) :]
        owners = dict.fromkeys(name.rpartition(".")[0] for name in suspects)
        yield from ((edit,) for owner in owners for edit in self._cut_inputs(owner))
        for owner in owners:
            if owner in self.modules and self.modules[owner].localize:
                for wanted in ((), *several):
                    yield (*wanted, edits.localize(owner, ()))

    def _is_whole_on_parts(self, call: str) -> bool:
        """Whether all of a module is whole, and it is given a part of the sequence as it lies."""
        inside = [m for name, m in self.modules.items() if name == call or name.startswith(f"{call}.")]
        rule = edits.rule_of(self.job.plan, self.job.model, call)
        whole = all(tensor.placement.dim is None for module in inside for tensor in module.tensors)
        return self.job.leg.sequence_parallel and whole and bool(inside) and (rule is None or not rule.inputs)

    def _joined(self, suspects: Sequence[str]) -> list[Edits]:
        """Linears that are whole beside cut ones, cut as well: in units as wide as those of the others, or in any."""
        wholes = [name for name in suspects if _is_whole_linear(self.modules[name])]
        if not wholes:
            return []
        counts = {unit.name: unit.count for unit in self.units}
        cut = [t for name in suspects for t in self.modules[name].tensors if t.unit in counts and t.placement.dim == 0]
        widths = {t.shape[0] // counts[t.unit or ""] for t in cut}
        rows = self.modules[wholes[0]].tensors[0].shape[0]
        units = sorted(self.units, key=lambda unit: rows % unit.count != 0 or rows // unit.count not in widths)
        return [tuple(edits.colwise(name, unit.name) for name in wholes) for unit in units]

    def _suspects(self, call: str) -> list[str]:
        """Modules with parameters that worked on what ``call`` read, last first, back to where ranks' work joined."""
        name, calls = call.split("#", maxsplit=1)[0], self.truth.finished
        found: list[str] = []
        for earlier in reversed(calls[: calls.index(call) + 1]):
            other = earlier.split("#")[0]
            module = self.modules.get(other)
            if module is None:
                continue
            joins = any(move.op in ("reduce", "scatter") for move in module.outputs)
            if joins and other != name and not other.startswith(name + "."):
                break
            if any(not tensor.buffer for tensor in module.tensors):
                found.append(other)
        return list(dict.fromkeys(found))

    def _cuts(self, name: str) -> Iterator[Edit]:
        """Every other way in which the plan's units make up the dims that are cut in ``name``."""
        for tensor in self.modules[name].tensors:
            if tensor.placement.dim is None or tensor.buffer or self.modules[name].style in ("rowwise", "vocab"):
                continue  # what they read is cut as others hand it out
            ruled = f"{name}.{tensor.name}"
            if edits.rule_of(self.job.plan, self.job.model, ruled) is None:
                ruled = name
                if tensor.name == "bias":
                    continue  # it goes with its weight
            size, seen = tensor.shape[tensor.placement.dim], {tensor.sections}
            for parts in self._parts(ruled):
                counts = [unit.count for unit in parts]
                rows = tuple(size // sum(counts) * count for count in counts) if len(parts) > 1 else ()
                if size % sum(counts) or rows in seen:
                    continue
                seen.add(rows)
                units = [unit.name for unit in parts]
                edit = edits.sections(ruled, units) if rows else edits.one_piece(ruled, units[0])
                now = _first_rank(tensor.sections or (size,), self.job.leg.tp)
                then = _first_rank(rows or (size,), self.job.leg.tp)
                yield dataclasses.replace(edit, note=f"; of {size} rows rank 0 then holds {then}, not {now}")

    def _cut_inputs(self, name: str) -> Iterator[Edit]:
        """Inputs that are cut as they lie, in groups of units instead."""
        rule = edits.rule_of(self.job.plan, self.job.model, name)
        for value, move in rule.inputs if rule else ():
            if move.dst is not None and move.dst.word == "S":
                yield from (edits.input_unit(name, value, unit.name) for unit in self.units if unit.name != move.unit)

    def _parts(self, ruled: str) -> Iterator[tuple[_Unit, ...]]:
        """Units of parts one after another, those that the rule names first."""
        rule = edits.rule_of(self.job.plan, self.job.model, ruled)
        named = {rule.unit, *(section.unit for section in rule.sections)} if rule else set()
        own = [unit for unit in self.units if unit.name in named]
        for u in (*own, *(unit for unit in self.units if unit not in own)):
            yield u, u
            yield from ((u, v, v) for v in self.units if v is not u and u.count % v.count == 0)
            yield u, u, u
        yield from ((unit,) for unit in sorted(own, key=lambda unit: unit.count))  # the fewest are never cut through

    def _numbers(self, call: str, suspects: Sequence[str]) -> Iterator[Edit]:
        """Every whole number of the crashed module, and of cut ones in it, that may be a size of the whole."""
        counts = {unit.count for unit in self.units}
        sizes: dict[str, set[int]] = {
            name: {t.shape[t.placement.dim] for t in self.modules[name].tensors if t.placement.dim is not None}
            for name in suspects
            if self.modules[name].style == "colwise"
        }
        sections = {size for name in sizes for tensor in self.modules[name].tensors for size in tensor.sections}
        looked_at = {call: counts.union(sections, *sizes.values())}
        looked_at |= {name: own for name, own in sizes.items() if self.modules[name].kind == "Conv1D"}
        for name, wanted in looked_at.items():
            numbers = list(self._sizes_in(self.job.model.get_submodule(name), wanted))
            if numbers:
                yield edits.localize(name, numbers)

    def _sizes_in(self, module: nn.Module, sizes: set[int]) -> Iterator[str]:
        for attribute, value in vars(module).items():
            if type(value) is int and value in sizes and value % self.job.leg.tp == 0:
                yield attribute
        config = getattr(module, "config", None)
        for unit in self.units:
            field = unit.field.rpartition(".")[2]
            if getattr(config, field, None) == unit.count:
                yield f"config.{field}"

    # --- words

    def told(self, causes: Sequence[Cause], best: _Attempt) -> Iterator[Finding]:
        """The findings, with what was written and what a run with it gave."""
        mended = [cause for cause in causes if cause.edits and set(cause.edits) <= set(best.edits)]
        if {edit for cause in mended for edit in cause.edits} == set(best.edits):
            for cause in causes:
                yield dataclasses.replace(cause.finding, tried=_outcome(best, len(mended) if cause in mended else 0))
            return
        advice = "; ".join(self._spell(edit) for edit in best.edits)
        yield dataclasses.replace(causes[0].finding, advice=advice, tried=_outcome(best, 1))
        yield from (cause.finding for cause in causes[1:])

    def _spell(self, edit: Edit) -> str:
        rule = edits.rule_of(self.job.plan, self.job.model, edit.name)
        place = f" ({rule.at})" if rule else ""
        return f"`{edits.pattern_of(edit.name)}`{place}: write {edit}{edit.note}"


def _outcome(attempt: _Attempt, causes: int) -> str:
    """What the run gave; ``causes`` is how many findings were mended together."""
    if not causes:
        return ""
    wanted = "this" if causes == 1 else f"all {causes} of these"
    if attempt.then is None:
        return f"with {wanted}, the leg is proved"
    right = "this output is right" if attempt.then.what in ("output", "crash") else "all outputs are right"
    return f"with {wanted}, {right}; what is wrong then is {attempt.then.name} ({attempt.then.kind})"


@dataclass(frozen=True, slots=True)
class _Unit:
    name: str
    field: str
    count: int


def _units(job: Job) -> Iterator[_Unit]:
    """The plan's units, also those that no rule uses, with their counts in the model's config."""
    for unit in job.plan.units.values():
        counts = ((field, config_field(job.model.config, field)) for field in unit.fields)
        field, count = next(((f, c) for f, c in counts if isinstance(c, int) and c > 0), ("", 0))
        if count and unit.indivisible != "uneven":
            yield _Unit(unit.name, field, count)


def _is_whole_linear(module: BoundModule) -> bool:
    return module.kind in ("Linear", "Conv1D") and module.style == "replicate"


def _first_rank(sizes: Sequence[int], tp: int) -> str:
    """The rows of a fused dim that rank 0 keeps."""
    stored = Stored.of("", sizes, 0, tp)
    runs = list(stored.runs(0, sum(sizes) // tp))
    return " and ".join(f"{run.start}-{run.start + run.size - 1}" for run in runs)
