"""From what a source says of single modules to a plan: units, what is left alone, patterns, and text."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtplan.author.draft import PlanDraft, RuleDraft
from dtplan.author.importers.counted import Counts
from dtplan.author.importers.told import Told
from dtplan.author.writer import plan_text
from dtplan.plan.read import parse_plan
from dtplan.plan.spec import Plan
from dtplan.planner.placing import module_kind, named_tensors

Rule = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A plan of another system in the words of the plan language.

    ``dead``: rules of the source that name nothing in this model. ``alone``: modules with parameters that it does not
    name, which stay whole.
    """

    draft: PlanDraft
    dead: tuple[str, ...]
    alone: tuple[str, ...]

    def text(self) -> str:
        """The plan as YAML, with what the import could not keep in comments."""
        return plan_text(self.draft)

    def plan(self) -> Plan:
        """The plan.

        Raises:
            PlanError: something is undecided.
        """
        return parse_plan(self.text(), self.draft.name)


def assemble(
    model: nn.Module, told: Mapping[str, Told], *, source: str, dead: Sequence[str] = (), sequence: bool = False
) -> Imported:
    """The plan for ``model`` (live or meta) that says what ``told`` says of exact module and parameter names.

    A module with parameters or buffers of which nothing is told stays whole. ``source`` is named on top.
    ``sequence``: it cuts the residual stream along the sequence.
    """
    counts = Counts(getattr(model, "config", None))
    rules: dict[str, Rule] = {}
    why: dict[str, str] = {}
    alone = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        own = dict(_rules_of(name, module, told, counts, why))
        if not any(path in told for path in own) and any(True for _ in module.parameters(recurse=False)):
            alone.append(name)
        if read := _read_below(name, module, told):
            own[name] = {**own.get(name, {"style": "replicate"}), "reads": read}
        rules |= own
    _answer_for_gradients(rules, modules)
    together = tuple(_together(rules, why, modules))
    units = {unit for rule in together for unit in _units_in(rule.keys)}
    serves = type(model).__name__
    comments = [
        f"Imported from {source} for {serves}: what it does not name stays whole.",
        "It cuts the sequence: what it means is this plan with `sequence_parallel`."
        if sequence
        else "It knows no sequence parallelism, and with this plan that switch changes nothing.",
        *(f"Its rule `{path}` names nothing in this model." for path in dead),
    ]
    draft = PlanDraft(
        name=re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", serves.removesuffix("ForCausalLM")).lower(),
        serves=(serves,),
        units={unit: said for unit, said in counts.used.items() if unit in units},
        rules=together,
        ties=_ties(model),
        fsdp=_fsdp_units(model),
        comments=tuple(comments),
    )
    return Imported(draft=draft, dead=tuple(dead), alone=tuple(alone))


def generic(name: str) -> str:
    """A name with ``*`` for every segment that is a number."""
    return ".".join("*" if segment.isdecimal() else segment for segment in name.split("."))


def _rules_of(
    name: str, module: nn.Module, told: Mapping[str, Told], counts: Counts, why: dict[str, str]
) -> Iterator[tuple[str, Rule]]:
    """The rules of one module and of its own tensors."""
    said = told.get(name)
    tensors = dict(named_tensors(module))
    paths = {each: f"{name}.{each}" if name else each for each in tensors}
    of_tensors = {
        paths[each]: _of_tensor(paths[each], tensors[each], told, counts) for each in tensors if paths[each] in told
    }
    for path in [name, *of_tensors]:
        if path in told and told[path].why_not:
            why[path] = told[path].why_not
    if said is not None and (rule := dict(said.rule)):
        yield from _of_module(name, module, said, rule, counts, why)
    elif tensors and not all(path in of_tensors for path in paths.values()):
        yield name, {"style": "replicate"}
    yield from ((path, rule) for path, rule in of_tensors.items() if rule != {"style": "replicate"} or said is None)


