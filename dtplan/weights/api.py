"""``dtplan.load`` and ``dtplan.save``: checkpoints of models that `parallelize` sharded."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from dtplan._errors import WeightsError
from dtplan.planner.apply import applied
from dtplan.planner.bound import BoundPlan
from dtplan.weights.load import LoadReport, Source, load_checkpoint
from dtplan.weights.save import SaveReport, save_checkpoint


def load(
    model: nn.Module,
    source: Source | None = None,
    *,
    strict: bool = True,
    from_rank0: bool = False,
    device: torch.device | str | None = None,
) -> LoadReport:
    """Fill a parallelized model from a Hugging Face folder or a state dict; each rank takes what it keeps.

    Collective over all ranks. A model on the meta device gets its storage first, and its computed buffers. Stored
    dtypes are converted to the parameters'. Tied tensors and the head's other names are understood.

    Args:
        model: what `parallelize` returned.
        source: a folder with safetensors files (or ``pytorch_model.bin``, of which only tensors are unpickled), or
            whole tensors by name, such as the ``state_dict()`` of an unsharded model; it is not changed.
        strict: refuse missing and unexpected names; else they are logged, and are in the report.
        from_rank0: rank 0 alone reads ``source`` and sends every rank its part, a piece at a time; the others give
            None. For weights that only rank 0 can see.
        device: where the parameters of a model on meta go; the mesh's, or the host under ``cpu_offload``.

    Raises:
        WeightsError: the same on every rank: a file is missing or broken, or names or shapes do not fit
            (``strict``: also missing and unexpected names).
        ApplyError: the model is not parallelized.
    """
    done = applied(model)
    _refuse_cut_buffers(model, done.bound)
    return load_checkpoint(
        model,
        source,
        from_rank0=from_rank0,
        aliases=done.bound.aliases,
        stored=done.stored,
        strict=strict,
        device="cpu" if device is None and done.cpu_offload else device,
    )


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> SaveReport:
    """Write a folder that plain ``transformers`` loads: config, safetensors shards, index, tokenizer if given.

    Collective over all ranks, each of which writes a part; no rank holds more than one output shard. The
    folder appears whole or not at all, and replaces an older one only when it is complete.

    Raises:
        WeightsError: the same on every rank: the folder cannot be written.
        ApplyError: the model is not parallelized.
    """
    done = applied(model)
    _refuse_cut_buffers(model, done.bound)
    return save_checkpoint(
        model, folder, stored=done.stored, max_shard_bytes=max_shard_bytes, dtype=dtype, tokenizer=tokenizer
    )


def _refuse_cut_buffers(model: nn.Module, bound: BoundPlan) -> None:
    """A buffer that a plan cuts is a plain tensor of this rank's part: no checkpoint could tell it from a whole one."""
    for module in bound.modules:
        cut = {tensor.name for tensor in module.tensors if tensor.buffer and tensor.placement.dim is not None}
        for name in module.names if cut else ():
            persistent = cut & set(model.get_submodule(name).state_dict(keep_vars=True))
            if persistent:
                raise WeightsError(
                    f"{name}.{min(persistent)} is a buffer that checkpoints hold and the plan cuts: keep it whole"
                )
