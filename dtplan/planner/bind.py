"""Bind a plan to a model and degrees: exact names, placements, moves, and every refusal in one run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dtplan._errors import BindError, Diagnostic, did_you_mean
from dtplan.plan import paths
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import holds, load_plan, rules_for
from dtplan.plan.source import finding_at
from dtplan.plan.spec import RESIDUAL, Move, P, Plan, R, Rule, S, TeLayer
from dtplan.planner.bound import BoundModule, BoundMove, BoundPlan, BoundTe, BoundTensor, BoundUnit
from dtplan.planner.inside import local_sizes, modules_read, norm_over_a_cut, size_of, sizes_per_unit
from dtplan.planner.match import Alike, alike_modules, rename_text, renamed
from dtplan.planner.moves import Layouts, NoMove, input_move, layouts_for, output_move
from dtplan.planner.placing import (
    Cut,
    PlacingError,
    chosen,
    cuts_of,
    default_output,
    kind_for,
    module_kind,
    named_tensors,
    place,
)
from dtplan.planner.refusals import dead_rules, full_name, mixed_regions, nearest, split_ties, uncut_stream, unruled
from dtplan.planner.regions import Regions, parent_of
from dtplan.planner.units import bound_units

GRAD_OF_WHOLE = "write `grad: sum` if it sees the rank's own heads or columns, else `grad: complete`"
NO_PLAN = Plan(name="none", units={}, rules=(), files=("<no plan>",))


def find_plan(model: nn.Module, plan: str | Path | Plan = "auto", *, tp: int = 0) -> Plan:
    """The plan for ``model``: the given one, or with ``"auto"`` the built-in one that serves exactly its class.

    At ``tp`` 1 a class that no plan serves needs none: nothing is cut on tp, and FSDP2's units are the classes
    that the model itself declares as not to be split.

    Raises:
        BindError: no plan serves the class; the text gives the ways to supply one.
        PlanError: the plan file is wrong.
    """
    name = type(model).__name__
    if plan != "auto":
        given = load_plan(plan)
        classes = [cls.__name__ for cls in type(model).__mro__]
        if given.serves and not set(given.serves) & set(classes):
            message = f"plan `{given.name}` serves {', '.join(given.serves)}; the model is a {name}"
            hint = f"a plan of your own may start with `extends: {given.name}` and `serves: [{name}]`"
            raise BindError([Diagnostic(code="DTP407", file=given.files[0], message=message, hint=hint)])
        return given
    plans = [load_plan(builtin) for builtin in builtin_plans()]
    for candidate in plans:
        if name in candidate.serves:
            return candidate
    if tp == 1:
        return NO_PLAN
    served = ", ".join(sorted(cls for candidate in plans for cls in candidate.serves))
    hint = (
        "give plan=<built-in name> if the modules are the same, plan=<path of a YAML plan>, or a Plan from "
        "dtplan.load_plan; nothing is guessed"
    )
    message = f"no built-in plan serves {name}; built-in plans serve {served}"
    raise BindError([Diagnostic(code="DTP407", file=name, message=message, hint=hint)])


def bind(
    model: nn.Module,
    plan: str | Path | Plan = "auto",
    *,
    tp: int = 1,
    shard: int = 1,
    replicate: int = 1,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> BoundPlan:
    """What ``plan`` means for ``model`` (live or on the meta device) at the given degrees (ranks).

    Nothing is allocated or changed, and no process group is needed.

    Raises:
        BindError: with every refusal; the text gives the rule's ``file:line:column`` and the next step.
        PlanError: the plan file is wrong.
    """
    found = find_plan(model, plan, tp=tp)
    layouts = layouts_for(found.sequence_parallel, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    binder = _Binder(model, found, layouts, tp)
    binder.findings += uncut_stream(found, sequence_parallel=sequence_parallel)
    modules = binder.modules()
    units, fsdp_units = tuple(binder.units.values()), binder.fsdp_units()
    if binder.findings:
        raise BindError(sorted(set(binder.findings), key=lambda f: (f.file, f.line, f.column, f.code, f.message)))
    return BoundPlan(
        plan=found.name,
        digest=found.digest,
        architecture=type(model).__name__,
        degrees={"replicate": replicate, "shard": shard, "tp": tp},
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
        residual=layouts.residual,
        width=_width(modules),
        units=units,
        modules=modules,
        ties=binder.ties,
        aliases=binder.aliases(),
        fsdp_units=fsdp_units,
        fsdp={
            "reshard_after_forward": found.fsdp.reshard_after_forward,
            "param_dtype": found.fsdp.param_dtype,
            "reduce_dtype": found.fsdp.reduce_dtype,
        },
        te=binder.te_layers(),
    )


def _width(modules: Iterable[BoundModule]) -> int:
    """Features of the residual stream: what the first vocabulary-cut or whole embedding gives."""
    for module in modules:
        if module.kind == "Embedding" and module.tensors:
            return module.tensors[0].shape[1]
    return 0


class _Binder:
    """One binding: the groups of alike modules, and the findings so far."""

    def __init__(self, model: nn.Module, plan: Plan, layouts: Layouts, tp: int) -> None:
        self.model, self.plan, self.layouts, self.tp = model, plan, layouts, tp
        self.config: Any = getattr(model, "config", None)
        self.rules, self.renamed = renamed(rules_for(plan, self.config), model, plan.names)
        self.groups = alike_modules(model, self.rules)
        self.units, self.findings = bound_units(plan, self.rules, self.config, tp)
        self.ties = _ties_of(model)
        self._tied_to = {name: tie[0] for tie in self.ties for name in tie[1:]}
        self._rule_of = {group.pattern: self._chosen(group) for group in self.groups}
        self._regions = Regions(self._rule_of, self.units, tp)

    def modules(self) -> tuple[BoundModule, ...]:
        """Every module that a rule falls on or that owns state, bound."""
        self.findings += dead_rules(self.model, self.groups, self.rules)
        self.findings += mixed_regions(self._regions)
        bound = [entry for group in self.groups if (entry := self._module(group)) is not None]
        if self.plan is not NO_PLAN:
            self.findings += unruled(self.groups, self._rule_of, self.plan.files[0])
        self.findings += split_ties(self.ties, bound, self.plan.files[0])
        if self.tp > 1 and not self.findings and not any(t.placement != R for m in bound for t in m.tensors):
            message = (
                f"nothing is sharded although tensor_parallel_degree is {self.tp}: every rank would hold everything"
            )
            self._add("DTP410", None, message, "give the linear layers `colwise` and `rowwise` rules")
        return tuple(bound)

    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Module name in this model -> its other names, for checkpoints."""
        pairs = {self.renamed.get(name, name): (name, *others) for name, others in self.plan.names.items()}
        return {have: tuple(n for n in names if n not in (have, ".")) for have, names in pairs.items()}

    def te_layers(self) -> tuple[BoundTe, ...]:
        """The plan's fused layers that hold for this config, with the modules below which they lie."""
        active = [variant for variant in self.plan.variants if holds(variant.when, self.config)]
        layers = self.plan.te + tuple(layer for variant in active for layer in variant.te)
        return tuple(self._te_layer(layer) for layer in layers)

    def _te_layer(self, layer: TeLayer) -> BoundTe:
        under = rename_text(".".join(layer.under), self.renamed)
        pattern = tuple(under.split("."))
        names = [name for name, _ in self.model.named_modules() if paths.matches(pattern, tuple(name.split(".")))]
        return BoundTe(
            layer=layer.layer,
            under=under,
            names=tuple(names),
            parts=layer.parts,
            activation=layer.activation,
            approximate_gelu=layer.approximate_gelu,
            rule=str(layer.at),
        )

    def fsdp_units(self) -> tuple[str, ...]:
        """Exact names of the modules that FSDP2 wraps one by one, in the model's order."""
        names = [name for name, _ in self.model.named_modules() if name]
        found: list[str] = []
        if self.plan is NO_PLAN:
            whole = getattr(self.model, "_no_split_modules", None) or ()
            return tuple(name for name, module in self.model.named_modules() if type(module).__name__ in whole)
        for pattern in self.plan.fsdp.units:
            pattern_ = tuple(rename_text(".".join(pattern), self.renamed).split("."))
            hits = [name for name in names if paths.matches(pattern_, tuple(name.split(".")))]
            if not hits and self.plan.fsdp.at:
                message = f"the FSDP unit `{'.'.join(pattern_)}` names nothing in the model"
                self.findings.append(finding_at("DTP413", self.plan.fsdp.at, message, nearest(pattern_, names)))
            found += hits
        return tuple(name for name in names if name in set(found))

    # --- one module ---

    def _module(self, group: Alike) -> BoundModule | None:
        rule = self._rule_of[group.pattern]
        tensor_rules = [r for rules in group.tensor_rules.values() for r in rules]
        tensors = named_tensors(group.module)
        if rule is None and not tensor_rules:
            return None
        if rule is not None and rule.below and not (tensors or rule.inputs or rule.outputs):
            return None  # one of many modules below, with nothing to keep whole
        at = rule or tensor_rules[0]
        try:
            return BoundModule(
                pattern=group.pattern,
                names=group.names,
                kind=kind_for(group.module, rule),
                style=None if rule is None else rule.style,
                rule=str(at.at),
                tensors=self._tensors(group, rule, tensors),
                inputs=self._inputs(group, rule),
                outputs=self._outputs(group, rule),
                block=self._regions.block_of(group.pattern, rule),
                shared=self._shared(group, rule),
                **self._inside(group, rule),
            )
        except PlacingError as error:
            self._add(error.code, at, f"{group.pattern}: {error}", error.hint)
        except NoMove as error:
            self._add(
                "DTP414",
                at,
                f"{group.pattern}: {error}",
                "say where the value comes from: {from: S(1), to: R}",
            )
        return None

    def _tensors(self, group: Alike, rule: Rule | None, tensors: list[tuple[str, Any]]) -> tuple[BoundTensor, ...]:
        cuts = cuts_of(group, rule, self._regions.is_whole)
        bound = []
        for name, tensor in tensors:
            cut = cuts[name]
            if rule is None and cut.rule is None:
                continue
            entry = place(
                name,
                tensor,
                cut,
                units=self.units,
                config=self.config,
                tp=self.tp,
                grad_sum=self._grad_is_summed(group, cut.rule or rule),
                buffer=name in group.module._buffers,
            )
            bound.append(_with_tie(entry, self._tied_to.get(full_name(group.names[0], name))))
        for cut in cuts.values():
            sections = cut.rule.sections if cut.rule is not None and cut.dim is not None else ()
            if any(section.whole and section.grad is None for section in sections):
                message = f"{group.pattern}: a section stays whole among cut ones: is its gradient a partial sum?"
                self._add("DTP415", cut.rule, message, GRAD_OF_WHOLE)
        if rule is not None and any(t.trainable and not t.buffer and t.placement == R and not t.once for t in bound):
            self._require_grad_rule(group, rule, cuts)
        return tuple(bound)

    def _grad_is_summed(self, group: Alike, rule: Rule | None) -> bool:
        if rule is None or self._regions.lies_in_whole(group.pattern):
            return False
        if rule.grad is not None:
            return rule.grad == "sum"
        return (
            rule.style == "norm" and self.layouts.residual != R and self._regions.block_of(group.pattern, rule) is None
        )

    def _require_grad_rule(self, group: Alike, rule: Rule, cuts: Mapping[str, Cut]) -> None:
        """A whole parameter among cut ones sees a part of the work, so its gradient is a partial sum: say so."""
        if all(cut.rule is not None and cut.rule.grad is not None for cut in cuts.values()) or rule.grad is not None:
            return
        if self._regions.is_whole(rule) or self._regions.lies_in_whole(group.pattern):
            return
        region = self._regions.around(group.pattern)
        on_stream = rule.style == "norm" and self._regions.reads_stream(group.pattern)
        if region is not None or (self._regions.has_cut_siblings(group.pattern) and not on_stream):
            where = (
                f"inside `{region}`, whose input's gradient is summed" if region is not None else "beside cut layers"
            )
            message = f"{group.pattern} is whole and lies {where}: is its gradient a partial sum?"
            self._add("DTP415", rule, message, GRAD_OF_WHOLE)

    def _inputs(self, group: Alike, rule: Rule | None) -> tuple[BoundMove, ...]:
        if rule is None:
            return ()
        moves: list[tuple[str | int, Move]] = list(rule.inputs)
        if rule.parallel_residual:
            moves = [(rule.parallel_residual, Move(dst=P))]
        region = self._regions.around(group.pattern)
        if not moves and rule.style == "colwise" and region is None and module_kind(group.module) != "Embedding":
            moves = [(0, Move(dst=R))]
        if not moves and rule.style == "norm" and self._regions.block_of(group.pattern, rule) is None:
            moves = [(0, Move(dst=RESIDUAL))]
        whole = rule.style == "replicate" or self._regions.is_whole(rule) or self._regions.stays_whole(group.pattern)
        bound = []
        for value, move in moves:
            position, name = self._argument(group, rule, value)
            if move.src == R and self._regions.stays_whole(group.pattern):
                move = dataclasses.replace(move, dst=R)  # noqa: PLW2901 - nothing in it is cut
            entry = input_move(move, self.layouts, value=position, name=name, whole=whole)
            bound.append(dataclasses.replace(entry, units=self._count_of(move.unit)))
        return tuple(bound)

    def _count_of(self, unit: str | None) -> int | None:
        return self.units[unit].count if unit in self.units else None

    def _outputs(self, group: Alike, rule: Rule | None) -> tuple[BoundMove, ...]:
        if rule is None:
            return ()
        gives = default_output(rule.style, whole=self._regions.is_whole(rule))
        moves = list(rule.outputs)
        if not moves and (rule.style in ("rowwise", "vocab") or rule.parallel_residual):
            moves = [(None, Move(dst=RESIDUAL))]
        weight = group.module._parameters.get("weight")
        length = weight.shape[0] if rule.style == "colwise" and weight is not None else None
        bound = []
        for value, move in moves:
            entry = output_move(move, self.layouts, value=value, gives=gives)
            if entry.src == S(-1):
                entry = dataclasses.replace(entry, length=length)
            if move.sum_grad_of_last is not None and not self._regions.stays_whole(parent_of(group.pattern)):
                entry = dataclasses.replace(entry, op="copy", last=size_of(self.config, move.sum_grad_of_last))
            bound.append(entry)
        return tuple(bound)

    def _argument(self, group: Alike, rule: Rule, value: str | int | None) -> tuple[int | None, str | None]:
        """Position and name of a forward argument, whichever of them the rule gives."""
        names = _forward_arguments(group.module)
        if isinstance(value, str):
            if value not in names:
                hint = did_you_mean(value, names) or f"its arguments: {', '.join(names)}"
                raise PlacingError("DTP412", f"forward has no argument `{value}`", hint)
            return names.index(value), value
        if value is None or value >= len(names):
            raise PlacingError("DTP412", f"forward has {len(names)} arguments, none at position {value}")
        return value, names[value]

    def _shared(self, group: Alike, rule: Rule | None) -> BoundMove | None:
        if rule is None or rule.parallel_residual is None:
            return None
        position, name = self._argument(group, rule, rule.parallel_residual)
        return input_move(Move(dst=R), self.layouts, value=position, name=name, whole=False)

    def _inside(self, group: Alike, rule: Rule | None) -> dict[str, Any]:
        """What the rule says of the module's own forward: sizes, parameters that it reads, what it computes."""
        whole = self._regions.stays_whole(group.pattern) or self._regions.is_whole(rule)
        if rule is None or whole:
            return {}
        return {
            "localize": local_sizes(group.module, rule.localize, self.tp),
            "per_unit": sizes_per_unit(group.module, rule.localize_per, self.units, self.tp),
            "reads": modules_read(group.module, rule.reads),
            "norm": norm_over_a_cut(group.module, self.units.get(rule.unit or ""), self.tp)
            if rule.style == "sharded_norm"
            else None,
        }

    def _chosen(self, group: Alike) -> Rule | None:
        try:
            found = chosen(group.rules)
            if found is None or not found.below or paths.matches(found.path, tuple(group.names[0].split("."))):
                return found
            return dataclasses.replace(found, inputs=(), outputs=(), localize=(), localize_per=(), reads=())
        except PlacingError as error:
            self._add(error.code, group.rules[-1], f"{group.pattern}: {error}", error.hint)
            return group.rules[0]

    def _unit(self, rule: Rule | None) -> BoundUnit | None:
        return None if rule is None or rule.unit is None else self.units.get(rule.unit)

    def _add(self, code: str, rule: Rule | None, message: str, hint: str = "") -> None:
        if rule is None:
            self.findings.append(Diagnostic(code=code, file=self.plan.files[0], message=message, hint=hint))
        else:
            self.findings.append(finding_at(code, rule.at, message, hint))


def _with_tie(entry: BoundTensor, tied_to: str | None) -> BoundTensor:
    return entry if tied_to is None else dataclasses.replace(entry, tied_to=tied_to)


def _ties_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of parameters that are one object, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(tied) for tied in names.values() if len(tied) > 1)


def _forward_arguments(module: nn.Module) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in positional]
