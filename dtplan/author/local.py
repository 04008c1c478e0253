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
        if self._right(truth, ()):
            return ()
        sizes = self._sizes()
        candidates = [number for number, value in seen.items() if value in sizes]
        tries = itertools.islice(_subsets(candidates), TRIES)
        found = next((numbers for numbers in tries if self._right(truth, numbers)), None)
        if found is None and self._right(truth, tuple(candidates)):
            found = tuple(candidates)
        return found

    # --- runs

    @property
    def _root(self) -> nn.Module:
        return self.block.get_submodule(self.group.root)

    def _truth(self) -> tuple[list[Tensor], dict[Number, int]]:
        whole = _copied(self._root)
        seen = watched(whole)
        return self._columns(whole, None), seen

    def _right(self, truth: Sequence[Tensor], numbers: Sequence[Number]) -> bool:
        try:
            ranks = [self._columns(self._on_rank(rank, numbers), rank) for rank in range(DEGREE)]
        except Exception:  # noqa: BLE001 - a module's own code, on sizes that it may not expect
            return False
        if any(len(found) != len(truth) for found in ranks):
            return False
        joined = [torch.cat(parts, dim=-1) for parts in zip(*ranks, strict=True)]
        return all(relative_error(a, b) < _BOUND for a, b in zip(joined, truth, strict=True))

    def _columns(self, root: nn.Module, rank: int | None) -> list[Tensor]:
        """The columns that the last products read, of every product."""
        args, kwargs, inputs = fresh_inputs(self._root, self.trace.calls[self.group.root])
        for name, lies in self.inputs.items():
            if lies.kind == "cut" and rank is not None:
                inputs[name].data = _part(inputs[name].detach(), lies, rank)
        prefix = f"{self.group.root}." if self.group.root else ""
        below = [name.removeprefix(prefix) for name in self.norms]
        with float64_casts(), see_through(root, below), torch.no_grad():
            found = trace_block(root, args, kwargs)
        products = [p for p in found.products if pattern_of(prefix + p.parameter) in self.group.exits]
        return [p.read.movedim(p.along, -1) for p in products]

    def _on_rank(self, rank: int, numbers: Sequence[Number]) -> nn.Module:
        root = _copied(self._root)
        prefix = f"{self.group.root}." if self.group.root else ""
        for name, lies in self.parameters.items():
            if lies.kind == "cut" and name.startswith(prefix):
                owner, _, leaf = name.removeprefix(prefix).rpartition(".")
                module = root.get_submodule(owner)
                whole = module._parameters[leaf]
                assert whole is not None
                module._parameters[leaf] = nn.Parameter(_part(whole.detach(), lies, rank), requires_grad=False)
        for owner in dict.fromkeys(owner for owner, _ in numbers):
            divide(root.get_submodule(owner), tuple(path for name, path in numbers if name == owner), DEGREE)
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


def _part(whole: Tensor, lies: Lies, rank: int) -> Tensor:
    """A rank's rows: of each section its share, of whole ones all; of groups of units its units in each group."""
    rows, pieces, start = whole.movedim(lies.dim, 0), [], 0
    for part in lies.parts * lies.groups:
        own = part.rows // DEGREE
        pieces.append(rows[start : start + part.rows] if part.whole else rows[start + rank * own :][:own])
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
    kind = type(thing)

    def read(this: Any, name: str) -> Any:
        value = kind.__getattribute__(this, name)
        if type(value) is int and not name.startswith("_"):
            seen.setdefault((owner, prefix + name), value)
        return value

    thing.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read})
    return thing
