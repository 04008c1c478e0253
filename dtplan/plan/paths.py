"""Path patterns: one segment at a time, ``*`` for a whole segment, ``{a,b}`` for alternatives; no ``**``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Segments = tuple[str, ...]

MAX_ALTERNATIVES = 1024
"""Paths that one pattern may stand for."""

_SEGMENT = re.compile(r"[A-Za-z0-9_]+")
_BRACES = re.compile(r"\{([^{}]*)\}")


class PatternError(ValueError):
    """A path pattern is not well formed; the text says why and what to write."""


def expand(pattern: str) -> tuple[Segments, ...]:
    """Every pattern without braces that ``pattern`` stands for, as segments.

    Raises:
        PatternError: an empty segment, ``**``, a ``*`` that is only a part of a segment, unbalanced or nested
            braces, the same path twice, or more than 1024 paths.
    """
    if not pattern:
        raise PatternError("the path is empty")
    _check_braces(pattern)
    if math.prod(inside.count(",") + 1 for inside in _BRACES.findall(pattern)) > MAX_ALTERNATIVES:
        raise PatternError(f"`{pattern[:60]}` stands for more than {MAX_ALTERNATIVES} paths")
    expanded = tuple(tuple(text.split(".")) for text in _alternatives(pattern))
    for segments in expanded:
        for segment in segments:
            if segment != "*" and not _SEGMENT.fullmatch(segment):
                raise PatternError(_why(segment, pattern))
    if len(set(expanded)) < len(expanded):
        raise PatternError(f"`{pattern}` names the same path twice")
    return expanded


def _check_braces(pattern: str) -> None:
    depth = 0
    for character in pattern:
        depth += (character == "{") - (character == "}")
        if depth > 1:
            raise PatternError(f"braces inside braces in `{pattern}`: write the alternatives in one pair")
        if depth < 0:
            break
    if depth:
        raise PatternError(f"unbalanced braces in `{pattern}`")


def _alternatives(pattern: str) -> Iterator[str]:
    pieces = _BRACES.split(pattern)  # literal, inside, literal, inside, ... literal
    options = [
        [word.strip() for word in piece.split(",")] if inside else [piece]
        for piece, inside in zip(pieces, itertools.cycle((False, True)))
    ]
    return map("".join, itertools.product(*options))


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


class PatternMap(Generic[T]):
    """Patterns with a value each; finds those that overlap another without comparing it with all of them."""

    def __init__(self) -> None:
        self._root: dict[Any, Any] = {}  # segment -> node; under None the values of the patterns that end here

    def add(self, pattern: Segments, value: T) -> None:
        """Keep ``value`` under ``pattern``, beside those that are there."""
        node = self._root
        for segment in pattern:
            node = node.setdefault(segment, {})
        node.setdefault(None, []).append(value)

    def overlapping(self, pattern: Segments) -> Iterator[T]:
        """The values of every pattern that ``overlap``s with this one."""
        nodes = [self._root]
        for segment in pattern:
            nodes = [child for node in nodes for child in _children(node, segment)]
        for node in nodes:
            yield from node.get(None, ())


def _children(node: dict[Any, Any], segment: str) -> list[dict[Any, Any]]:
    if segment == "*":
        return [child for key, child in node.items() if key is not None]
    return [node[key] for key in (segment, "*") if key in node]
