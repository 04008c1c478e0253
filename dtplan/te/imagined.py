"""TransformerEngine's layers on meta tensors: what they keep for backward, allocate and multiply, and no values.

Read from TransformerEngine 2.20 (``pytorch/module/{layernorm_linear,layernorm_mlp,linear}.py``): which tensors go into
``save_for_backward``, in which width, and where ``clear_tensor_data`` lets them go. In FP8 a tensor that is multiplied
is held once along rows, and once more transposed where backward needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtplan.planner import collectives as coll
from dtplan.planner.collectives import Group
from dtplan.te.engine import Engine
from dtplan.te.probe import GATED

_FP8 = torch.float8_e4m3fn
_quantising = False
_under_fsdp = False


@dataclass(slots=True)
class Twice:
    """A tensor as it is multiplied: itself, or in FP8 its rows and its columns, each if it is there."""

    rows: Tensor | None
    columns: Tensor | None

    @classmethod
    def of(cls, x: Tensor, *, fp8: bool, columns: bool = True) -> Twice:
        """``x`` quantised, if FP8 is on; one kernel reads it and writes both."""
        if not fp8:
            return cls(x, x)
        return cls(x.to(_FP8), torch.empty_like(x, dtype=_FP8) if columns else None)

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """What is held of it."""
        return self.rows, None if self.columns is self.rows else self.columns


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """[tokens, k] by [n, k] transposed: [tokens, n]."""
    if x.dtype is not _FP8:
        return x @ weight.t()
    one = torch.empty((), device=x.device)
    out: Tensor = torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16)
    return out


def _held(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _kept(weight: Twice) -> tuple[Tensor | None, Tensor | None]:
    """Of a weight, what is kept for backward; under FSDP2 it is quantised again from what is gathered again."""
    return (None, None) if _under_fsdp else weight.tensors()


def _turned(columns: Tensor | None, weight: Tensor, *, fp8: bool) -> Tensor:
    """The weight transposed: a view, or in FP8 a copy."""
    if not fp8:
        return weight.t()
    copied = weight.to(_FP8) if columns is None else columns
    return copied.view(weight.shape[::-1])


class _Layer(nn.Module):
    def __init__(
        self,
        *,
        params_dtype: torch.dtype,
        device: Any,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        normalization: str = "LayerNorm",
        **_options: Any,
    ) -> None:
        super().__init__()
        self.group = None if tp_group is None else Group.of(tp_group)
        self.tp_size, self.cut = tp_size, sequence_parallel and tp_size > 1
        self.normalization, self.made = normalization, {"device": device, "dtype": params_dtype}

    def _parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, **self.made))

    def _norm_parameters(self, width: int) -> None:
        self.layer_norm_weight = self._parameter(width)
        self.layer_norm_bias = self._parameter(width) if self.normalization == "LayerNorm" else None

    def gathered(self, x: Tensor) -> Tensor:
        return coll.all_gather(x, 0, self.group) if self.cut and self.group is not None else x

    def gathered_gradient(self, grad: Tensor, *, fp8: bool) -> Twice:
        """The gradient of what `summed` gives; in FP8 it is quantised before it is gathered."""
        if not fp8 or not self.cut:
            return Twice.of(self.gathered(grad), fp8=fp8)
        rows = self.gathered(grad.to(_FP8))
        return Twice(rows, torch.empty_like(rows))

    def summed(self, x: Tensor) -> Tensor:
        """Terms of a sum over ranks."""
        if self.group is None:
            return x
        return coll.reduce_scatter(x, 0, self.group) if self.cut else coll.all_reduce(x, self.group)

    def statistics(self, x: Tensor) -> Tensor:
        count = 2 if self.normalization == "LayerNorm" else 1
        return torch.empty(count, x.shape[0], dtype=torch.float32, device=x.device)


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    dx = grad * x
    return dx, torch.empty_like(weight), None if bias is None else torch.empty_like(bias)  # type: ignore[return-value]


class _Columns(torch.autograd.Function):
    """Norm, gather, product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: _Layer, weight: Tensor, bias: Tensor | None, gamma: Tensor, beta: Any
    ) -> Tensor:
        ctx.layer, ctx.fp8 = layer, _quantising
        normed = Twice.of(x * gamma, fp8=ctx.fp8, columns=not layer.cut)
        total = layer.gathered(_held(normed.rows))
        wide = Twice.of(weight, fp8=ctx.fp8)
        out = _times(total, _held(wide.rows))
        if ctx.fp8 and not layer.cut:
            normed.rows = None
        ctx.has = [bias is not None, beta is not None]
        ctx.save_for_backward(x, weight, gamma, bias, beta, layer.statistics(x), *normed.tensors(), *_kept(wide))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, gamma, bias, beta, _, rows, columns, *wide = ctx.saved_tensors
        layer, trained, grad = ctx.layer, ctx.needs_input_grad[2], Twice.of(grads[0], fp8=ctx.fp8)
        total = layer.gathered(rows) if layer.cut and trained else (columns if columns is not None else rows)
        dx = layer.summed(_times(_held(grad.rows), _turned(wide[1], weight, fp8=ctx.fp8)))
        if ctx.fp8 and layer.cut:
            total = torch.empty_like(total)
        dw = _weight_gradient(_held(grad.columns), total, weight) if trained else None
        db = None if bias is None else grads[0].sum(0)
        dx, dgamma, dbeta = _norm_backward(dx, x, gamma, beta)
        return dx, None, dw, db, dgamma, dbeta


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """[tokens, n] transposed by [tokens, k]; in FP8 both are held transposed, which shapes do not show."""
    if grad.dtype is not _FP8:
        return grad.t() @ x
    left, right = grad.view(grad.shape[::-1]), x.view(x.shape[::-1])
    one = torch.empty((), device=x.device)
    out: Tensor = torch._scaled_mm(left, right.t(), one, one, out_dtype=weight.dtype)
    return out


