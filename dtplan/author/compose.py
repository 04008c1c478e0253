"""From a block's data flow to rules: what each module's place in it asks for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from dtplan.author.cutting import Cutting, cutting_of
from dtplan.author.draft import RuleDraft
from dtplan.author.groups import Branch, branches_of
from dtplan.author.order import gathered
from dtplan.author.owned import computes_linear, parameters_of, tensors_of
from dtplan.author.parts import Lies
from dtplan.author.trace import STREAM, Product, Trace, first_tensor, is_stream, tensors_in
from dtplan.author.units import Units
from dtplan.author.words import units_of, unsaid
from dtplan.planner.placing import CUTS, module_kind
from dtplan.prove.edits import pattern_of

ON_STREAM: tuple[Mapping[str, Any], ...] = ({"style": "norm"}, {"style": "replicate"})
"""What a module may be that is not cut: on the stream, whose tokens sequence parallelism cuts, or on whole values."""

Form = Literal["own", "region", "outer", "parallel"]
"""How a branch is arranged. ``own``: each group's last product sums for itself; ``region``: one module prepares the
input of all and sums what all give; ``outer``: a module keeps its input whole for a router, and groups inside are
handed whole values; ``parallel``: branches stay terms of a sum until the block joins them with its input."""


@dataclass(slots=True)
class Block:
    """One kind of block and its rules, by paths below it with ``*`` for numbers."""

    module: nn.Module
    trace: Trace
    units: Units
    forms: Mapping[str, Form] = field(default_factory=dict)
    """Branch root -> the form that another kind of block needs there."""
    rules: dict[str, RuleDraft] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    chosen: dict[str, Form] = field(default_factory=dict)
    cuttings: list[Cutting] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)
    """Modules that are one `todo`, with all that is in them."""

    def compose(self) -> None:
        """Fill ``rules``."""
        self.branches = branches_of(self.trace)
        known = self.units.known
        found = [[cutting_of(self.module, self.trace, g, known) for g in branch.groups] for branch in self.branches]
        self.cuttings = [cutting for cuttings in found for cutting in cuttings]
        counts = {part.count for c in self.cuttings for lies in c.parameters.values() for part in lies.parts}
        whole = self.units.keeps_whole(counts) or any(c.why_not for c in self.cuttings)
        parallel = self._is_parallel() and not whole  # a whole branch hands out no term of a sum
        for branch, cuttings in zip(self.branches, found, strict=True):
            form = "parallel" if parallel else self._form(branch)
            self.chosen[branch.root] = form
            self._branch(branch, cuttings, form)
        self._stream(parallel=parallel)
        self._unseen()
        keys = {"parallel_residual": self._stream_argument()} if parallel else {"input": "residual"}
        self._put("", keys, notes=self._flattened())

    def ordered(self) -> list[RuleDraft]:
        """The rules as the modules run: the block, then each module before what is in it."""
        order = {pattern_of(name): i for i, name in reversed(list(enumerate(self.trace.calls)))}
        names = [pattern_of(name) for name, _ in self.module.named_modules()]

        def place(path: str) -> tuple[int, int, int]:
            owner = path if path in order or path in names else path.rpartition(".")[0]
            return (order.get(owner, len(order)), names.index(owner) if owner in names else 0, path != owner)

        return [
            self.rules[""],
            *gathered(sorted((r for p, r in self.rules.items() if p), key=lambda r: place(r.path))),
        ]

    def rules_of(self, cutting: Cutting) -> tuple[str, ...]:
        """The styles of the modules of a group's products, each once."""
        owners = dict.fromkeys(pattern_of(p.parameter.rpartition(".")[0]) for p in cutting.group.products)
        rules = [self.rules[owner].keys if owner in self.rules else {} for owner in owners]
        return tuple(dict.fromkeys(str(keys.get("style", "")) for keys in rules if "sections" not in keys))

    # --- forms

    def _is_parallel(self) -> bool:
        """Whether several branches read the block's input, and nothing but sums joins them."""
        groups = [group for branch in self.branches for group in branch.groups]
        first = [p for group in groups for p in group.first]
        direct = any(branch.direct for branch in self.branches)
        reads_input = all(p.last == {STREAM} for p in first)
        roots = {group.root for group in groups}
        return len(groups) > 1 and len(roots) == len(groups) and not direct and reads_input and not self._behind()

    def _behind(self) -> bool:
        """Whether a module with parameters works on what a branch gave, before it joins."""
        ends = {p.number for branch in self.branches for group in branch.groups for p in group.last}
        calls = [c for c in self.trace.calls.values() if c.name and parameters_of(self.module.get_submodule(c.name))]
        return any(c.last and c.last <= ends for c in calls)

    def _form(self, branch: Branch) -> Form:
        if branch.root in self.forms:
            return self.forms[branch.root]
        roots = {group.root for group in branch.groups}
        if not branch.direct and len(branch.groups) == 1:
            many = self._called_often(branch.groups[0].last)
            bare = any(p.parameter.rpartition(".")[0] == branch.groups[0].root for p in branch.groups[0].last)
            return "region" if (many or bare) and branch.root else "own"
        if branch.root and branch.root not in roots:
            return "outer"
        return "region" if branch.root or branch.direct else "own"

    def _called_often(self, products: Sequence[Product]) -> bool:
        return any(self.trace.times[p.parameter.rpartition(".")[0]] != 1 for p in products) or len(products) > 1

    # --- one branch

    def _branch(self, branch: Branch, cuttings: Sequence[Cutting], form: Form) -> None:
        if form in ("region", "outer") and branch.root:
            keys: dict[str, Any] = {"input": self._whole_inputs(branch.root)}
            keys |= {"output": self._output(branch.root, "residual")}
            self._put(branch.root, {"style": "replicate", **keys} if form == "outer" else keys)
        for product in branch.direct:
            self._direct(product, form)
        for cutting in cuttings:
            if why_not := cutting.why_not or unsaid(cutting, self.units):
                self._undecided(cutting, why_not)
            else:
                self._group(cutting, form, branch.root)

    def _direct(self, product: Product, form: Form) -> None:
        owner = product.parameter.rpartition(".")[0]
        keys = {"style": "replicate"} if form == "outer" else {"style": "replicate", "grad": "sum"}
        self._put(owner, keys)

    def _undecided(self, cutting: Cutting, why_not: str) -> None:
        """One `todo` for the module in which a group lies, or one for each of its products where that is the block."""
        root = pattern_of(cutting.group.root)
        seen = f"not decided: {why_not}"
        if root and root not in self.rules:
            self._put_whole(cutting.group.root, seen)
            return
        notes: tuple[str, ...] = (seen,)
        for product in cutting.group.products:
            owner = pattern_of(product.parameter.rpartition(".")[0])
            if owner not in self.rules:
                self._put(owner, {"style": "todo"}, notes=notes, choices=ON_STREAM)
                notes = ()

    def _put_whole(self, root: str, *seen: str) -> None:
        """A `todo` for all that is in a module, which every rank may do whole."""
        out = self._output(root, "residual")
        keys = {"style": "replicate", "below": True, "input": self._whole_inputs(root), "output": out}
        if read := self._read_in(root):
            keys["reads"] = read
        path = pattern_of(root)
        for below in [name for name in self.rules if name.startswith(f"{path}.") or name == path]:
            del self.rules[below]
        self._put(root, {"style": "todo"}, notes=seen, choices=(keys,))
        self.whole.add(path)

    def _read_in(self, root: str) -> list[str]:
        """Modules in ``root`` whose parameters are read and that are not called."""
        named = self.module.get_submodule(root).named_modules(prefix=root)
        owners = [name for name, module in named if name != root and parameters_of(module)]
        return [name.removeprefix(f"{root}.") for name in owners if not self.trace.times[name]]

    def _group(self, cutting: Cutting, form: Form, root: str) -> None:
        group = cutting.group
        inside = group.root
        if inside and (form in ("own", "parallel") or (form == "outer" and inside != root)):
            self._region(cutting, form)
        for owner in self._owners(cutting):
            self._owner(owner, cutting, form)
        read = [owner for owner in self._owners(cutting) if owner != inside and not self.trace.times[owner]]
        if read and inside:
            known = self.rules.get(pattern_of(inside))
            names = [owner.removeprefix(f"{inside}.") for owner in read]
            self._put(inside, {"reads": names}, remark=known.remark if known else "")
        for owner, path in cutting.numbers or ():
            self._localize(f"{inside}.{owner}".strip("."), path)
        if cutting.per_unit is not None and (unit := self.units.shared(cutting.kv_units)):
            for owner, path in cutting.per_unit:
                self._localize_per(f"{inside}.{owner}".strip("."), path, unit)
        if cutting.numbers is None:
            seen = "its forward needs numbers of the whole, and no set of its attributes makes it work on a part"
            self._put_whole(inside, seen, "(a cut needs `localize: [...]` with what it reshapes by)")

    def _region(self, cutting: Cutting, form: Form) -> None:
        """The rule of the module in which a group lies."""
        root = cutting.group.root
        keys: dict[str, Any] = {}
        moves: dict[str, Any] = {}
        for name, lies in cutting.inputs.items():
            if lies.kind == "cut":
                part = lies.parts[0]
                unit = self.units.of(part.count, part.rows)
                moves[name] = {"from": "R", "to": f"S({lies.dim})", **({"unit": unit} if unit else {})}
            elif self._from_stream(root, name) and form != "parallel":
                moves[name] = "sum" if form == "outer" else "R"
        if form == "outer":
            names = self._stream_inputs(root)
            moves |= {name: "sum" for name in names if name not in moves}
            if any(p.parameter.rpartition(".")[0] == root for p in cutting.group.last):
                keys["output"] = self._output(root, "sum")
        arguments = self._arguments(root)
        if moves:
            only_first = list(moves) == arguments[:1] and isinstance(next(iter(moves.values())), str)
            keys = {"input": next(iter(moves.values())) if only_first else moves, **keys}
        if keys:
            self._put(root, keys, remark=self._reads_once(cutting))

    def _reads_once(self, cutting: Cutting) -> str:
        """`one input for q_proj, k_proj and v_proj`."""
        leaves = dict.fromkeys(_leaf_of(p.parameter) for p in cutting.group.first)
        names = list(leaves)
        return "" if len(names) < 2 else f"one input for {', '.join(names[:-1])} and {names[-1]}"

    def _owners(self, cutting: Cutting) -> list[str]:
        """Modules whose own parameters belong to the group, once for a list of experts."""
        owners: dict[str, str] = {}
        for name in cutting.parameters:
            owners.setdefault(pattern_of(name.rpartition(".")[0]), name.rpartition(".")[0])
        return list(owners.values())

    def _owner(self, owner: str, cutting: Cutting, form: Form) -> None:
        own = {n.rpartition(".")[2]: one for n, one in cutting.parameters.items() if n.rpartition(".")[0] == owner}
        weight = own.get("weight")
        exits = {p.parameter for p in cutting.group.last}
        path = pattern_of(owner)
        if path in self.rules and path != cutting.group.root:
            return
        if f"{owner}.weight" in exits:
            self._last(owner, own, form)
        elif weight is not None and weight.kind == "cut" and owner in cutting.norms:
            self._put(owner, {"style": "sharded_norm", **units_of(self.units, weight)})
        elif weight and weight.kind == "cut" and self._is_styled(f"{owner}.weight", "colwise", weight.dim):
            self._put(owner, {"style": "colwise", **self._like(f"{owner}.weight"), **units_of(self.units, weight)})
        elif own and all(one.kind == "whole" for one in own.values()) and owner != cutting.group.root:
            self._put(owner, {"style": "replicate", "grad": "sum"})
        elif own and all(one.kind == "idle" for one in own.values()):
            self._put(owner, {"style": "replicate", "grad": "complete"}, remark="it has no gradient")
        else:
            self._bare(owner, own, exits)

    def _last(self, owner: str, own: Mapping[str, Lies], form: Form) -> None:
        """A module whose product is added to the stream."""
        weight = own["weight"]
        often = self.trace.times[owner] != 1
        output = "P" if form in ("parallel", "region") or often else {"outer": "sum"}.get(form, "residual")
        if self._is_styled(f"{owner}.weight", "rowwise", weight.dim):
            like = self._like(f"{owner}.weight")
            self._put(owner, {"style": "rowwise", **like, **units_of(self.units, weight), "output": output})
            return
        self._put(owner, {"output": output})
        self._put(f"{owner}.weight", {"shard": weight.dim, **units_of(self.units, weight)})
        if "bias" in own:
            self._put(f"{owner}.bias", {"once": True})

    def _bare(self, owner: str, own: Mapping[str, Lies], exits: set[str]) -> None:
        """Parameters that are ruled one by one: of classes that no style knows, or of the root itself."""
        for leaf, one in own.items():
            path = f"{owner}.{leaf}".strip(".")
            if one.kind == "cut" or path in exits:
                self._put(path, {"shard": one.dim, **units_of(self.units, one)})
            elif one.kind == "whole":
                self._put(path, {"grad": "sum"})
            elif one.kind == "idle":
                self._put(path, {"grad": "complete"}, remark="it has no gradient")
            elif one.kind == "apart":
                self._put(path, {"once": True}, remark="added behind the cut work, so one rank adds it")

    def _like(self, parameter: str) -> dict[str, str]:
        """`like: Linear` for a class of its own that was seen to compute what a Linear does."""
        owner = self.module.get_submodule(parameter.rpartition(".")[0])
        return {} if module_kind(owner) in ("Linear", "Conv1D") else {"like": "Linear"}

    # --- what lies on the stream

    def _stream(self, *, parallel: bool) -> None:
        """Norms before and behind the branches."""
        for call in self.trace.calls.values():
            module = self.module.get_submodule(call.name)
            path = pattern_of(call.name)
            if not call.name or path in self.rules or not parameters_of(module) or self._is_ruled(call.name):
                continue
            given = [t for t in tensors_in([call.args, call.kwargs]) if t.is_floating_point()]
            out = first_tensor(call.out)
            own = parameters_of(module).values()
            keeps_shape = len(given) == 1 and out is not None and given[0].shape == out.shape
            if keeps_shape and all(t.dim() == 1 for t in own):
                reads_input = parallel and is_stream(call.last)
                if self._outer(call.name):
                    self._put(call.name, {"style": "replicate"})
                else:
                    self._put(call.name, {"style": "norm", **({"grad": "sum"} if reads_input else {})})

    def _outer(self, name: str) -> bool:
        """Whether a module lies in one whose input is whole on every rank."""
        return any(form == "outer" and root and name.startswith(f"{root}.") for root, form in self.chosen.items())

    def _unseen(self) -> None:
        """Modules that own something and that no rule names yet."""
        for name, module in self.module.named_modules():
            tensors = tensors_of(module)
            path = pattern_of(name)
            if not tensors or path in self.rules or self._is_ruled(name) or not name:
                continue
            if not any(parameter.requires_grad for parameter in parameters_of(module).values()):
                self._put(name, {"style": "replicate"})
                continue
            seen = "it was not called on tokens" if name not in self.trace.calls else "it lies outside of every branch"
            kind = type(module).__name__
            notes = (f"{kind} with {', '.join(tensors)}: {seen}",)
            self._put(name, {"style": "todo"}, notes=notes, choices=ON_STREAM)

    def _is_ruled(self, name: str) -> bool:
        """Whether rules on its parameters, one by one, or one on a module around it cover a module."""
        if any(pattern_of(name).startswith(f"{root}.") for root in self.whole):
            return True
        tensors = tensors_of(self.module.get_submodule(name))
        return bool(tensors) and all(f"{pattern_of(name)}.{tensor}" in self.rules for tensor in tensors)

    def _flattened(self) -> tuple[str, ...]:
        """A note where the block itself makes one dim of batch and sequence, in front of a cut layer."""
        stream = first_tensor([self.trace.calls[""].args, dict(self.trace.calls[""].kwargs)])
        loose = [p for c in self.cuttings if not c.group.root for p in c.group.first]
        flat = [p for p in loose if stream is not None and p.read.dim() != stream.dim()]
        if not flat:
            return ()
        names = ", ".join(dict.fromkeys(_leaf_of(p.parameter) for p in flat))
        return (f"the block flattens [batch, sequence] in front of {names}: no sequence parallelism with this model",)

    # --- arguments

    def _arguments(self, name: str) -> list[str]:
        return list(inspect.signature(self.module.get_submodule(name).forward).parameters)

    def _given(self, name: str) -> dict[str, Any]:
        call = self.trace.calls[name]
        return {**dict(zip(self._arguments(name), call.args, strict=False)), **call.kwargs}

    def _from_stream(self, name: str, argument: str) -> bool:
        value = first_tensor(self._given(name).get(argument))
        return value is not None and bool(self.trace.last(value))

    def _stream_inputs(self, name: str) -> list[str]:
        return [a for a, v in self._given(name).items() if first_tensor(v) is not None and self._from_stream(name, a)]

    def _stream_argument(self) -> str:
        given = self._given("")
        return next(name for name, value in given.items() if first_tensor(value) is not None)

    def _whole_inputs(self, name: str) -> Any:
        names = self._stream_inputs(name)
        return "R" if names == self._arguments(name)[:1] else dict.fromkeys(names, "R")

    def _output(self, name: str, layout: str) -> Any:
        return {0: layout} if isinstance(self.trace.calls[name].out, tuple | list) else layout

    # --- rules

    def _is_styled(self, parameter: str, style: str, dim: int | None = None) -> bool:
        owner, _, leaf = parameter.rpartition(".")
        module = self.module.get_submodule(owner)
        table = CUTS[style].get("Linear" if computes_linear(module) else module_kind(module))
        return table is not None and leaf in table and dim in (None, table[leaf])

    def _localize(self, name: str, number: str) -> None:
        path = pattern_of(name)
        known = self.rules.get(path)
        keys = dict(known.keys) if known else {}
        keys["localize"] = [*keys.get("localize", []), number]
        self._put(name, keys, remark=known.remark if known else "")

    def _localize_per(self, name: str, number: str, unit: str) -> None:
        known = self.rules.get(pattern_of(name))
        before = known.keys.get("localize_per", {}) if known else {}
        self._put(name, {"localize_per": {**before, number: unit}}, remark=known.remark if known else "")

    def _put(
        self,
        name: str,
        keys: Mapping[str, Any],
        *,
        notes: tuple[str, ...] = (),
        remark: str = "",
        choices: tuple[Mapping[str, Any], ...] = (),
    ) -> None:
        path = pattern_of(name)
        merged = {**(self.rules[path].keys if path in self.rules else {}), **keys}
        self.rules[path] = RuleDraft(path=path, keys=merged, notes=notes, remark=remark, choices=choices)


def _leaf_of(parameter: str) -> str:
    owner, _, leaf = parameter.rpartition(".")
    return owner.rpartition(".")[2] if leaf == "weight" else leaf
