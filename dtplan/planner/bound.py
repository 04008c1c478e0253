"""A bound plan: what a plan means for one model at given degrees. Data, deterministic, with a JSON form.

Modules that are built alike are bound once: an entry's ``names`` are all the modules that it stands for.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dtplan.plan.spec import Layout
from dtplan.planner.stored import Stored
from dtplan.te.norm import Norm

Op = Literal["keep", "copy", "reduce", "gather", "scatter", "gather_whole", "slice", "place"]
SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundMove:
    """A change of layout of one input (``value``: position, ``name``: argument) or output (position or None)."""

    value: int | None
    name: str | None = None
    op: Op
    src: Layout
    dst: Layout
    global_shape: bool = False
    length: int | None = None
    """The global size of the dim that is cut, where it is known and parts may differ in size."""
    last: int | None = None
    """Of a copy: the gradient of so many last features only is summed."""
    inside: bool = False
    """Done by a fused layer itself, on its own communicator; nothing is put around the module."""
    units: int | None = None
    """Of a slice: the units of a group, where the dim holds groups of them and each group is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTensor:
    """A parameter or buffer: its global shape, its placement on tp, and the largest local shape (rank 0's)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: Layout
    local_shape: tuple[int, ...]
    sections: tuple[int, ...] = ()
    """Rows of the parts of the dim that is cut, where each part is cut by itself."""
    copies: tuple[int, ...] = ()
    """How many neighbouring ranks keep the rows of each of ``sections``; () is one for every part."""
    unit: str | None = None
    grad: Literal["complete", "sum"] = "complete"
    """Whether the gradient of what several ranks keep, the whole tensor or parts of it, is summed over them."""
    once: bool = False
    """A bias that is added to unreduced partial sums: one rank adds it."""
    trainable: bool = True
    buffer: bool = False
    tied_to: str | None = None

    @property
    def shared(self) -> bool:
        """Whether several ranks keep the same rows of a tensor that is cut."""
        return any(copies > 1 for copies in self.copies)

    def stored(self, name: str, tp: int) -> Stored:
        """How the dim that is cut in sections is put together; ``name`` is the tensor's full name."""
        return Stored.of(name, self.sections, self.placement.dim or 0, tp, self.copies)

    def summed(self, tp: int) -> dict[int, tuple[tuple[int, int, int], ...]]:
        """What of a rank's gradient is summed over how many ranks, as ``(dim, start, size)``; () is all of it."""
        if self.grad != "sum" or not self.trainable:
            return {}
        if self.placement.dim is None:
            return {tp: ()}
        spans: dict[int, tuple[tuple[int, int, int], ...]] = {}
        for start, size, copies in self.stored("", tp).spans():
            if copies > 1:
                spans[copies] = (*spans.get(copies, ()), (self.placement.dim, start, size))
        return spans

    def summed_elements(self, tp: int) -> dict[int, int]:
        """Of how many elements of a rank's part the gradient is summed, by the number of ranks."""
        own = math.prod(self.local_shape)
        return {
            ranks: sum(size * own // self.local_shape[dim] for dim, _, size in spans) if spans else own
            for ranks, spans in self.summed(tp).items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundModule:
    """One rule at work on the modules ``names``, which are alike; ``pattern`` spells them all."""

    pattern: str
    names: tuple[str, ...]
    kind: str
    style: str | None
    rule: str
    tensors: tuple[BoundTensor, ...] = ()
    inputs: tuple[BoundMove, ...] = ()
    outputs: tuple[BoundMove, ...] = ()
    block: str | None = None
    """The pattern of the parallel-residual block whose input this module reads."""
    shared: BoundMove | None = None
    """Of a parallel-residual block: how its norms are given the whole input, once for all of them."""
    localize: tuple[str, ...] = ()
    per_unit: tuple[tuple[str, int], ...] = ()
    """Numbers per unit of which several ranks share one, and how many ranks share it."""
    reads: tuple[str, ...] = ()
    """Modules below whose parameters the forward reads without calling them."""
    norm: Norm | None = None
    """Of a norm over a dim that is cut: what it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTe:
    """A TransformerEngine layer that the plan declares, below each of ``names``."""

    layer: str
    under: str
    names: tuple[str, ...]
    parts: Mapping[str, str]
    """Role -> module path below the name."""
    activation: str | None
    approximate_gelu: bool
    rule: str

    def __str__(self) -> str:
        return f"{self.under}: {self.layer} <- {', '.join(self.parts.values())}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundUnit:
    """A unit's count in this model's config and the degrees up to 64 that it allows."""

    name: str
    field: str
    count: int
    indivisible: str
    allows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPlan:
    """Everything that applying, proving, loading, measuring and drawing need to know."""

    plan: str
    digest: str
    architecture: str
    degrees: Mapping[str, int]
    """Sizes of the axes ``replicate``, ``shard``, ``tp``."""
    sequence_parallel: bool
    loss_parallel: bool
    residual: Layout
    width: int
    """Features of the residual stream."""
    units: tuple[BoundUnit, ...]
    modules: tuple[BoundModule, ...]
    ties: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, tuple[str, ...]]
    fsdp_units: tuple[str, ...]
    fsdp: Mapping[str, Any]
    te: tuple[BoundTe, ...] = ()
    """Fused layers that the plan declares; `dtplan.te` chooses among them."""

    @property
    def tp(self) -> int:
        """The tensor parallel degree."""
        return self.degrees["tp"]

    def tensors(self) -> Iterator[tuple[BoundModule, str, BoundTensor]]:
        """Every parameter and buffer by its full name; a tied one under each of its names."""
        for module in self.modules:
            for name in module.names:
                for tensor in module.tensors:
                    yield module, f"{name}.{tensor.name}" if name else tensor.name, tensor

    def parameter_bytes(self) -> tuple[int, int]:
        """Bytes of the parameters of the whole model, and of the largest rank after tp and shard; ties once."""
        whole = local = 0
        for module in self.modules:
            for tensor in module.tensors:
                if not tensor.buffer and tensor.tied_to is None:
                    size = len(module.names) * dtype_bytes(tensor.dtype)
                    whole += size * math.prod(tensor.shape)
                    local += size * math.prod(self.shard_shape(tensor))
        return whole, local

    def sharded_share(self) -> float:
        """The share of parameter bytes that tp cuts; ties count once."""
        whole = cut = 0
        for module in self.modules:
            for tensor in module.tensors:
                if not tensor.buffer and tensor.tied_to is None:
                    number = len(module.names) * math.prod(tensor.shape) * dtype_bytes(tensor.dtype)
                    whole += number
                    cut += number if tensor.placement.word == "S" else 0
        return cut / whole if whole else 0.0

    def shard_shape(self, tensor: BoundTensor) -> tuple[int, ...]:
        """The shape that rank 0 keeps after FSDP2 cut dim 0 over the ``shard`` axis."""
        if tensor.buffer or not tensor.local_shape:
            return tensor.local_shape
        return (-(-tensor.local_shape[0] // self.degrees["shard"]), *tensor.local_shape[1:])

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data; equal bound plans give equal bytes through ``json_text``."""
        data = _jsonable(dataclasses.asdict(self, dict_factory=dict))
        return {"schema_version": SCHEMA_VERSION, **data}

    def json_text(self) -> str:
        """``to_json`` as text, sorted and indented."""
        return json.dumps(self.to_json(), indent=2, sort_keys=True, ensure_ascii=True) + "\n"


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype by its torch name."""
    sizes = {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "int64": 8,
        "int32": 4,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
    return sizes[dtype]


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"word", "dim"}:
            return str(Layout(value["word"], value["dim"]))
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value