class _Rows(torch.autograd.Function):
    """Product, sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Layer, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.fp8 = layer, _quantising
        wide, read = Twice.of(weight, fp8=ctx.fp8), Twice.of(x, fp8=ctx.fp8)
        out = layer.summed(_times(_held(read.rows), _held(wide.rows)))
        if ctx.fp8:
            read.rows = None
        ctx.save_for_backward(weight, bias, *read.tensors(), *_kept(wide))
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weight, bias, rows, columns, *wide = ctx.saved_tensors
        grad = ctx.layer.gathered_gradient(grads[0], fp8=ctx.fp8)
        dx = _times(_held(grad.rows), _turned(wide[1], weight, fp8=ctx.fp8))
        dw = _weight_gradient(_held(grad.columns), rows if columns is None else columns, weight)
        return dx, None, dw, None if bias is None else grads[0].sum(0)


class _Mlp(torch.autograd.Function):
    """Norm, gather, product, activation, product, sum over ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: Any, gamma: Tensor, beta: Any, w1: Tensor, b1: Any, w2: Tensor, b2: Any
    ) -> Tensor:
        ctx.layer, ctx.fp8 = layer, _quantising
        normed = Twice.of(x * gamma, fp8=ctx.fp8, columns=not layer.cut)
        total = layer.gathered(_held(normed.rows))
        first, second = Twice.of(w1, fp8=ctx.fp8), Twice.of(w2, fp8=ctx.fp8)
        inner = _times(total, _held(first.rows))
        del total
        parts = inner.chunk(2, -1) if layer.gated else (inner,)
        act = torch.empty(parts[0].shape, dtype=_FP8 if ctx.fp8 else inner.dtype, device=x.device)
        torch.mul(parts[0], parts[-1], out=act) if not ctx.fp8 else act.copy_(parts[0])
        out = layer.summed(_times(act, _held(second.rows)))
        ctx.save_for_backward(
            x,
            gamma,
            beta,
            w1,
            b1,
            w2,
            b2,
            layer.statistics(x),
            inner,
            act,
            *normed.tensors(),
            *_kept(first),
            *_kept(second),
        )
        return out if b2 is None else torch.add(out, b2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, gamma, beta, w1, b1, w2, b2, _, inner, act, rows, columns, *wide = ctx.saved_tensors
        layer, fp8, trained = ctx.layer, ctx.fp8, ctx.needs_input_grad[4]
        db2 = None if b2 is None else grads[0].sum(0)
        grad = layer.gathered_gradient(grads[0], fp8=fp8)
        total = layer.gathered(rows) if layer.cut and trained else (rows if columns is None else columns)
        dact = _times(_held(grad.rows), _turned(wide[3], w2, fp8=fp8))
        if fp8:
            act = torch.empty_like(act)
        dw2 = _weight_gradient(_held(grad.columns), act, w2)
        parts = inner.chunk(2, -1) if layer.gated else (inner,)
        dinner = torch.cat([dact * part for part in parts], -1) if layer.gated else dact * inner
        db1 = None if b1 is None else dinner.sum(0)
        wide_grad = Twice.of(dinner, fp8=fp8)
        if fp8:
            del dinner
        dx = layer.summed(_times(_held(wide_grad.rows), _turned(wide[1], w1, fp8=fp8)))
        if fp8 and layer.cut:
            total = torch.empty_like(total)
        dw1 = _weight_gradient(_held(wide_grad.columns), total, w1) if trained else None
        dx, dgamma, dbeta = _norm_backward(dx, x, gamma, beta)
        return dx, None, dgamma, dbeta, dw1, db1, dw2, db2


class LayerNormLinear(_Layer):
    """Norm and column-parallel product."""

    def __init__(self, inner: int, outer: int, *, bias: bool, parallel_mode: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._norm_parameters(inner)
        self.weight = self._parameter(outer // self.tp_size, inner)
        self.bias = self._parameter(outer // self.tp_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., inner] to [..., own part of outer]."""
        weights = self.weight, self.bias, self.layer_norm_weight, self.layer_norm_bias
        out: Tensor = _Columns.apply(x.reshape(-1, x.shape[-1]), self, *weights)  # type: ignore[no-untyped-call]
        return out.view(-1, *x.shape[1:-1], out.shape[-1])


class Linear(_Layer):
    """Row-parallel product."""

    def __init__(self, inner: int, outer: int, *, bias: bool, parallel_mode: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.weight = self._parameter(outer, inner // self.tp_size)
        self.bias = self._parameter(outer) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., own part of inner] to [..., outer]."""
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = _Rows.apply(flat, self, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out.view(-1, *x.shape[1:-1], out.shape[-1])


class LayerNormMLP(_Layer):
    """Norm and MLP."""

    def __init__(
        self, outer: int, inner: int, *, activation: str, bias: bool, set_parallel_mode: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self._norm_parameters(outer)
        self.gated, own = activation in GATED, inner // self.tp_size
        self.fc1_weight = self._parameter(2 * own if self.gated else own, outer)
        self.fc2_weight = self._parameter(outer, own)
        self.fc1_bias = self._parameter(self.fc1_weight.shape[0]) if bias else None
        self.fc2_bias = self._parameter(outer) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., outer] to [..., outer]."""
        norms = self.layer_norm_weight, self.layer_norm_bias
        weights = self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias
        out: Tensor = _Mlp.apply(x.reshape(-1, x.shape[-1]), self, *norms, *weights)  # type: ignore[no-untyped-call]
        return out.view(-1, *x.shape[1:-1], out.shape[-1])


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Layer, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, layer.statistics(x.reshape(-1, x.shape[-1])))
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, _ = ctx.saved_tensors
        dx, dweight, dbias = _norm_backward(grads[0], x, weight, bias)
        return dx, None, dweight, dbias


class _Norm(_Layer):
    def __init__(self, width: int, *, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(params_dtype=dtype, normalization=type(self).__name__, **options)
        self.weight = self._parameter(width)
        self.bias = self._parameter(width) if self.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """Of the last dim."""
        out: Tensor = _NormFunction.apply(x, self, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


class RMSNorm(_Norm):
    """RMSNorm."""


class LayerNorm(_Norm):
    """LayerNorm."""


class DotProductAttention:
    """Causal attention of [batch, sequence, heads, width]; the result is [batch, sequence, heads * width]."""

    def __init__(self, heads: int, width: int, **options: Any) -> None:
        self.scale = options["softmax_scale"]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As torch's flash attention: it keeps the same."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


@contextlib.contextmanager
def autocast(*, enabled: bool, recipe: Any, amax_reduction_group: Any) -> Iterator[None]:
    """Inside, layers quantise."""
    global _quantising  # noqa: PLW0603 - as TransformerEngine's own
    before, _quantising = _quantising, enabled
    try:
        yield
    finally:
        _quantising = before


def imagined(checkpoint: Any, *, fsdp: bool) -> Engine:
    """The engine; ``checkpoint`` is how a function is recomputed. Under FSDP2 quantised weights are not kept."""
    global _under_fsdp  # noqa: PLW0603 - layers are made by their class alone
    _under_fsdp = fsdp

    def recomputed(forward: Any, *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
        within = _quantising

        def run(*inner: Any, **named: Any) -> Any:
            with autocast(enabled=within, recipe=None, amax_reduction_group=None):
                return forward(*inner, **named)

        return checkpoint(run)(*args, **kwargs)

    layers = (LayerNormLinear, Linear, LayerNormMLP, RMSNorm, LayerNorm, DotProductAttention, autocast)
    return Engine(
        layers=SimpleNamespace(**{layer.__name__: layer for layer in layers}, checkpoint=recomputed),
        recipes=None,
        buffers=None,
        version="imagined",
    )
