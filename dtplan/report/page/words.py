"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable


def chip(layout: str) -> str:
    """`S(0)` as `S0`."""
    return layout.replace("(", "").replace(")", "")


def dims(shape: Iterable[int]) -> str:
    """A shape with multiplication signs between its dims."""
    return " \u00d7 ".join(map(str, shape)) or "scalar"


def percent(share: float) -> str:
    """A share, rounded down, so that 100 % is said of all and 0 % of none."""
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    digits = 1 if 0.001 <= share <= 0.999 else 3
    scale = 10**digits
    return f"{max(math.floor(share * 100 * scale), 1) / scale:.{digits}f} %"


def few(ranges: str) -> str:
    """The first and the last of many ranges."""
    runs = ranges.split(", ")
    return ranges if len(runs) <= 4 else f"{runs[0]}, {runs[1]}, ... {runs[-1]}"
