"""Why a leg failed: the module whose output is wrong first, or the parameters whose gradients are wrong last.

Forward first: a wrong output makes everything after it wrong. With outputs right, gradients are read from the last
layer down, since a gradient that was never summed makes everything upstream of it wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtplan.plan.spec import Layout
from dtplan.planner.bound import BoundModule, BoundPlan, BoundTensor
from dtplan.planner.loss import causal_lm_loss
from dtplan.planner.stored import Stored
from dtplan.prove.edits import (
    Edit,
    added_once,
    gradient,
    input_whole,
    output_residual,
    rule_of,
    section_gradient,
    sharded_norm,
)
from dtplan.prove.held import DISAGREE, MISSING, NO_FIT, PARTIAL, RIGHT, SHAPE, TIMES, Held, held
from dtplan.prove.oracle import BOUND, float64_casts, logits_of, wholes
from dtplan.prove.ranks import Job, part_of, sharded_model
from dtplan.prove.result import Finding
from dtplan.prove.simulated import simulated_ranks
from dtplan.prove.walk import Walk

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Cause:
    """A finding, the edits of the plan that would mend it as far as they are known, and how far the model got."""

    finding: Finding
    edits: tuple[Edit, ...] = ()
    reach: float = math.inf
    """Calls of modules that finish before one whose output is not sure to be right; infinite where all are right."""


@dataclass(slots=True)
class Evidence:
    """What one rank saw: its walk, its own gradients, and the error that ended it."""

    walk: Walk = field(default_factory=Walk)
    grads: dict[str, Tensor] = field(default_factory=dict)
    logits: torch.Size | None = None
    error: Exception | None = None


def diagnose(job: Job, bound: BoundPlan, truth: Walk, error: Exception | None = None) -> tuple[Cause, ...]:
    """Run the leg again on simulated ranks, watched, and say what went wrong first; empty if nothing did."""
    ranks: list[Evidence] = [Evidence() for _ in range(job.leg.ranks)]
    try:
        simulated_ranks(job.leg.ranks, _watch, job, ranks)
    except Exception as caught:  # noqa: BLE001 - the error of the plan, again
        return (_crash(ranks, caught, bound, truth),)
    if error is not None:
        says = f"{type(error).__name__} on {job.leg.world}, and none on simulated ranks: {error}"
        return (Cause(Finding(name="the model", what="crash", kind="crash", says=says)),)
    case = _Case(job, bound, truth, ranks[: job.leg.tp])
    return case.outputs() or case.gradients()


UNEXPLAINED = Finding(
    name="the model",
    what="parameter",
    kind="unexplained",
    says=f"outputs and gradients of one step are right on simulated ranks within {BOUND:g}; what is wrong shows in "
    "later steps or in this world only",
)
"""Nothing that a watched step shows is wrong."""


def _watch(rank: int, job: Job, ranks: list[Evidence]) -> None:
    seen = ranks[rank]
    try:
        sharded = sharded_model(job)
        batch, _ = part_of(job, rank)
        with float64_casts(), seen.walk.of(sharded):
            logits = logits_of(sharded, batch)
        seen.logits = logits.shape
        with float64_casts():
            causal_lm_loss(logits, batch["labels"]).backward()
    except Exception as error:
        seen.error = error
        raise
    alone = job.leg.ranks == job.leg.tp
    grads = {name: parameter.grad for name, parameter in sharded.named_parameters() if parameter.grad is not None}
    seen.grads = {name: local_grad(grad) for name, grad in grads.items()} if alone else wholes(sharded, grads)


def local_grad(grad: Tensor) -> Tensor:
    """What the rank holds."""
    return grad.to_local() if isinstance(grad, DTensor) else grad


class _Case:
    """One failed leg with the evidence of the ranks of one tp group."""

    def __init__(self, job: Job, bound: BoundPlan, truth: Walk, ranks: Sequence[Evidence]) -> None:
        self.job, self.bound, self.truth, self.ranks = job, bound, truth, ranks
        self.modules: dict[str, BoundModule] = {name: m for m in bound.modules for name in m.names}
        self.tensors: dict[str, tuple[BoundModule, BoundTensor]] = {n: (m, t) for m, n, t in bound.tensors()}
        self.units = {unit.name: unit.count for unit in bound.units}

    # --- forward

    def outputs(self) -> tuple[Cause, ...]:
        """The first module, in the order in which they finish, whose output is wrong."""
        if self.job.leg.ranks > self.job.leg.tp:
            return ()  # data-parallel ranks read other rows
        unclear: list[tuple[str, Held]] = []
        sums = ""
        for call in self.truth.finished:
            if call not in self.truth.outputs:
                continue
            name = call.split("#")[0]
            layout, certain = self._layout(name)
            parts = [rank.walk.outputs.get(call) for rank in self.ranks]
            found = held(parts, self._true_output(call, name), layout, self._blocks(name))
            if layout is not None and layout.word == "P":
                sums = name
            if found.kind == RIGHT or (found.kind == PARTIAL and self._leaves_sums(name)):
                unclear = []
            elif certain:
                first = unclear[0][0] if unclear else call
                finding, edits = self._wrong_output(call, found, unclear, sums)
                return (Cause(finding, edits, self.truth.finished.index(first)),)
            else:
                unclear.append((call, found))
        return ()

    def _wrong_output(
        self, call: str, found: Held, unclear: Sequence[tuple[str, Held]], sums: str
    ) -> tuple[Finding, tuple[Edit, ...]]:
        name = call.split("#", maxsplit=1)[0]
        says = f"its output is the first that is wrong: {found.says}"
        advice = "look at how its inputs are cut: order of fused parts, heads, or a missing gather"
        edits: tuple[Edit, ...] = ()
        whole_ones = self._added_by_all(name)
        if unclear:
            says += f"; `{unclear[0][0]}` before it does not fit either ({unclear[0][1].says})"
            advice = advice.replace("its", "that module's")
        if found.kind == PARTIAL and self._joins(name):
            advice = "its terms are summed, and are too small: something in them depends on how much of it a rank has"
        elif found.kind == PARTIAL:
            advice, edits = "reduce it: `output: residual` (or R)", (output_residual(name),)
        elif whole_ones:
            told = ", ".join(f"`{tensor}`" for tensor in whole_ones)
            advice = f"every rank adds {told} before the sum over ranks: write `once: true` there"
            edits = tuple(added_once(f"{name}.{tensor}") for tensor in whole_ones)
        elif found.kind == TIMES:
            advice = "each rank adds the same term before a sum over ranks: a bias there wants `once: true`"
        elif self._is_norm_of_a_part(name):
            advice = "it takes a mean over a part of the dim that is cut: write `style: sharded_norm` on the module"
            edits = (sharded_norm(name),)
        elif sums:
            advice = (
                f"`{sums}` ({self._rule(sums)}) leaves its output as a sum over ranks that is not done (P), and code "
                "after it reads it as if it were whole: write `output: residual`"
            )
            edits = (output_residual(sums),)
        finding = Finding(name=call, what="output", kind=found.kind, says=says, rule=self._rule(name), advice=advice)
        return finding, edits

    def _true_output(self, call: str, name: str) -> Tensor:
        """What the module gave unsharded; with its columns in the order in which sections keep them."""
        truth = self.truth.outputs[call]
        module = self.modules.get(name)
        tensor = next((t for t in module.tensors if t.sections), None) if module else None
        if module is None or tensor is None or module.style != "colwise" or sum(tensor.sections) != truth.shape[-1]:
            return truth
        stored = tensor.stored(name, self.job.leg.tp)
        return dataclasses.replace(stored, dim=truth.dim() - 1).join({name: truth})

    def _layout(self, name: str) -> tuple[Layout | None, bool]:
        """The layout that the plan gives a module's output, if it says, and whether a misfit is sure to be wrong."""
        module = self.modules.get(name)
        moves = [] if module is None else [m for m in module.outputs if m.value in (None, 0)]
        if moves:
            return moves[0].dst, True
        return None, module is not None and any(not tensor.buffer for tensor in module.tensors)

    def _leaves_sums(self, name: str) -> bool:
        """Whether the sum over ranks of what a module hands out is not done yet: one around it does, or one below
        hands it out.
        """
        own = self.modules.get(name)
        around = name.split(".")
        if not (own and own.outputs) and any(self._joins(".".join(around[:i])) for i in range(1, len(around))):
            return True
        below = [m for n, m in self.modules.items() if n.startswith(name + ".")]
        return not (own and own.outputs) and any(move.dst.word == "P" for m in below for move in m.outputs)

    def _added_by_all(self, name: str) -> list[str]:
        """Whole parameters of a module whose output is a sum over ranks."""
        module = self.modules.get(name)
        if module is None or not self._joins(name):
            return []
        return [t.name for t in module.tensors if not t.buffer and t.placement.dim is None and not t.once]

    def _is_norm_of_a_part(self, name: str) -> bool:
        """Whether the module's own rule computes with a vector of weights that is cut."""
        module = self.modules.get(name)
        tensors = [tensor for tensor in module.tensors if not tensor.buffer] if module else []
        cut = [len(t.shape) == 1 and t.placement.dim is not None for t in tensors]
        return module is not None and module.style is None and bool(cut) and all(cut)

    def _joins(self, name: str) -> bool:
        """Whether the module's output is summed over ranks."""
        return name in self.modules and any(move.op in ("reduce", "scatter") for move in self.modules[name].outputs)

    def _blocks(self, name: str) -> int:
        module = self.modules.get(name)
        units = [t.unit for t in module.tensors if t.unit] if module else []
        return self.units.get(units[0], 0) if units else 0

    # --- backward

    def gradients(self) -> tuple[Cause, ...]:
        """Wrong gradients that explain themselves, from the last layer down to the first that does not."""
        roots: list[Cause] = []
        before = ""
        for name in self._backward_order():
            found = self._grad(name)
            if found.kind in (NO_FIT, SHAPE):
                return (self._contaminated(name, before, found), *_once_each(roots))
            if found.kind != RIGHT:
                roots.append(self._wrong_grad(name, found))
            before = name
        return _once_each(roots)

    def _backward_order(self) -> list[str]:
        """Parameters whose gradients are complete first in backward, first."""
        started = {call.split("#")[0]: i for i, call in enumerate(self.truth.started)}
        return sorted(self.job.truth.grads, key=lambda name: -started.get(name.rpartition(".")[0], -1))

    def _grad(self, name: str) -> Held:
        truth = self.job.truth.grads[name]
        parts = [rank.grads.get(name) for rank in self.ranks]
        if name in self.job.zero:
            return Held(RIGHT)  # rounding about zero explains nothing
        _, tensor = self.tensors[name]
        if tensor.sections and self.job.leg.ranks == self.job.leg.tp:
            stored = tensor.stored(name, self.job.leg.tp)
            if tensor.shared and (found := _shared_part(parts, truth, stored)).kind != RIGHT:
                return found
            truth = stored.join({name: truth})
        return held(parts, truth, None, self.units.get(tensor.unit or "", 0))

    def _wrong_grad(self, name: str, found: Held) -> Cause:
        module, tensor = self.tensors[name]
        ruled = name if rule_of(self.job.plan, self.job.model, name) else name.rpartition(".")[0]
        words: dict[str, Literal["sum", "complete"]] = {PARTIAL: "sum", DISAGREE: "sum", TIMES: "complete"}
        wanted = words.get(found.kind)
        edits = (gradient(ruled, wanted),) if wanted else ()
        advice = {
            PARTIAL: "write `grad: sum` in its rule",
            TIMES: "its gradient is summed although every rank has all of it: write `grad: complete`",
            DISAGREE: "ranks work on different parts of what this parameter sees: write `grad: sum`, or cut it",
            MISSING: "no rank's work reaches it: check that its module is called, and with what",
        }.get(found.kind, "")
        if tensor.shared and wanted and found.kind != DISAGREE:
            advice, edits = f"write `grad: {wanted}` in the section that is whole", (section_gradient(ruled, wanted),)
        elif found.kind == TIMES and tensor.grad != "sum":
            edits = ()
            advice = (
                "some reader of its output sums a gradient that is whole on every rank: give that one `input: keep`"
            )
        told = Finding(name=name, what="gradient", kind=found.kind, says=found.says, rule=module.rule, advice=advice)
        return Cause(told, edits)

    def _contaminated(self, name: str, before: str, found: Held) -> Cause:
        """A gradient that no sum makes right: what arrives at its module is wrong already."""
        module, _ = self.tensors[name]
        last = before.rpartition(".")[0]
        readers = self._keeping_readers(name.rpartition(".")[0])
        says = f"{found.says}: the gradient that reaches its module is wrong already, and everything upstream with it"
        if before:
            says += f"; from the last layer down, `{before}` is the last that is right or explains itself"
        advice = "an activation's gradient was never summed there" + (f", at or before `{last}`" if last else "")
        if module.style == "replicate":
            advice = (
                "heads or columns of the rank's own read its output, or a part of it, and nobody sums that gradient: "
                "write `input: sum` at the module that reads it, or `output: {sum_grad_of_last: FIELD}` here for a "
                "part that code reads"
            )
        if readers:
            told = ", ".join(f"`{reader}` ({self._rule(reader)})" for reader in readers)
            advice = (
                f"{told} take{'s' if len(readers) == 1 else ''} a whole input without summing its gradient over ranks: "
                "write `input: R` there, or on the module around"
            )
        finding = Finding(name=name, what="gradient", kind="contaminated", says=says, rule=module.rule, advice=advice)
        return Cause(finding, tuple(input_whole(reader) for reader in readers))

    def _keeping_readers(self, owner: str) -> list[str]:
        """Cut modules after ``owner`` that keep their input as it is, up to the first that joins the ranks' work."""
        calls = [call.split("#")[0] for call in self.truth.started]
        readers = []
        for name in calls[calls.index(owner) + 1 :] if owner in calls else ():
            module = self.modules.get(name)
            if module is None:
                continue
            if self._joins(name):
                break
            cut = any(tensor.placement.dim is not None for tensor in module.tensors)
            if cut and module.inputs and all(move.op == "keep" for move in module.inputs):
                readers.append(name)
        return readers[:_SHOWN]

    def _rule(self, name: str) -> str:
        return self.modules[name].rule if name in self.modules else ""


