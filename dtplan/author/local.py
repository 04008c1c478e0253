"""What one rank would compute: a module with its part of the parameters, run without any group of ranks.

Used to find the numbers (head counts, widths of views) that a forward takes from attributes or the config and that
must be a rank's own: the columns that all ranks compute, side by side, are compared with those of the whole module.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtplan.author.depend import fresh_inputs, see_through
from dtplan.author.groups import Group
from dtplan.author.parts import Lies
from dtplan.author.trace import Trace, trace_block
from dtplan.planner.localize import divide
from dtplan.prove.edits import pattern_of
from dtplan.prove.oracle import float64_casts, relative_error

DEGREE = 2
TRIES = 80
_BOUND = 1e-9

Number = tuple[str, str]
"""A module below the root, and the path of a number in it: ``("c_attn", "nf")``, ``("", "config.n_head")``."""


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A group's root with what it was given and how its parameters and inputs are cut; names are below the block."""

    block: nn.Module
    trace: Trace
    group: Group
    parameters: Mapping[str, Lies]
    inputs: Mapping[str, Lies]
    norms: Sequence[str]
    known: frozenset[int] = frozenset()
    """Numbers of units that config fields count."""

    def numbers(self) -> tuple[Number, ...] | None:
        """The numbers that must be divided so that ranks compute what the whole does; None if none were found."""
        truth, seen = self._truth()
        if self._right(truth, DEGREE, {}):
            return ()
        sizes = self._sizes()
        candidates = [number for number, value in seen.items() if value in sizes]
        tries = itertools.islice(_subsets(candidates), TRIES)
        found = next((wanted for wanted in tries if self._right(truth, DEGREE, dict.fromkeys(wanted, DEGREE))), None)
        if found is None and self._right(truth, DEGREE, dict.fromkeys(candidates, DEGREE)):
            found = tuple(candidates)
        return found

    def numbers_per_unit(self, units: int, shared: int, numbers: Sequence[Number]) -> tuple[Number, ...] | None:
        """The numbers that count for each of ``units`` units (heads of a kv head), where ``shared`` ranks have one.

        ``numbers`` are those that are divided by the degree anyway. None where ranks cannot share a unit.
        """
        truth, seen = self._truth()
        degree = units * shared
        divided = dict.fromkeys(numbers, degree)
        candidates = [n for n, value in seen.items() if value % shared == 0 and n not in divided and value > 1]
        for wanted in itertools.islice(itertools.chain([()], _subsets(candidates)), TRIES):
            if self._right(truth, degree, divided | dict.fromkeys(wanted, shared)):
                return wanted
        return None

    # --- runs

    @property
    def _root(self) -> nn.Module:
        return self.block.get_submodule(self.group.root)

    def _truth(self) -> tuple[list[Tensor], dict[Number, int]]:
        whole = _copied(self._root)
        seen = watched(whole)
        return self._columns(whole, None), seen

    def _right(self, truth: Sequence[Tensor], degree: int, divided: Mapping[Number, int]) -> bool:
        try:
            ranks = [self._columns(self._on_rank(rank, degree, divided), rank, degree) for rank in range(degree)]
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError, AssertionError):
            return False  # a module's own code, on sizes that it does not expect
        if any(len(found) != len(truth) for found in ranks):
            return False
        joined = [torch.cat(parts, dim=-1) for parts in zip(*ranks, strict=True)]
        return all(relative_error(a, b) < _BOUND for a, b in zip(joined, truth, strict=True))

    def _columns(self, root: nn.Module, rank: int | None, degree: int = 1) -> list[Tensor]:
        """The columns that the last products read, of every product."""
        args, kwargs, inputs = fresh_inputs(self._root, self.trace.calls[self.group.root])
        for name, lies in self.inputs.items():
            if lies.kind == "cut" and rank is not None:
                inputs[name].data = _part(inputs[name].detach(), lies, rank, degree)
        prefix = f"{self.group.root}." if self.group.root else ""
        below = [name.removeprefix(prefix) for name in self.norms]
        with float64_casts(), see_through(root, below), torch.no_grad():
            found = trace_block(root, args, kwargs)
        products = [p for p in found.products if pattern_of(prefix + p.parameter) in self.group.exits]
        return [p.read.movedim(p.along, -1) for p in products]

    def _on_rank(self, rank: int, degree: int, divided: Mapping[Number, int]) -> nn.Module:
        root: nn.Module = _copied(self._root)
        prefix = f"{self.group.root}." if self.group.root else ""
        for name, lies in self.parameters.items():
            if lies.kind == "cut" and name.startswith(prefix):
                owner, _, leaf = name.removeprefix(prefix).rpartition(".")
                module = root.get_submodule(owner)
                own = _part(getattr(module, leaf).detach(), lies, rank, degree)
                setattr(module, leaf, nn.Parameter(own, requires_grad=False))
        for (owner, path), parts in divided.items():
            divide(root.get_submodule(owner), (path,), parts)
        return root

    def _sizes(self) -> set[int]:
        """Numbers of units, rows of parts, and of all of them."""
        parts = [part for lies in (*self.parameters.values(), *self.inputs.values()) for part in lies.parts]
        sizes = {size for part in parts for size in (part.count, part.rows)}
        sizes |= {sum(part.rows for part in lies.parts) for lies in self.parameters.values()}
        counts = {part.count for part in parts} | self.known
        sizes |= self.known
        sizes |= {a // b for a in counts for b in counts if a % b == 0}  # as heads for each kv head
        return {size for size in sizes if size > 1 and size % DEGREE == 0}


def _part(whole: Tensor, lies: Lies, rank: int, degree: int) -> Tensor:
    """A rank's rows: of each section its share, or the one unit that it shares, of whole ones all; so in each group."""
    rows, pieces, start = whole.movedim(lies.dim, 0), [], 0
    for part in lies.parts * lies.groups:
        shares = min(part.count, degree)
        own, first = part.rows // shares, rank * shares // degree
        pieces.append(rows[start : start + part.rows] if part.whole else rows[start + first * own :][:own])
        start += part.rows
    return torch.cat(pieces).movedim(0, lies.dim).contiguous()


def _copied(module: nn.Module) -> Any:
    """The module and all below it with dictionaries of their own; parameters are shared until they are replaced."""
    made = copy.copy(module)
    made.__dict__ = {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
    made._modules = {name: None if child is None else _copied(child) for name, child in module._modules.items()}
    return made


def _subsets(candidates: Sequence[Number]) -> Iterator[tuple[Number, ...]]:
    for size in range(1, len(candidates) + 1):
        yield from itertools.combinations(candidates, size)


def watched(root: nn.Module) -> dict[Number, int]:
    """Filled, while ``root`` runs, with every whole number that a forward reads from a module or from its config."""
    seen: dict[Number, int] = {}
    for name, module in root.named_modules():
        config = vars(module).get("config")
        if config is not None:
            vars(module)["config"] = _noting(copy.copy(config), name, "config.", seen)
        _noting(module, name, "", seen)
    return seen


def _noting(thing: Any, owner: str, prefix: str, seen: dict[Number, int]) -> Any:
    kind: Any = type(thing)

    def read(this: Any, name: str) -> Any:
        value = kind.__getattribute__(this, name)
        if type(value) is int and not name.startswith("_"):
            seen.setdefault((owner, prefix + name), value)
        return value

    thing.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read})
    return thing
