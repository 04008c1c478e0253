"""``pytorch_model.bin``, the pickle of old checkpoints: only tensors are unpickled, and their bytes are mapped."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from dtplan._errors import WeightsError

__all__ = ["PICKLE_FILE", "PICKLE_INDEX", "map_pickle"]

PICKLE_FILE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"


def map_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of ``file``, mapped: what is read of one is what is copied out of it.

    ``weights_only``: nothing in the file is run. Raises WeightsError for a file that holds other things than
    tensors under names, is broken, or is of torch before 1.6, which cannot be mapped.
    """
    try:
        held = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        cure = (
            "it is broken, holds more than tensors, or is older than torch 1.6; use the safetensors files of this "
            "model, or, if you trust the file, write them with transformers: `model.save_pretrained(FOLDER)`"
        )
        raise WeightsError(f"{file}: is not read ({_line(error)}); {cure}") from error
    if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
        raise WeightsError(f"{file}: holds a {type(held).__name__} and no tensors under names; it is no checkpoint")
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
