"""One fused layer: which modules it takes the place of, and what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtplan.planner.bound import BoundMove, BoundTensor
from dtplan.te.norm import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTensor:
    """A parameter of a fused layer: what is bound, and the full names of the tensors that make it up, in order."""

    bound: BoundTensor
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A TransformerEngine layer in place of modules of the model; all names are full."""

    layer: str
    name: str
    pattern: str = ""
    """The name as the plan spells it, for all modules alike."""
    unit: str = ""
    """The module below which the plan declares it."""
    rule: str
    region: str | None = None
    """The module whose forward reads the norm's output: the fused layer is run when it is entered."""
    norm: str | None = None
    columns: tuple[str, ...] = ()
    row: str | None = None
    normalization: Norm | None = None
    activation: str | None = None
    communicates: bool = False
    """Whether the layer itself does the collectives of tp, or the bound moves around it do."""
    tensors: tuple[FusedTensor, ...] = ()
    inputs: tuple[BoundMove, ...] = ()
    outputs: tuple[BoundMove, ...] = ()
    argument: BoundMove | None = None
    """Which argument of the region's forward is the norm's output; None: the first."""

    def parts(self) -> Iterator[str]:
        """The modules that it takes the place of."""
        yield from (part for part in (self.norm, *self.columns, self.row) if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A layer that the plan would fuse and that stays as it is: where, which, and why."""

    where: str
    layer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is fused and what is kept, for one model."""

    fused: tuple[Fused, ...] = ()
    kept: tuple[Kept, ...] = ()
