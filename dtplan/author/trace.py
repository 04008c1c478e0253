"""One run of a block, watched: which values each matrix product reads, and where branches join the stream.

Nothing is read from names. Every tensor carries the matrix products that it comes from with no other in between
(``last``); a value that comes from the block's input alone, through norms, masks and shifts, is the stream.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Last = frozenset[int]
"""Matrix products by number; the versions of the stream are -1, -2, ... (the n-th after n - 1 joins)."""
STREAM = -1


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor that is a parameter, or a part of one: its name, and for each of the parameter's dims the indices."""

    name: str
    at: tuple[Tensor, ...]

    def varies(self, along: int) -> int | None:
        """The parameter's dim that is counted along a dim of the view; None where it is not just one."""
        if self.at[0].dim() == 0 or self.at[0].shape[along] < 2:
            return None
        moving = [d for d, index in enumerate(self.at) if bool((index.diff(dim=along) != 0).any())]
        return moving[0] if len(moving) == 1 else None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A matrix product of a parameter and an activation, in which the activation's dim ``along`` is summed over."""

    number: int
    parameter: str
    dim: int | None
    """The parameter's dim that is summed over."""
    read: Tensor
    along: int
    last: Last
    """Of what it reads."""
    out: Tensor
    inside: tuple[str, ...]
    """The modules that were running, from the outermost to the innermost; ``""`` is the block."""


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """An addition of a branch to the stream."""

    branch: Last
    version: Last
    """Of the stream to which it is added."""
    inside: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A module's forward: what went in and out, and what that came from."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    last: Last
    inside: tuple[str, ...]


@dataclass(slots=True)
class Trace:
    """All of a block's run."""

    products: list[Product] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    calls: dict[str, Call] = field(default_factory=dict)
    """The first call of every module, by its name below the block, in the order in which they began."""
    times: Counter[str] = field(default_factory=Counter)
    """How often each module was called."""
    last_of: dict[int, Last] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    """Every tensor, so that no id is used twice."""

    def last(self, tensor: Tensor) -> Last:
        """Where a tensor comes from; empty for what is neither of the stream nor of a product."""
        return self.last_of.get(id(tensor), frozenset())


_VIEWS = {
    "__getitem__", "select", "narrow", "chunk", "split", "unbind", "transpose", "t", "permute", "view", "reshape",
    "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "index_select", "swapaxes", "movedim",
}  # fmt: skip
_SAME = {"to", "type", "type_as", "float", "double", "contiguous", "clone", "detach"}
_TRANSPOSED = {torch.Tensor.T.__get__: -1, torch.Tensor.mT.__get__: -1}  # type: ignore[attr-defined]
_FRESH = {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"}
"""They read a tensor's shape only."""
_SUMS = {torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.add_}
_SUMS |= {torch.Tensor.__iadd__, operator.add}
_MATMULS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm}
_MATMULS |= {torch.Tensor.bmm}
_PLUS_MATMULS = {torch.addmm, torch.baddbmm, torch.Tensor.addmm, torch.Tensor.baddbmm}