def _once_each(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """One cause for all parameters of a kind under one rule."""
    alike: dict[tuple[str, str], list[Cause]] = {}
    for cause in causes:
        alike.setdefault((cause.finding.rule, cause.finding.kind), []).append(cause)
    told = []
    for first, *rest in alike.values():
        names = ", ".join(cause.finding.name for cause in rest[: _SHOWN - 1])
        more = f" (and {len(rest)} more under the same rule: {names})" if rest else ""
        finding = dataclasses.replace(first.finding, says=first.finding.says + more)
        told.append(dataclasses.replace(first, finding=finding))
    return tuple(told)


def _shared_part(parts: Sequence[Tensor | None], truth: Tensor, stored: Stored) -> Held:
    """What ranks hold of the first part that they should hold alike, and do not."""
    own = [part for part in parts if part is not None]
    for part, (start, size, copies) in zip(stored.parts, stored.spans(), strict=True):
        for first in range(0, len(own), copies) if copies > 1 else ():
            rows = truth.narrow(stored.dim, part.start + first // copies * size, size)
            alike = [mine.narrow(stored.dim, start, size) for mine in own[first : first + copies]]
            if len(own) == len(parts) and (found := held(alike, rows, None)).kind != RIGHT:
                return found
    return Held(RIGHT)


def _crash(ranks: Sequence[Evidence], caught: Exception, bound: BoundPlan, truth: Walk) -> Cause:
    """The innermost module of the first rank that failed by itself, with the shapes that it saw."""
    seen = next((rank for rank in ranks if rank.error is not None), Evidence(error=caught))
    text = f"{type(caught).__name__}: {(str(caught).strip().splitlines() or [''])[0]}"
    if not seen.walk.inside:
        place = "while sharding the model"
        if seen.logits is not None:
            place = f"after the last module, in the loss or in backward; its logits are {list(seen.logits)}"
        return Cause(Finding(name="the model", what="crash", kind="crash", says=f"{place}: {text}"))
    call = seen.walk.inside[-1]
    name = call.split("#")[0]
    rules: Mapping[str, str] = {n: m.rule for m in bound.modules for n in m.names}
    pairs = zip(seen.walk.inputs.get(call, ()), truth.inputs.get(call, ()), strict=False)
    shapes = [f"an input is {list(own)} of {list(all_)}" for own, all_ in pairs if own != all_][:_SHOWN]
    inner = [c for c in seen.walk.outputs if c.startswith(name + ".") and c in truth.outputs]
    gave = [(c, seen.walk.outputs[c].shape, truth.outputs[c].shape) for c in inner]
    shapes += [f"`{c}` gave {list(own)} of {list(all_)}" for c, own, all_ in gave if own != all_][-_SHOWN:]
    finding = Finding(
        name=call,
        what="crash",
        kind="crash",
        says=f"{text}; shapes on this rank: {'; '.join(shapes) or 'those of the unsharded model'}",
        rule=rules.get(name, ""),
        advice="the module may work with a size of the whole (an attribute: `localize`), or its inputs be cut unlike",
    )
    return Cause(finding, reach=len(seen.walk.finished))