def _of_module(
    name: str, module: nn.Module, said: Told, rule: Rule, counts: Counts, why: dict[str, str]
) -> Iterator[tuple[str, Rule]]:
    style = rule.get("style")
    if style not in ("colwise", "rowwise", "vocab"):
        yield name, rule
    elif module_kind(module) in ("Linear", "Conv1D", "Embedding"):
        yield name, _in_order(rule | _unit(name, _size(module, style), said, counts))
    elif isinstance(module, nn.Embedding) and style == "vocab":
        yield name, _in_order(rule | {"like": "Embedding"} | _unit(name, _size(module, style), said, counts))
    elif isinstance(module, nn.Linear):
        yield from _subclass(name, module, said, counts)
    else:
        why[name] = f"`{style}` on a {type(module).__name__}"
        yield name, {"style": "todo"}


def _subclass(name: str, module: nn.Linear, said: Told, counts: Counts) -> Iterator[tuple[str, Rule]]:
    """A Linear with a class of its own: all its parameters one by one, and what happens at its edges."""
    cols = said.rule["style"] == "colwise"
    edges = {key: value for key, value in said.rule.items() if key in ("input", "output")}
    if cols:
        edges["output"] = {"from": "S(-1)", "to": "R" if "output" in edges else "S(-1)"}
    yield name, edges
    for each, parameter in module.named_parameters(recurse=False):
        dim = max(parameter.dim() - 2, 0) if cols else parameter.dim() - 1
        if not cols and each == "bias":
            yield f"{name}.{each}", {"once": True}
        else:
            yield f"{name}.{each}", {"shard": dim} | _unit(name, parameter.shape[dim], said, counts)


def _size(module: nn.Module, style: str) -> int:
    """Features of the dim that the style cuts."""
    weight: Any = module.weight
    rows = {"Conv1D": 1, "Embedding": 1}.get(module_kind(module), 0) if style == "colwise" else 1
    if style == "vocab" or (style == "rowwise" and module_kind(module) == "Conv1D"):
        rows = 0
    return int(weight.shape[rows])


def _of_tensor(path: str, tensor: Any, told: Mapping[str, Told], counts: Counts) -> Rule:
    said = told[path]
    rule = dict(said.rule)
    if "shard" not in rule:
        return rule
    return rule | _unit(path, tensor.shape[rule["shard"]], said, counts)


def _unit(path: str, size: int, said: Told, counts: Counts) -> Rule:
    """`unit` or `sections` of a cut dim; neither where a value is made whole at once or no number fits."""
    if said.sizes:
        sections = counts.sections(path, size, said.sizes)
        return {"sections": sections} if sections else {"style": "todo"}
    unit = counts.unit(path, size, parts=said.parts)
    if said.parts > 1:
        return {"sections": [unit] * said.parts} if unit is not None else {"style": "todo"}
    gathered = said.rule.get("output") == "gather" and unit != "vocab"
    return {} if unit is None or gathered else {"unit": unit}


_ORDER = ("style", "like", "shard", "unit", "sections", "grad", "once", "localize", "reads", "input", "output")


def _in_order(rule: Rule) -> Rule:
    return {key: rule[key] for key in _ORDER if key in rule}


def _units_in(rule: Mapping[str, Any]) -> list[str]:
    return [unit for unit in [rule.get("unit"), *rule.get("sections", ())] if unit is not None]


_READ = re.compile(r"\bself\.(\w+)\.(?:weight|bias)\b(?!\.(?:data|dtype|device|shape|ndim|size))")
_ASKED = re.compile(r"\bself\.(\w+)\.(\w+)\(")


