"""What a plan says, as data: frozen classes with no behaviour beyond spelling themselves.

Vocabulary. A layout is how one tensor lies on the tp axis: ``R`` (whole on every rank), ``S(d)`` (cut along
dim d), ``P`` (each rank holds a term of the sum). ``residual`` and ``logits`` are names for layouts that the
switches ``sequence_parallel`` and ``loss_parallel`` choose.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

VERSION = 1


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in a plan file; line and column count from 1."""

    file: str
    line: int
    column: int
    source: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout by letter (``R``, ``S``, ``P``) or by name (``residual``, ``logits``)."""

    word: str
    dim: int | None = None

    def __str__(self) -> str:
        return f"S({self.dim})" if self.word == "S" else self.word


R = Layout("R")
P = Layout("P")
RESIDUAL = Layout("residual")
LOGITS = Layout("logits")


def S(dim: int) -> Layout:  # noqa: N802 - spelled as in the plan language and in torch's own repr
    """The layout that is cut along ``dim``; -1 is the last dim."""
    return Layout("S", dim)


SEQUENCE = S(1)
"""The sequence dim of [batch, sequence, hidden], cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of layout at a module's edge; ``src`` None means the rule's default."""

    src: Layout | None = None
    dst: Layout | None = None
    """None keeps the value as it is."""
    global_shape: bool = False
    """Hand out a DTensor, so that code outside sees the global shape of a value that is cut."""
    unit: str | None = None
    """What is cut where the dim holds groups of these units, one after another (BLOOM's batch x heads)."""
    sum_grad_of_last: str | None = None
    """A config field n: only the gradient of the last n features is summed over ranks (MLA's rope slice)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of a fused dim: cut in ``unit``s, or left whole with its gradient summed.

    It has ``unit``'s count, or ``count``, units; each is as wide as the config field ``width`` says. All
    sections without a ``width`` have the same.
    """

    unit: str | None = None
    count: int | None = None
    width: str | None = None
    whole: bool = False
    grad: Literal["sum", "complete"] | None = None


Indivisible = Literal["error", "uneven", "replicate", "replicate_kv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What may be cut: ``fields`` are config fields (the first that is set gives the count)."""

    name: str
    fields: tuple[str, ...]
    indivisible: Indivisible = "error"
    at: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to one module, parameter or buffer path.

    ``path`` is a tuple of segments, each literal or ``*``; braces are expanded before. ``inputs`` pairs a
    forward argument (name or position) with a move, ``outputs`` a position in the returned tuple (None:
    the returned tensor itself, or the first of a tuple).
    """

    path: tuple[str, ...]
    style: str | None = None
    shard: int | None = None
    sections: tuple[Section, ...] = ()
    unit: str | None = None
    grad: Literal["sum", "complete"] | None = None
    once: bool = False
    """A whole parameter that is added to an unreduced sum: one rank adds it."""
    like: str | None = None
    """The class whose style applies to a subclass that computes more, row by row."""
    inputs: tuple[tuple[str | int, Move], ...] = ()
    outputs: tuple[tuple[int | None, Move], ...] = ()
    parallel_residual: str | None = None
    """The input that a block adds to the unreduced sum of its branches."""
    localize: tuple[str, ...] = ()
    localize_per: tuple[tuple[str, str], ...] = ()
    """Numbers for each unit, and the unit: divided where several ranks share one."""
    reads: tuple[str, ...] = ()
    """Modules below whose parameters this module's forward reads itself."""
    below: bool = False
    """The rule holds for every module below as well."""
    optional: bool = False
    override: bool = False
    at: Place

    @property
    def pattern(self) -> str:
        """The path as text."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeLayer:
    """One TransformerEngine layer and the modules that it replaces, named below ``under``."""

    under: tuple[str, ...]
    layer: str
    norm: str | None = None
    linears: tuple[str, ...] = ()
    linear: str | None = None
    gate: str | None = None
    up: str | None = None
    down: str | None = None
    attention: str | None = None
    activation: str | None = None
    approximate_gelu: bool = False
    at: Place

    @property
    def parts(self) -> dict[str, str]:
        """Role -> module path below ``under``."""
        named = {r: getattr(self, r) for r in ("norm", "linear", "gate", "up", "down", "attention")}
        parts = {role: path for role, path in named.items() if path is not None}
        return parts | {f"linears[{i}]": path for i, path in enumerate(self.linears)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    """How FSDP2 wraps: which modules are units, when to free them, in which precision they compute."""

    units: tuple[tuple[str, ...], ...] = ()
    reshard_after_forward: bool | int = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    at: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Parameters that are one tensor when the model ties them."""

    names: tuple[str, ...]
    at: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Rules that hold only where every config field in ``when`` has the given value."""

    when: Mapping[str, Any]
    rules: tuple[Rule, ...] = ()
    te: tuple[TeLayer, ...] = ()
    ties: tuple[Tie, ...] = ()
    at: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole plan. Two plans that say the same have the same ``digest``, wherever they were written."""

    name: str
    serves: tuple[str, ...] = ()
    units: Mapping[str, Unit]
    sequence_parallel: Layout = SEQUENCE
    """The residual stream's layout under sequence parallelism, ``R`` where it cannot be cut; otherwise it is ``R``."""
    rules: tuple[Rule, ...]
    variants: tuple[Variant, ...] = ()
    ties: tuple[Tie, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module path -> other names of the same module, in other versions and in checkpoints."""
    te: tuple[TeLayer, ...] = ()
    fsdp: Fsdp = Fsdp()
    files: tuple[str, ...] = ()
    """The file itself and those that it extends, nearest first."""

    @property
    def cuts_stream(self) -> bool:
        """Whether sequence parallelism is possible."""
        return self.sequence_parallel != R

    @property
    def digest(self) -> str:
        """Hexadecimal sha256 of what the plan says: not its name, its files, or an order without meaning."""
        told = [f.name for f in fields(self) if f.name not in ("name", "files")]
        said = {name: _said(getattr(self, name), name) for name in told}
        return hashlib.sha256(_text(said).encode()).hexdigest()


_ORDERED = {"path", "under", "sections", "fields", "linears", "names"}
"""Fields whose order says something; every other list is read as a set."""


def _said(value: Any, name: str) -> Any:
    """The value of the field ``name`` as JSON without places, in a canonical order."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _said(getattr(value, f.name), f.name) for f in fields(value) if f.name != "at"}
    if isinstance(value, Mapping):
        return {key: _said(item, name) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_said(item, "path") for item in value]
        if name == "te":  # a module goes into the first layer below a path that takes it
            return sorted(items, key=lambda layer: _text(layer["under"]))
        return items if name in _ORDERED else sorted(items, key=_text)
    return value


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True)
