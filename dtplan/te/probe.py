"""What a module computes, told by running it: a fused layer may take its place only if it computes the same.

Class names and config fields say what a module is meant to be; small runs on a CPU say what it is. Nothing of the
model is changed, and its weights are not needed: the runs use small random ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtplan.te.norm import Norm

_NORM_BOUND = 1e-4
"""Norms of transformers compute in float32; another formula or another eps is off by far more at these inputs."""
_MLP_BOUND = 1e-9
_INNER, _OUTER = 6, 8

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "srelu": lambda x: F.relu(x).square(),
}
"""Activations by TransformerEngine's names, as it computes them."""
GATED: Mapping[str, str] = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu"}
"""Gated forms: the activation of one half times the other."""


def norm_of(module: nn.Module) -> Norm | None:
    """Which norm ``module`` computes, or None if it is none that TransformerEngine knows."""
    names = set(dict(module.named_parameters()))
    eps = next(
        (e for e in (getattr(module, n, None) for n in ("variance_epsilon", "eps")) if isinstance(e, float)), None
    )
    if eps is None or "weight" not in names or not names <= {"weight", "bias"} or list(module.children()):
        return None
    generator = torch.Generator().manual_seed(0)
    width = module.get_parameter("weight").shape[-1]
    tensors = {name: torch.randn(width, generator=generator, dtype=torch.float64) for name in sorted(names)}
    # rows whose variance is about eps, so that a wrong eps shows
    x = torch.randn(3, width, generator=generator, dtype=torch.float64) * eps**0.5
    found = _run(module, x, tensors)
    kinds: tuple[Literal["RMSNorm", "LayerNorm"], ...] = ("RMSNorm", "LayerNorm")
    for kind in kinds:
        for zero_centered in (False, True):
            norm = Norm(kind=kind, eps=eps, zero_centered=zero_centered, bias="bias" in names)
            if found is not None and _close(found, _norm(norm, x, tensors), _NORM_BOUND):
                return norm
    return None


def _norm(norm: Norm, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if norm.kind == "LayerNorm" else x
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps)
    return scaled * (tensors["weight"] + float(norm.zero_centered)) + tensors.get("bias", torch.zeros(()))


def mlp_computes(
    module: nn.Module, activation: str, *, gate: str | None, up: str, down: str, erf: bool = False
) -> bool:
    """Whether ``module`` is down(act(up)), or down(act(gate) * up), of its input, and nothing else.

    ``gate``, ``up`` and ``down`` name its linear children; ``erf`` asks for gelu's exact form, which
    TransformerEngine does not have.
    """
    names = [name for name in (gate, up, down) if name]
    small = {n: _small_linear(module.get_submodule(n), inner=n != down, seed=i) for i, n in enumerate(names, 1)}
    act = ACTIVATIONS[GATED.get(activation, activation)]
    if erf:
        act = F.gelu
    x = torch.randn(3, 4, _OUTER, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = _run(module, x, {}, small)
    hidden = act(small[gate](x)) * small[up](x) if gate else act(small[up](x))
    return found is not None and _close(found, small[down](hidden), _MLP_BOUND)


def _small_linear(linear: nn.Module, *, inner: bool, seed: int) -> nn.Linear:
    sizes = (_OUTER, _INNER) if inner else (_INNER, _OUTER)
    generator = torch.Generator().manual_seed(seed)
    small = nn.Linear(*sizes, bias=getattr(linear, "bias", None) is not None, dtype=torch.float64, device="meta")
    for name, parameter in list(small.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        setattr(small, name, nn.Parameter(values, requires_grad=False))
    return small


@torch.no_grad()
def _run(
    module: nn.Module, x: Tensor, tensors: Mapping[str, Tensor], children: Mapping[str, nn.Module] | None = None
) -> Tensor | None:
    """What a shallow copy of ``module`` gives with other parameters and children; None if it cannot be run so."""
    stand_in = copy.copy(module)
    stand_in.__dict__ = {
        key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()
    }
    stand_in.training = False
    for name, tensor in tensors.items():
        stand_in._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    stand_in._modules.update(children or {})
    try:
        with torch.device("cpu"):
            out: Any = stand_in(x)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None  # it needs more than its input: then no fused layer computes the same
    return out.double() if isinstance(out, Tensor) and not out.is_meta else None


def _close(found: Tensor, truth: Tensor, bound: float) -> bool:
    return found.shape == truth.shape and bool((found - truth).abs().max() <= bound * truth.abs().max())
