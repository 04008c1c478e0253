"""TransformerEngine's interface on a CPU in any dtype, with its tensor parallel semantics; for tests only.

What the real layers do is done here with plain torch: parameters are local, sizes are given whole, column layers gather
rows of the first dim under sequence parallelism, and once more in backward, row layers reduce or scatter them and add
their bias afterwards.
What would be an illegal memory access there is an error here: a DTensor, or a tensor whose collective is not done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dtplan.planner import collectives as coll
from dtplan.planner.collectives import Group
from dtplan.te.engine import Engine
from dtplan.te.probe import ACTIVATIONS, GATED

ENTERED: list[tuple[Any, dist.ProcessGroup | None]] = []
"""Recipe and group of every FP8 context that was entered."""
_RECIPE: ContextVar[Any] = ContextVar("recipe", default=None)

BUFFERS: list[tuple[Any, Any]] = []
"""The arguments of every set-up of userbuffers."""
_OVERLAPS = ("overlap_ag", "overlap_rs", "bulk_dgrad", "bulk_wgrad")


class _Rounded(torch.autograd.Function):
    """The same forward; the gradient is rounded to E5M2 by a scale, which is made for its maximum afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad, largest = grads[0], torch.finfo(torch.float8_e5m2).max
        rounded = (grad * ctx.scale).clamp(-largest, largest).to(torch.float8_e5m2).to(grad.dtype) / ctx.scale
        ctx.scale.copy_(largest / grad.abs().max())
        return rounded, None


class _Copied(torch.autograd.Function):
    """The same forward; backward the gradient is summed in place, and waited for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        work: Any = dist.all_reduce(grad, group=ctx.group, async_op=True)
        work.wait()
        return grad, None


class _Summed(torch.autograd.Function):
    """Summed in place forward; the same backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _empty(*shape: int, device: Any, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))


