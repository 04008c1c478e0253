"""FP8: which recipe, and the context in which fused layers quantise."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from dtplan._errors import ApplyError
from dtplan.te.engine import Engine

Recipe = Literal["current", "delayed", "block"]
RECIPES: tuple[str, ...] = get_args(Recipe)
ROWS = 8
"""TransformerEngine quantises tensors whose leading dims multiply to a multiple of this."""
_FIRST_GRADIENTS = 2.0**12
"""Scale of gradients until a history says more: E5M2 then holds 2^-28 to 14; most of a mean loss are below 2^-17."""
_BLACKWELL = ("MXFP8BlockScaling", "NVFP4BlockScaling")


def recipe_of(fp8: Any, engine: Engine) -> Any:
    """The recipe by its short name, or a recipe of TransformerEngine's as it is.

    ``"current"`` scales by the tensor at hand and keeps no state; ``"delayed"`` by a history of maxima, which is
    reduced over all ranks; ``"block"`` by blocks of 128.

    Raises:
        ApplyError: another word, or a recipe for other GPUs.
    """
    kind = type(fp8).__name__
    if kind in _BLACKWELL:
        raise ApplyError(f"fp8={kind}: it needs Blackwell (sm_100); on Hopper give one of {', '.join(RECIPES)}")
    if not isinstance(fp8, str):
        if not hasattr(fp8, "fp8_format"):
            raise ApplyError(f"fp8={fp8!r}: give one of {', '.join(RECIPES)}, or a recipe of TransformerEngine")
        return fp8
    makers = {
        "current": engine.recipes.Float8CurrentScaling,
        "delayed": functools.partial(engine.recipes.DelayedScaling, reduce_amax=True),
        "block": engine.recipes.Float8BlockScaling,
    }
    if fp8 not in makers:
        blackwell = " (mxfp8 and nvfp4 need Blackwell)" if fp8 in ("mxfp8", "nvfp4") else ""
        raise ApplyError(f"fp8={fp8!r}: give one of {', '.join(RECIPES)}{blackwell}, or a recipe of TransformerEngine")
    return makers[fp8]()


def quantise(model: nn.Module, recipe: Any, engine: Engine, group: dist.ProcessGroup | None, *, parts: int) -> None:
    """Run the model's forward with FP8 on; maxima are reduced over ``group``, all ranks that share a layer's tensors.

    Fused layers quantise what they multiply; everything else stays as it is. ``parts``: ranks over which the tokens of
    a batch are cut (sequence parallelism). A batch whose tokens a rank cannot quantise raises ApplyError.
    """
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        _refuse_odd_batches((*args, *kwargs.values()), parts)
        with engine.layers.autocast(enabled=True, recipe=recipe, amax_reduction_group=group):
            return inner(*args, **kwargs)

    model.forward = forward


def scale_first_gradients(layer: Any) -> None:
    """Delayed scaling begins with 1 for all: E5M2 then rounds nearly all gradients of a mean loss to zero.

    The step after this one scales by what was seen. What goes forward needs nothing: the first loss is that of bf16.
    """
    layer.fp8_meta["scaling_bwd"].scale.fill_(_FIRST_GRADIENTS)


def _refuse_odd_batches(values: Iterable[Any], parts: int) -> None:
    ids = next((v for v in values if isinstance(v, torch.Tensor) and v.dim() == 2 and not v.is_floating_point()), None)
    if ids is not None and ids.numel() % (ROWS * parts):
        raise ApplyError(
            f"fp8: a batch of {list(ids.shape)} tokens leaves {ids.numel() / parts:g} to each of {parts} ranks, and "
            f"FP8 kernels need multiples of {ROWS} rows: pad the batch to a multiple of {ROWS * parts} tokens"
        )


def recomputing(engine: Engine, forward: Any) -> Any:
    """Recompute ``forward`` in backward with the scales that its first run had."""

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return engine.layers.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


def refuse_quantised_parameters(model: nn.Module) -> None:
    """Parameters that are quantised already cannot be cut on tp.

    Raises:
        ApplyError: the model was built inside ``quantized_model_init``.
    """
    for name, parameter in model.named_parameters():
        if (
            type(parameter.data) not in (torch.Tensor, nn.Parameter)
            and hasattr(parameter.data, "dequantize")
            and hasattr(parameter.data, "_quantizer")
        ):
            raise ApplyError(
                f"{name} is quantised already (quantized_model_init): with tensor parallelism its scale would differ "
                "between ranks; build the model in bf16 and give fp8= to parallelize"
            )
