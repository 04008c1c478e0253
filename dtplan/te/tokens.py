"""The order of tokens under TransformerEngine's sequence parallelism, which cuts the first dim.

The residual stream is [batch, sequence / n, features] on a rank, cut along the sequence, or [batch / n, sequence,
features] by a plan that says so. TransformerEngine gathers and scatters rows of [tokens, features]: the gathered rows
come rank by rank. Cut along the batch that is the order in which they are needed. Cut along the sequence, with more
than one sequence, they are put back into the order of the sequences, and into that of the ranks before they are
scattered. An MLP works token by token and needs neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dtplan.planner.collectives import Group
from dtplan.planner.styles import Forward


@dataclass(frozen=True, slots=True)
class Tokens:
    """How a fused layer's input and output are laid out: cut along ``dim``, 0 or 1; ``group`` None: nothing is cut."""

    group: Group | None
    dim: int = 1

    @property
    def cut(self) -> bool:
        """Whether the residual stream is cut over ranks."""
        return self.group is not None and self.group.size > 1

    def same(self, inner: Forward) -> Forward:
        """A layer whose output has the tokens of its input, in their order."""
        return self._wrapped(inner, self._flat, lambda y, x: y.view(*x.shape[:-1], -1))

    def column(self, inner: Forward) -> Forward:
        """A layer that gathers tokens: [batch, own, features] to [batch, all, columns]."""
        return self._wrapped(inner, self._flat, self._by_sequence)

    def row(self, inner: Forward) -> Forward:
        """A layer that scatters tokens: [batch, all, columns] to [batch, own, features]."""
        return self._wrapped(inner, self._by_rank, self._own)

    def _wrapped(self, inner: Forward, before: Any, after: Any) -> Forward:
        if not self.cut:
            return inner

        def forward(x: Tensor) -> Tensor:
            out: Tensor = after(inner(before(x).contiguous()), x)
            return out

        return forward

    @staticmethod
    def _flat(x: Tensor) -> Tensor:
        return x.flatten(0, -2)

    def _by_sequence(self, y: Tensor, x: Tensor) -> Tensor:
        assert self.group is not None
        batch, own = x.shape[0], x.shape[1]
        if self.dim == 0:
            return y.view(self.group.size * batch, own, -1)
        return y.view(self.group.size, batch, own, -1).transpose(0, 1).reshape(batch, self.group.size * own, -1)

    def _by_rank(self, x: Tensor) -> Tensor:
        assert self.group is not None
        if self.dim == 0:
            return self._flat(x)
        batch, sequence = x.shape[0], x.shape[1]
        parts = x.view(batch, self.group.size, sequence // self.group.size, -1)
        return parts.transpose(0, 1).flatten(0, 2)

    def _own(self, y: Tensor, x: Tensor) -> Tensor:
        """The rank's part of the output for the whole input ``x``."""
        assert self.group is not None
        shape = list(x.shape[:-1])
        shape[self.dim] //= self.group.size
        return y.view(*shape, -1)
