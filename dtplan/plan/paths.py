"""Path patterns: one segment at a time, ``*`` for a whole segment, ``{a,b}`` for alternatives; no ``**``."""

from __future__ import annotations

import itertools
import re

Segments = tuple[str, ...]

_SEGMENT = re.compile(r"[A-Za-z0-9_]+")
_BRACES = re.compile(r"\{([^{}]*)\}")


class PatternError(ValueError):
    """A path pattern is not well formed; the text says why and what to write."""


def split(pattern: str) -> list[str]:
    """Segments of ``pattern``; dots inside braces do not separate."""
    return re.split(r"\.(?![^{]*\})", pattern)


def expand(pattern: str) -> tuple[Segments, ...]:
    """Every pattern without braces that ``pattern`` stands for, as segments.

    Raises:
        PatternError: an empty segment, ``**``, a ``*`` that is only a part of a segment, unbalanced braces.
    """
    if not pattern:
        raise PatternError("the path is empty")
    choices = [_alternatives(segment, pattern) for segment in split(pattern)]
    expanded = tuple(tuple(".".join(parts).split(".")) for parts in itertools.product(*choices))
    for segments in expanded:
        for segment in segments:
            if segment != "*" and not _SEGMENT.fullmatch(segment):
                raise PatternError(_why(segment, pattern))
    if len(set(expanded)) < len(expanded):
        raise PatternError(f"`{pattern}` names the same path twice")
    return expanded


def _alternatives(segment: str, pattern: str) -> list[str]:
    if segment.count("{") != segment.count("}"):
        raise PatternError(f"unbalanced braces in `{pattern}`")
    pieces = _BRACES.split(segment)  # literal, inside, literal, inside, ... literal
    options = [[piece] if i % 2 == 0 else [word.strip() for word in piece.split(",")] for i, piece in enumerate(pieces)]
    return ["".join(parts) for parts in itertools.product(*options)]


def _why(segment: str, pattern: str) -> str:
    if segment == "":
        return f"an empty segment in `{pattern}`"
    if segment == "**":
        return f"`**` in `{pattern}`: name every level, `*` stands for exactly one"
    if "*" in segment:
        return f"`{segment}` in `{pattern}`: `*` stands for a whole segment, write alternatives as {{a,b}}"
    return f"`{segment}` in `{pattern}` is not a module name: letters, digits and _ only"


def matches(pattern: Segments, name: Segments) -> bool:
    """Whether ``pattern`` names ``name``."""
    return len(pattern) == len(name) and all(p in ("*", n) for p, n in zip(pattern, name, strict=True))


def overlap(a: Segments, b: Segments) -> bool:
    """Whether some name exists that both patterns name."""
    return len(a) == len(b) and all(x == y or "*" in (x, y) for x, y in zip(a, b, strict=True))
