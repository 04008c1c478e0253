"""Put fused layers into a model: their modules, their parameters, and what is left of the modules they replace.

A norm that is fused hands its input on through a mailbox, and returns NaNs of the right shape: whoever reads it besides
the fused layer turns the loss into NaN, and does not train on something else. The fused layer runs when the region that
reads the norm is entered; the region's own linear layers then hand its parts out.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtplan._errors import ApplyError
from dtplan.plan.spec import R
from dtplan.planner import collectives as coll
from dtplan.planner.bound import BoundMove
from dtplan.planner.stored import Part, Stored
from dtplan.planner.styles import Forward, Tp, replaced
from dtplan.te import attention
from dtplan.te.engine import Engine
from dtplan.te.fused import Fused, FusedTensor
from dtplan.te.precision import scale_first_gradients
from dtplan.te.tokens import Tokens


@dataclass(slots=True)
class Mailbox:
    """The input of a norm on its way to the fused layer, and the NaNs that went out in its place."""

    name: str
    value: Tensor | None = None
    nans: Tensor | None = None
    _nan: Tensor | None = field(default=None, repr=False)

    def put(self, x: Tensor) -> Tensor:
        """Keep ``x``; what the norm returns instead."""
        self.value, self.nans = x, self.nothing(x, x.shape)
        return self.nans

    def take(self, passed: object, reader: str) -> Tensor:
        """What the norm was given, if ``passed`` is what it returned.

        Raises:
            ApplyError: the region reads something else, so fusing the norm into it is wrong.
        """
        x, nans, self.value, self.nans = self.value, self.nans, None, None
        if x is None or not isinstance(passed, Tensor) or passed is not nans:
            raise ApplyError(
                f"{reader} does not read what {self.name} returns, so the norm cannot be fused into it: take the "
                "layer out of the plan's `te`, or use te='off'"
            )
        return x

    def nothing(self, like: Tensor, shape: Iterable[int]) -> Tensor:
        """NaNs of a shape, which take no memory."""
        if self._nan is None or self._nan.device != like.device or self._nan.dtype != like.dtype:
            self._nan = like.new_full((), float("nan")).detach()
        return self._nan.expand(*shape)


class FusedNorm(nn.Module):
    """In place of a norm that became a part of a fused layer."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self.mailbox = mailbox

    def forward(self, x: Tensor) -> Tensor:
        """Hand ``x`` on to the fused layer."""
        return self.mailbox.put(x)