def _read_below(name: str, module: nn.Module, told: Mapping[str, Told]) -> list[str]:
    """Whole modules below whose parameters the module's code needs without calling them.

    It reads a weight, as a convolution's that a kernel is given, or it calls another method than forward.
    """
    below = {each: child for each, child in module.named_children() if f"{name}.{each}" not in told}
    source = _source_of(type(module)) if below else ""  # type: ignore[arg-type]
    asked = {child for child, method in _ASKED.findall(source) if child in below and _is_own(below[child], method)}
    found: list[str] = []
    for each in (child for child in below if child in asked | set(_READ.findall(source))):
        found += [each] * any(True for _ in below[each].parameters(recurse=False))
        if each in asked:  # its forward does not run, so what it reads is read from here
            found += [f"{each}.{path}" for path in _read_below(f"{name}.{each}", below[each], told)]
    return found


def _is_own(module: nn.Module, method: str) -> bool:
    return inspect.isfunction(getattr(type(module), method, None)) and not hasattr(nn.Module, method)


@functools.cache
def _source_of(cls: Any) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # a class without a file
        return ""


def _answer_for_gradients(rules: dict[str, Rule], modules: Mapping[str, nn.Module]) -> None:
    """Whole parameters among cut ones: the source does not sum their gradients, so the rule says that it does not."""
    for name, rule in rules.items():
        if name not in modules or "grad" in rule or rule.get("style") not in (None, "replicate"):
            continue
        held = [n for n, _ in modules[name].named_parameters(recurse=False)]
        whole = [
            n
            for n in held
            if "shard" not in rules.get(f"{name}.{n}", {}) and not rules.get(f"{name}.{n}", {}).get("once")
        ]
        if whole and (_in_region(name, rules) or _beside_cuts(name, rules)):
            rules[name] = _in_order(rule | {"grad": "complete"})


def _in_region(name: str, rules: Mapping[str, Rule]) -> bool:
    while name:
        name = name.rpartition(".")[0]
        inputs = rules.get(name, {}).get("input")
        if isinstance(inputs, dict) and "sum" in inputs.values():
            return True
    return False


def _beside_cuts(name: str, rules: Mapping[str, Rule]) -> bool:
    parent = name.rpartition(".")[0]
    beside = {rule.get("style") for path, rule in rules.items() if path.rpartition(".")[0] == parent and path != name}
    return bool(parent) and {"colwise", "rowwise"} <= beside


def _together(rules: Mapping[str, Rule], why: Mapping[str, str], names: Iterable[str]) -> Iterator[RuleDraft]:
    """One rule for names that differ in numbers only; where the rules differ, one for each name."""
    groups: dict[str, dict[str, Rule]] = {}
    for name, rule in rules.items():
        groups.setdefault(generic(name), {})[name] = rule
    without: dict[str, int] = {}
    for name in names:
        if name not in rules:
            without[generic(name)] = without.get(generic(name), 0) + 1
    for pattern, each in groups.items():
        found = list(each.values())
        bare = [{key: value for key, value in rule.items() if key != "unit"} for rule in found]
        if not _alike(found) and _alike(bare):
            found = bare
        of_all = _alike(found) and not (without.get(pattern) and "reads" in found[0])
        named = {pattern: found[0]} if of_all else dict(zip(each, found, strict=True))
        for path, rule in named.items():
            reason = next((f"no words for this: {why[name]}" for name in each if name in why), "")
            yield RuleDraft(path=path, keys=rule, notes=(reason,) if reason and rule.get("style") == "todo" else ())


def _alike(rules: Sequence[Rule]) -> bool:
    return all(rule == rules[0] for rule in rules)


def _ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Parameters that the model ties, or would with other settings."""
    said = getattr(model, "_tied_weights_keys", None)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    pairs = said.items() if isinstance(said, dict) else ()
    return tuple((source, target) for target, source in pairs if {source, target} <= names)


def _fsdp_units(model: nn.Module) -> tuple[str, ...]:
    """The modules that the model declares as not to be split, where they are items of a list."""
    whole = getattr(model, "_no_split_modules", None) or ()
    found = [name for name, module in model.named_modules() if type(module).__name__ in whole]
    return tuple(dict.fromkeys(generic(name) for name in found if re.search(r"\.\d+$", name)))