class _Recorder(TorchFunctionMode):
    def __init__(self, trace: Trace, parameters: Mapping[int, View], stack: list[str]) -> None:
        super().__init__()
        self.trace, self.views, self.stack = trace, dict(parameters), stack
        self.joins = 0
        self.stream: tuple[int, int] = (0, 0)
        """Elements and features of the stream."""

    def begin(self, stream: Tensor) -> None:
        """``stream`` is the block's input."""
        self.trace.last_of[id(stream)] = frozenset({STREAM})
        self.stream = stream.numel(), stream.shape[-1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [*tensors_in([*args, *kwargs.values()])]
        self.trace.kept += [out, *tensors]
        if (view := self._view(func, args, kwargs)) is not None:
            self._note_views(out, view)
            return out
        product = self._product(func, args, kwargs, out)
        last: Last
        if product is not None:
            self.trace.products.append(product)
            last = frozenset({product.number})
        elif getattr(func, "__name__", "") in _FRESH:
            last = frozenset()
        elif func in _SUMS and (joined := self._join(args, out)) is not None:
            last = joined
        else:
            last = frozenset().union(*(self.trace.last(t) for t in tensors if t.is_floating_point()))
        for result in _changed(func, args, out):
            if last and result.is_floating_point():
                self.trace.last_of[id(result)] = last
        return out

    # --- parameters and their parts

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The view, or the tuple of them, that ``func`` makes of a parameter."""
        source = self.views.get(id(args[0])) if args and isinstance(args[0], Tensor) else None
        if source is None:
            return None
        name = getattr(func, "__name__", "")
        if func in _TRANSPOSED or name in _VIEWS:
            made = [func(index, *args[1:], **kwargs) for index in source.at]
            if isinstance(made[0], Tensor):
                return View(source.name, tuple(made))
            return tuple(View(source.name, parts) for parts in zip(*made, strict=True))
        return source if name in _SAME else None

    def _note_views(self, out: Any, views: Any) -> None:
        pairs = [(out, views)] if isinstance(views, View) else zip(out, views, strict=True)
        for tensor, view in pairs:
            self.views[id(tensor)] = view

    # --- matrix products

    def _product(self, func: Any, args: Any, kwargs: Any, out: Any) -> Product | None:
        found = self._operands(func, args, kwargs)
        if found is None:
            return None
        read, along, view, summed = found
        return Product(
            number=len(self.trace.products) + 1,
            parameter=view.name,
            dim=view.varies(summed),
            read=read,
            along=along,
            last=self.trace.last(read),
            out=out,
            inside=tuple(self.stack),
        )

    def _operands(self, func: Any, args: Any, kwargs: Any) -> tuple[Tensor, int, View, int] | None:
        """What a product reads and along which dim, the parameter, and the view's dim that is summed over."""
        if func is torch.einsum:
            return self._einsum(list(args))
        if func is F.linear:
            a, w = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs["weight"]
            return (a, -1, self.views[id(w)], -1) if id(w) in self.views else None
        given = args[1:] if func in _PLUS_MATMULS else args if func in _MATMULS else ()
        return self._of_two(*given[:2]) if len(given) > 1 else None

    def _of_two(self, a: Tensor, b: Tensor) -> tuple[Tensor, int, View, int] | None:
        if id(b) in self.views:
            return a, -1, self.views[id(b)], (-2 if b.dim() > 1 else -1)
        if id(a) in self.views:
            return b, (-2 if b.dim() > 1 else -1), self.views[id(a)], -1
        return None

    def _einsum(self, given: list[Any]) -> tuple[Tensor, int, View, int] | None:
        operands = [t for t in given[1:] if isinstance(t, Tensor)]
        if len(operands) != 2 or not isinstance(given[0], str) or "." in given[0] or "->" not in given[0]:
            return None
        inputs, _, result = given[0].replace(" ", "").partition("->")
        letters = inputs.split(",")
        summed = [c for c in letters[0] if c in letters[1] and c not in result]
        for w, a in ((0, 1), (1, 0)):
            if id(operands[w]) in self.views and len(summed) == 1:
                along, of_view = letters[a].index(summed[0]), letters[w].index(summed[0])
                return operands[a], along, self.views[id(operands[w])], of_view
        return None

    # --- the stream

    def _join(self, args: Any, out: Any) -> Last | None:
        """The new version of the stream, where ``args`` are the stream and a branch."""
        if len(args) < 2 or not all(isinstance(a, Tensor) for a in args[:2]) or not isinstance(out, Tensor):
            return None
        if (out.numel(), out.shape[-1] if out.dim() else 0) != self.stream:
            return None
        a, b = (self.trace.last(t) for t in args[:2])
        stream, branch = (a, b) if is_stream(a) else (b, a)
        if not is_stream(stream) or not branch or is_stream(branch):
            return None
        self.joins += 1
        self.trace.joins.append(Join(branch=branch, version=stream, inside=tuple(self.stack)))
        return frozenset({STREAM - self.joins})


def is_stream(last: Last) -> bool:
    """Whether a value comes from the stream alone."""
    return bool(last) and all(number < 0 for number in last)


def _changed(func: Any, args: Any, out: Any) -> Iterator[Tensor]:
    yield from tensors_in([out])
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    if in_place and args and isinstance(args[0], Tensor):
        yield args[0]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor of nested lists, tuples and mappings, and of a model's output."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor of floats in an output or in arguments."""
    return next((t for t in tensors_in([value]) if t.is_floating_point()), None)


def views_of(module: nn.Module) -> dict[int, View]:
    """Every parameter of ``module``, as a view of itself."""
    found = {}
    for name, parameter in module.named_parameters():
        grids = torch.meshgrid(*(torch.arange(n) for n in parameter.shape), indexing="ij") if parameter.dim() else ()
        found[id(parameter)] = View(name, tuple(grids))
    return found


def trace_block(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """Run ``block`` and watch it; its first tensor of floats is the stream."""
    trace, stack = Trace(), [""]
    stream = first_tensor([args, dict(kwargs)])
    assert stream is not None
    recorder = _Recorder(trace, views_of(block), stack)
    recorder.begin(stream)
    with _calls_noted(block, trace, stack), recorder:
        out = block(*args, **kwargs)
    trace.calls[""] = Call("", args, kwargs, out, frozenset({STREAM}), ())
    return trace


@contextmanager
def _calls_noted(block: nn.Module, trace: Trace, stack: list[str]) -> Iterator[None]:
    began: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            began.append((args, kwargs))
            trace.times[name] += 1
            trace.calls.setdefault(name, Call(name, args, kwargs, None, frozenset(), tuple(stack)))
            stack.append(name)

        return hook

    def leave(_module: nn.Module, _args: Any, _kwargs: Any, out: Any) -> None:
        name = stack.pop()
        args, kwargs = began.pop()
        known = trace.calls[name]
        if known.out is None:
            trace.kept += [args, kwargs, out]
            floats = [t for t in tensors_in([args, kwargs]) if t.is_floating_point()]
            last: Last = frozenset().union(*(trace.last(t) for t in floats))
            trace.calls[name] = Call(name, args, kwargs, out, last, tuple(stack))

    handles = []
    for name, module in block.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
