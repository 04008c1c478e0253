"""``dtplan.load`` and ``dtplan.save``: checkpoints of models that `parallelize` sharded."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from dtplan.planner.apply import applied
from dtplan.weights.load import LoadReport, load_checkpoint
from dtplan.weights.save import SaveReport, save_checkpoint


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
) -> LoadReport:
    """Read a Hugging Face safetensors folder into a parallelized model; each rank reads what it keeps.

    Collective over all ranks. A model on the meta device gets its storage first, on ``device`` (default: the
    mesh's, or the host under ``cpu_offload``). Stored dtypes are converted
    to the parameters'. Tied tensors and the head's other names are understood.

    Raises:
        WeightsError: the same on every rank: a file is missing or broken, or names or shapes do not fit
            (``strict``: also missing and unexpected names).
        ApplyError: the model is not parallelized.
    """
    done = applied(model)
    device = "cpu" if device is None and done.cpu_offload else device
    return load_checkpoint(model, folder, aliases=done.bound.aliases, stored=done.stored, strict=strict, device=device)


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
    stored = applied(model).stored
    return save_checkpoint(
        model, folder, stored=stored, max_shard_bytes=max_shard_bytes, dtype=dtype, tokenizer=tokenizer
    )
