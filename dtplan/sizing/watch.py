"""Count what a step does, operator by operator: bytes that are alive, matrix work, bytes read and written.

Works on meta tensors, which have shapes and storages without memory, and on real ones: a storage counts from the
operator that makes it until it is freed, which on CUDA is when the caching allocator counts it. What kernels allocate
inside is invisible here; the known ones are added (``_inside``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["matrix", "fp8", "attention", "collective", "other", "merged"]
"""``merged``: other kernels that a compiler put together (`dtplan.sizing.merged`)."""
_BLOCK = 512
"""Bytes to which the CUDA caching allocator rounds (torch 2.11 to 2.14)."""

aten = torch.ops.aten
_next_node: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number of the autograd node that is made next in this thread."""
_MATRIX = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten._scaled_mm: 0}
"""Matrix products -> which argument the left factor is."""
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ATTENTION = {
    # operator -> which argument the query is, and products of [queries, keys] x features
    aten._scaled_dot_product_flash_attention: (0, 2),
    aten._scaled_dot_product_efficient_attention: (0, 2),
    aten._scaled_dot_product_flash_attention_backward: (1, 5),
    aten._scaled_dot_product_efficient_attention_backward: (1, 5),
}


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel: its floating-point operations, and the bytes that it reads and writes."""

    kind: Kind
    name: str
    flops: int
    bytes: int
    """Of a collective: of the whole tensor."""
    module: str = ""
    """The module of the model that it is a part of."""


@dataclass(slots=True)
class Segment:
    """A stretch of a step: bytes alive at its begin, at its end and at most, and its kernels."""

    phase: str
    name: str
    start: int
    end: int = 0
    peak: int = 0
    ops: list[Op] = field(default_factory=list)

    @property
    def above(self) -> int:
        """How far bytes rise above the begin."""
        return self.peak - self.start

    @property
    def change(self) -> int:
        """Bytes that are alive at the end and were not at the begin."""
        return self.end - self.start


class Watch(TorchDispatchMode):
    """Follows storages that are made while it is on; ``known`` tensors were there before and do not count."""

    def __init__(self, known: Iterable[Tensor] = (), *, device: str = "meta", block: int = _BLOCK) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.segments: list[Segment] = []
        self._device, self._block = device, block
        self._held: dict[int, int] = {}
        self._inside: list[tuple[str, int]] = []
        self._stretches: list[tuple[int, int, str]] = []
        """First node, last node, module: the innermost first."""
        for tensor in known:
            self._follow(tensor, counted=False)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and saying so costs more than an operator on meta tensors

    def begin(self, phase: str, name: str) -> None:
        """A new segment."""
        self.end()
        self.segments.append(Segment(phase, name, self.live, peak=self.live))

    def end(self) -> None:
        """The segment is over."""
        if self.segments:
            self.segments[-1].end = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype is torch.bool  # a meta tensor has no values: whatever is asked for holds
        if func is _WAIT and args[0].is_meta:
            return args[0]  # as it does on devices; on meta it would make another tensor
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        fresh = [self._follow(t) for t in made]
        segment = self.segments[-1] if self.segments else None
        if segment is not None:
            inside = _inside(func, args)
            segment.peak = max(segment.peak, self.live + inside)
            if (any(fresh) or func._schema.is_mutable) and func is not _WAIT:
                read = read_by(func, args, kwargs)
                segment.ops.append(dataclasses.replace(_op(func, args, kwargs, read, made), module=self._module()))
                self.ran(segment.ops[-1], read, made, inside)
        return out

    def ran(self, op: Op, read: list[Tensor], written: list[Tensor], inside: int) -> None:
        """An operator ran: for those who want to know what it read and wrote, and allocated for itself."""

    def _follow(self, tensor: Tensor, *, counted: bool = True) -> bool:
        """Whether the storage is new."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self._device:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return False
        size = -(-storage.nbytes() // self._block) * self._block if counted else 0
        self._held[key] = size
        self.live += size
        weakref.finalize(storage, self._freed, key)
        return True

    def _freed(self, key: int) -> None:
        self.live -= self._held.pop(key)

    def named(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> list[Any]:
        """Let operators know the innermost of ``modules`` that they are a part of; removed by the handles."""
        handles: list[Any] = []
        for name, module in modules:
            entering = functools.partial(self._entered, name)
            handles.append(module.register_forward_pre_hook(entering, prepend=True))
            handles.append(module.register_forward_hook(self._left))
        return handles

    def _entered(self, name: str, _module: Any, _args: Any) -> None:
        self._inside.append((name, _next_node()))

    def _left(self, _module: Any, _args: Any, _out: Any) -> None:
        name, first = self._inside.pop()
        self._stretches.append((first, _next_node(), name))

    def _module(self) -> str:
        """In forward the module that runs, in backward the one whose forward made the node; numbers count nodes."""
        if self._inside:
            return self._inside[-1][0]
        node: Any = torch._C._current_autograd_node()  # none outside backward
        if node is None:
            return ""
        number = node._sequence_nr()
        return next((name for first, last, name in self._stretches if first <= number < last), "")

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP2 gives storages back, and takes them again, by their size."""
        key = storage._cdata
        if key in self._held:
            before, self._held[key] = self._held[key], -(-storage.nbytes() // self._block) * self._block
            self.live += self._held[key] - before
            if self.segments:
                self.segments[-1].peak = max(self.segments[-1].peak, self.live)


@contextmanager
def watched_storages(watch: Watch) -> Iterator[None]:
    """Let ``watch`` know of storages that change their size, as FSDP2's do; one at a time in a process."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        watch.resized(storage)
        return storage

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def watched_units(watch: Watch, units: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[None]:
    """Begin a segment wherever one of the ``units`` begins or ends, forward and backward."""
    handles = []

    def entering(name: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            if watch.segments[-1].name == "before":  # the others' inputs are outputs of units
                _on_gradient(watch, (args, kwargs), ("backward", "before"))
            watch.begin("forward", name)

        return hook

    def leaving(name: str) -> Any:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            watch.begin("forward", "after")
            _on_gradient(watch, out, ("backward", name))

        return hook

    try:
        for name, unit in units:
            handles.append(unit.register_forward_pre_hook(entering(name), with_kwargs=True))
            handles.append(unit.register_forward_hook(leaving(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def local_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """What a rank has of each."""
    for tensor in tensors:
        yield tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _on_gradient(watch: Watch, value: Any, to: tuple[str, str]) -> None:
    """Begin the segment ``to`` when the gradient of the first differentiable tensor in ``value`` is there."""
    first = next((t for t in tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad), None)
    if first is not None:
        first.register_hook(lambda _grad: watch.begin(*to))


def read_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator reads; of some it only takes the shape."""
    name = func._schema.name.partition("::")[2]
    if name.startswith("new_") or name.endswith("_like"):
        return []
    return [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]


def _op(func: Any, args: Any, kwargs: Any, read: list[Tensor], made: list[Tensor]) -> Op:
    size = sum(bytes_of(t) for t in (*read, *made))
    packet, name = func._overloadpacket, func._schema.name.partition("::")[2]
    if packet is aten._grouped_mm:  # of experts: each row is in one group
        return Op("matrix", name, 2 * args[0].numel() * made[0].shape[-1], size)
    if packet in _MATRIX:
        left = args[_MATRIX[packet]]
        kind: Kind = "fp8" if packet is aten._scaled_mm else "matrix"
        return Op(kind, name, 2 * left.shape[-1] * made[0].numel(), size)
    if packet in _ATTENTION:
        at, products = _ATTENTION[packet]
        query, key = args[at], args[at + 1]
        causal = _argument(func, args, kwargs, "is_causal")
        work = products * 2 * query.numel() * key.shape[2] // (2 if causal else 1)
        return Op("attention", name, work, size)
    if func.namespace == "_c10d_functional":
        return Op("collective", name, 0, max(t.numel() * t.element_size() for t in (*read, *made)))
    free = name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
    return Op("other", name, 0, 0 if free else size)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else (kwargs or {}).get(name, argument.default_value)
    return None


def bytes_of(tensor: Tensor) -> int:
    """What is read of a tensor: one that is expanded has less."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    real = math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s)
    return int(real * tensor.element_size())


def _inside(func: Any, args: Any) -> int:
    """Bytes that a kernel allocates for itself (FlashAttention-2's backward: dq in float32, a sum for each row)."""
    if func._overloadpacket is not aten._scaled_dot_product_flash_attention_backward:
        return 0
    query, key = args[1], args[2]
    batch, heads, rows, features = query.shape
    rows, features = -(-rows // 128) * 128, -(-features // 32) * 32
    expanded = 2 * math.prod((batch, heads, *key.shape[2:])) * key.element_size() if key.shape[1] != heads else 0
    return int(4 * batch * heads * rows * (features + 1)) + expanded
