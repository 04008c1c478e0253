"""Collectives beside the matrix products that need them, by TransformerEngine's userbuffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dtplan._errors import ApplyError
from dtplan.te.engine import Engine
from dtplan.te.fused import Fused

_WHOLE = ("overlap_ag", "overlap_rs", "bulk_dgrad", "bulk_wgrad")
_COLUMN, _ROW = ("qkv", "fc1"), ("proj", "fc2")
"""The names under which userbuffers are set up for the layers of one unit, in their order."""


class _Session:
    """What this process' buffers are for; there is one set of them."""

    made: tuple[int, int, int, bool] | None = None


def prepare(engine: Engine, *, tokens: int, width: int, ranks: int, fp8: bool) -> None:
    """Set up the buffers for batches of ``tokens`` tokens, all ranks of a tp group together. Collective.

    Raises:
        ApplyError: the buffers of this process are for something else.
    """
    wanted = (tokens, width, ranks, fp8)
    if _Session.made is not None and _Session.made != wanted:
        raise ApplyError(
            f"overlap_tokens={tokens}: the buffers of this process are for {_Session.made[0]} tokens of "
            f"{_Session.made[1]} features{' in FP8' if _Session.made[3] else ''}; use another process"
        )
    if _Session.made is None:
        mode = getattr(engine.buffers.UserBufferQuantizationMode, "FP8" if fp8 else "NONE")
        engine.buffers.initialize_ub(
            [tokens, width], ranks, quantization_modes=[mode], dtype=torch.bfloat16, bootstrap_backend="nccl"
        )
        _Session.made = wanted


def options_of(fused: Iterable[Fused]) -> dict[str, dict[str, Any]]:
    """Name of a fused layer that communicates -> the arguments with which it overlaps."""
    found: dict[str, dict[str, Any]] = {}
    seen: dict[tuple[str, str], int] = {}
    for layer in fused:
        if not layer.communicates:
            continue
        if layer.layer == "LayerNormMLP":
            found[layer.name] = {
                f"ub_{what}": True for what in ("overlap_ag", "overlap_rs", "bulk_dgrad", "bulk_wgrad")
            }
            continue
        names = _COLUMN if layer.columns else _ROW
        number = seen.get((layer.unit, names[0]), 0)
        seen[layer.unit, names[0]] = number + 1
        if number == len(names):
            continue
        whats = ("overlap_ag", "bulk_dgrad", "bulk_wgrad") if layer.columns else ("overlap_ag", "overlap_rs")
        found[layer.name] = {"ub_name": names[number], **{f"ub_{what}": True for what in whats}}
    return found
