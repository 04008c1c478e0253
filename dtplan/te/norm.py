"""Which norm a module computes, as data; no torch, since bound plans hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over the last dim."""

    kind: Literal["RMSNorm", "LayerNorm"]
    eps: float
    zero_centered: bool
    """The weight is added to 1."""
    bias: bool

    @property
    def fusable(self) -> bool:
        """Whether TransformerEngine has it: its LayerNorm has a bias, its RMSNorm none."""
        return self.bias == (self.kind == "LayerNorm")

    @property
    def means(self) -> int:
        """Means that it takes: all-reduces of one number a token, each way, where the dim is cut."""
        return 2 if self.kind == "LayerNorm" else 1