class Parts:
    """The output of a fused layer, of which each layer that it replaces hands out a part."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.whole: Tensor | None = None
        self._split: tuple[Tensor, ...] = ()

    def put(self, whole: Tensor | None) -> None:
        """The output of this call; None: there is none."""
        self.whole, self._split = whole, ()

    def part(self, i: int) -> Tensor:
        """The columns of layer ``i``; their gradients are put side by side in one tensor.

        Autograd does so for a split. A compiler does it in the kernels that compute the gradients, if it sees slices.
        """
        assert self.whole is not None
        if torch.compiler.is_compiling():
            return self.whole.narrow(-1, self.starts[i], self.sizes[i])
        if not self._split:
            self._split = self.whole.split(self.sizes, -1)
        return self._split[i]


class Outlet(nn.Module):
    """In place of a linear layer that became a part of a fused one: hands out its part of the output."""

    def __init__(self, parts: Parts, number: int) -> None:
        super().__init__()
        self.parts, self.number = parts, number

    def forward(self, _: Tensor) -> Tensor:
        """The part that the fused layer computed."""
        return self.parts.part(self.number)


def install(
    model: nn.Module,
    fused: Iterable[Fused],
    tp: Tp,
    engine: Engine,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    more: Mapping[str, dict[str, Any]],
) -> None:
    """Replace modules in place; ``tp.stored`` learns how the new parameters are put together.

    ``group``: the tp ranks, by which TransformerEngine's layers do their collectives. ``more``: further arguments of
    these layers, by name.
    """
    for layer in fused:
        if layer.layer == "DotProductAttention":
            attention.use(model.get_submodule(layer.name), engine)
        else:
            options = {"tp_group": group, **more.get(layer.name, {})}
            _Installer(model, layer, tp, engine, dtype, options).run()


class _Installer:
    def __init__(
        self, model: nn.Module, layer: Fused, tp: Tp, engine: Engine, dtype: torch.dtype, parallel: dict[str, Any]
    ) -> None:
        self.model, self.layer, self.tp, self.engine, self.dtype = model, layer, tp, engine, dtype
        self.parallel = parallel
        # the residual stream is cut where the norm's own gradient is a partial sum, or a row layer scatters
        cuts = [move for move in (*layer.inputs, *layer.outputs) if move.inside and move.op in ("gather", "scatter")]
        dims = {layout.dim for move in cuts for layout in (move.src, move.dst) if layout.dim is not None}
        self.tokens = Tokens(tp.group, *dims) if cuts else Tokens(None)

    def run(self) -> None:
        """One layer."""
        parameters = {tensor.bound.name: self._parameter(tensor) for tensor in self.layer.tensors}
        module: Any = self._module()
        made = [name for name, _ in module.named_parameters()]
        if set(made) != set(parameters):
            raise ApplyError(
                f"{self.layer.name}: TransformerEngine {self.engine.version} gives {self.layer.layer} the parameters "
                f"{', '.join(made)}; {', '.join(parameters)} were expected: use te='off' and report it"
            )
        module._parameters.update(parameters)
        if self.layer.norm is not None:
            mailbox = Mailbox(self.layer.norm)
            _set(self.model, self.layer.norm, FusedNorm(mailbox))
            self._enter(module, mailbox)
        elif self.layer.row is not None:
            module.forward = self.tokens.row(module.run)
        else:
            module.forward = on_a_copy(module)
        _set(self.model, self.layer.name, module)

    def _enter(self, module: Any, mailbox: Mailbox) -> None:
        """Run the fused layer where its region is entered."""
        layer = self.layer
        assert layer.region is not None
        if layer.layer == "LayerNormMLP":
            module.forward = taking(self.tokens.same(module.run), mailbox, layer.region)
            return
        region = self.model.get_submodule(layer.region)
        weight = next(t.bound for t in layer.tensors if t.bound.name == "weight")
        parts = Parts([rows // self.tp.group.size for rows in weight.sections or weight.shape[:1]])
        for number, name in enumerate(layer.columns):
            _set(self.model, name, Outlet(parts, number))
        module.forward = self.tokens.column(module.run)
        region.forward = Entering(region.forward, module, mailbox, parts, layer)

    def _module(self) -> Any:
        """The TransformerEngine layer, without memory for parameters."""
        layer, tp = self.layer, self.tp
        options: dict[str, Any] = {"params_dtype": self.dtype, "device": "meta"}
        if layer.normalization is not None:
            options |= {"eps": layer.normalization.eps, "zero_centered_gamma": layer.normalization.zero_centered}
        tensors = {t.bound.name: t.bound for t in layer.tensors}
        if layer.layer in ("RMSNorm", "LayerNorm"):
            width = tensors["weight"].shape[0]
            return self._made(width, dtype=options.pop("params_dtype"), **options)
        size = tp.group.size if layer.communicates else 1
        if size > 1:
            options |= {"tp_size": size, "sequence_parallel": self.tokens.cut, **self.parallel}
        if layer.normalization is not None:
            options["normalization"] = layer.normalization.kind
        if layer.layer == "LayerNormMLP":
            inner, outer = tensors["fc2_weight"].local_shape[1] * size, tensors["fc2_weight"].shape[0]
            options |= {"activation": layer.activation, "set_parallel_mode": size > 1, "bias": "fc2_bias" in tensors}
            return self._made(outer, inner, **options)
        mode, weight = ("column" if layer.columns else "row"), tensors["weight"]
        rows, columns = weight.local_shape[0], weight.local_shape[1]
        rows, columns = (rows * size, columns) if mode == "column" else (rows, columns * size)
        return self._made(columns, rows, parallel_mode=mode if size > 1 else None, bias="bias" in tensors, **options)

    def _made(self, *sizes: int, **options: Any) -> Any:
        made = _adapted(getattr(self.engine.layers, self.layer.layer))(*sizes, **options)
        made.forward = made.run  # what is wrapped around it; see `seal`
        return made

    def _parameter(self, tensor: FusedTensor) -> nn.Parameter:
        """The rank's parts of the sources, one after another, as a DTensor on tp."""
        bound, group = tensor.bound, self.tp.group
        sources = [self.model.get_parameter(name) for name in tensor.sources]
        dim = bound.placement.dim
        own = [source.data if dim is None else coll.own_part(source.data, dim, group) for source in sources]
        local = own[0] if len(own) == 1 else torch.cat(own, dim or 0)
        placement = Replicate() if dim is None else Shard(dim)
        made = DTensor.from_local(local, self.tp.mesh, [placement], run_check=False)
        full_name = f"{self.layer.name}.{bound.name}"
        if tensor.sources != (full_name,):
            parts = tuple(
                Part(source=name, start=0, size=source.shape[dim or 0])
                for name, source in zip(tensor.sources, sources, strict=True)
            )
            degree = 1 if len(parts) == 1 else group.size
            self.tp.stored[full_name] = Stored(dim=dim or 0, tp=degree, parts=parts)
        return nn.Parameter(made, requires_grad=bound.trainable)