class _Layer(nn.Module):
    def __init__(
        self,
        *,
        params_dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        normalization: str = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        ub_name: str | None = None,
        **overlaps: bool,
    ) -> None:
        super().__init__()
        assert overlaps.keys() <= {f"ub_{what}" for what in _OVERLAPS}
        self.overlaps, self.ub_name = overlaps, ub_name
        self.ranks = tp_group
        assert (dist.get_world_size(tp_group) if tp_group else 1) == tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.normalization, self.eps, self.zero_centered = normalization, eps, zero_centered_gamma
        self.made: dict[str, Any] = {"device": device, "dtype": params_dtype}
        self.tp_size = tp_size
        self.fp8_meta: dict[str, Any] = {}
        self.fp8_meta_tensors_initialized = False

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        self.fp8_meta["scaling_bwd"] = SimpleNamespace(scale=torch.ones(1))
        self.fp8_meta_tensors_initialized = True

    def quantised(self, y: Tensor) -> Tensor:
        """Of FP8 only this: the gradient under delayed scaling, whose scale is that of the steps before."""
        recipe = _RECIPE.get()
        if recipe is None or not recipe.delayed():
            return y
        if not self.fp8_meta_tensors_initialized:
            self.init_fp8_meta_tensors(recipe)
        out: Tensor = _Rounded.apply(y, self.fp8_meta["scaling_bwd"].scale)
        return out

    def get_extra_state(self) -> Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        raise AssertionError("Unsupported checkpoint format")

    def _norm_parameters(self, width: int) -> None:
        self.layer_norm_weight = _empty(width, **self.made)
        self.layer_norm_bias = _empty(width, **self.made) if self.normalization == "LayerNorm" else None

    def plain(self, x: Tensor) -> Tensor:
        for tensor in (x, *self.parameters()):
            assert type(tensor) in (Tensor, nn.Parameter), f"illegal memory access: {type(tensor).__name__}"
        return x

    def norm(self, x: Tensor) -> Tensor:
        return norm(self.plain(x), self.layer_norm_weight, self.layer_norm_bias, self)

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.ranks is None:
            return F.linear(x, weight, bias)
        if self.sequence_parallel:
            out: Tensor = _GatheredTwice.apply(x, weight, Group.of(self.ranks))
            return out if bias is None else out + bias
        return F.linear(_Copied.apply(x, self.ranks), weight, bias)

    def rows(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.ranks is None:
            return F.linear(x, weight, bias)
        y = F.linear(x, weight)
        y = coll.scatter(y, 0, Group.of(self.ranks)) if self.sequence_parallel else _Summed.apply(y, self.ranks)
        return y if bias is None else y + bias


class _GatheredTwice(torch.autograd.Function):
    """Rows of all ranks by a weight; the rank's own are kept, and gathered again for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(coll.all_gather(x, 0, group), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wide = coll.all_gather(x, 0, ctx.group) if ctx.needs_input_grad[1] else None
        dx = coll.reduce_scatter(grads[0] @ weight, 0, ctx.group)
        return dx, None if wide is None else grads[0].t() @ wide, None


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
    weight = weight + 1 if layer.zero_centered else weight
    if layer.normalization == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, layer.eps)
    return F.rms_norm(x, x.shape[-1:], weight, layer.eps)


class LayerNormLinear(_Layer):
    def __init__(self, inner: int, outer: int, *, bias: bool, parallel_mode: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        assert parallel_mode == ("column" if self.tp_size > 1 else None)
        self._norm_parameters(inner)
        self.weight = _empty(outer // self.tp_size, inner, **self.made)
        self.bias = _empty(outer // self.tp_size, **self.made) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.quantised(self.columns(self.norm(x), self.weight, self.bias))


class Linear(_Layer):
    def __init__(self, inner: int, outer: int, *, bias: bool, parallel_mode: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        assert parallel_mode == ("row" if self.tp_size > 1 else None)
        self.weight = _empty(outer, inner // self.tp_size, **self.made)
        self.bias = _empty(outer, **self.made) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.quantised(self.rows(self.plain(x), self.weight, self.bias))


class LayerNormMLP(_Layer):
    def __init__(
        self, outer: int, inner: int, *, activation: str, bias: bool, set_parallel_mode: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        assert set_parallel_mode == (self.tp_size > 1)
        self._norm_parameters(outer)
        self.activation = activation
        own = inner // self.tp_size
        first = 2 * own if activation in GATED else own
        self.fc1_weight, self.fc2_weight = _empty(first, outer, **self.made), _empty(outer, own, **self.made)
        self.fc1_bias = _empty(first, **self.made) if bias else None
        self.fc2_bias = _empty(outer, **self.made) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.columns(self.norm(x), self.fc1_weight, self.fc1_bias)
        act = ACTIVATIONS[GATED.get(self.activation, self.activation)]
        if self.activation in GATED:
            gate, up = hidden.chunk(2, -1)
            hidden = act(gate) * up
        else:
            hidden = act(hidden)
        return self.quantised(self.rows(hidden, self.fc2_weight, self.fc2_bias))


class _Norm(_Layer):
    def __init__(self, width: int, *, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(params_dtype=dtype, normalization=type(self).__name__, **options)
        self.weight = _empty(width, **self.made)
        self.bias = _empty(width, **self.made) if self.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        out = norm(self.plain(x), self.weight, self.bias, self)
        if out.requires_grad:
            out.register_hook(self.plain)  # the real ones read their own weight again in backward
        return out


class RMSNorm(_Norm):
    pass


class LayerNorm(_Norm):
    pass


class DotProductAttention:
    """Causal attention of [batch, sequence, heads, width]; the result is [batch, sequence, heads * width]."""

    def __init__(self, heads: int, width: int, **options: Any) -> None:
        assert options["qkv_format"] == "bshd"
        assert options["attn_mask_type"] == "causal"
        self.heads, self.kv_heads, self.scale = heads, options["num_gqa_groups"], options["softmax_scale"]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert (query.shape[2], key.shape[2]) == (self.heads, self.kv_heads)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


@contextlib.contextmanager
def autocast(*, enabled: bool, recipe: Any, amax_reduction_group: dist.ProcessGroup | None) -> Iterator[None]:
    assert enabled
    ENTERED.append((recipe, amax_reduction_group))
    before = _RECIPE.set(recipe)
    try:
        yield
    finally:
        _RECIPE.reset(before)


def checkpoint(forward: Any, *args: Any, use_reentrant: bool, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return torch_checkpoint(forward, *args, use_reentrant=use_reentrant, **kwargs)


def _recipe(name: str) -> Any:
    delayed = classmethod(lambda cls: cls.__name__ == "DelayedScaling")
    return type(name, (SimpleNamespace,), {"fp8_format": "HYBRID", "delayed": delayed})


ENGINE = Engine(
    layers=SimpleNamespace(
        LayerNormLinear=LayerNormLinear,
        Linear=Linear,
        LayerNormMLP=LayerNormMLP,
        RMSNorm=RMSNorm,
        LayerNorm=LayerNorm,
        DotProductAttention=DotProductAttention,
        autocast=autocast,
        checkpoint=checkpoint,
    ),
    recipes=SimpleNamespace(
        **{name: _recipe(name) for name in ("Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling")}
    ),
    buffers=SimpleNamespace(
        initialize_ub=lambda *args, **options: BUFFERS.append((args, options)),
        UserBufferQuantizationMode=SimpleNamespace(FP8="FP8", NONE="NONE"),
    ),
    version="stand-in",
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float64}),
)