def taking(inner: Forward, mailbox: Mailbox, reader: str) -> Forward:
    """A fused layer that stands in its region's place and reads the norm's mailbox."""

    def forward(x: Tensor) -> Tensor:
        out: Tensor = inner(mailbox.take(x, reader))
        return out

    return forward


class Entering:
    """The forward of a region that runs a fused layer first, whose output its outlets hand out in ``parts``."""

    def __init__(self, inner: Forward, fused: nn.Module, mailbox: Mailbox, parts: Parts, layer: Fused) -> None:
        self.inner, self.fused, self.mailbox, self.parts = inner, fused, mailbox, parts
        first = next(iter(inspect.signature(inner).parameters))
        self.argument = layer.argument or BoundMove(value=0, name=first, op="keep", src=R, dst=R)
        self.name = layer.region or ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the region returns; it reads NaNs in place of its input."""
        args, kwargs = replaced(args, kwargs, self.argument, self._run)
        if self.parts.whole is None:
            named = self.argument.name or self.argument.value
            raise ApplyError(f"{self.name} was called without its argument {named}")
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.parts.put(None)

    def _run(self, passed: object) -> Tensor:
        x = self.mailbox.take(passed, self.name)
        out: Tensor = self.fused(x)
        self.parts.put(out)
        return self.mailbox.nothing(out, (*out.shape[:-1], x.shape[-1]))


def on_a_copy(module: Any) -> Forward:
    """A norm of TransformerEngine's, which reads its weight again in backward: its own, and not what it was given.

    So each forward runs on a copy of the module, whose parameters stay local tensors.
    """

    def forward(x: Tensor) -> Tensor:
        copied = copy.copy(module)
        copied.__dict__ = {**vars(module), "_parameters": dict(module._parameters)}
        out: Tensor = type(module).run(copied, x)
        return out

    return forward


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def seal(model: nn.Module, fused: Iterable[Fused]) -> None:
    """Call fused layers through their class once all is wrapped around them, so that compiled code finds one function.

    A compiler takes them as they are: what they do is not traced. A compiler that may look into them finds the same
    graphs, but the host is busier: for 0.74 of a bf16 step of two layers on two H200s in place of 0.64.
    """
    for layer in fused:
        if layer.layer != "DotProductAttention":
            module: Any = model.get_submodule(layer.name)
            module.run = vars(module).pop("forward")


@functools.cache
def _adapted(cls: Any) -> Any:
    """The class without `_extra_state` in its state dict (checkpoints are those of the unfused model), and sealed.

    Its first FP8 step has scales for gradients (`precision.scale_first_gradients`).
    """

    def init_fp8_meta_tensors(self: Any, recipe: Any) -> None:
        first = not self.fp8_meta_tensors_initialized
        cls.init_fp8_meta_tensors(self, recipe)
        if first and recipe.delayed():
            scale_first_gradients(self)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    plain = {"get_extra_state": nn.Module.get_extra_state, "set_extra_state": nn.Module.set_extra_state}
    made = {**plain, "forward": torch.compiler.disable(forward), "run": run}
    if hasattr(cls, "init_fp8_meta_tensors"):  # norms have none
        made["init_fp8_meta_tensors"] = init_fp8_meta_tensors
    return type(cls.__name__, (cls,), made)
