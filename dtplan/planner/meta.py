"""A Hugging Face model on the meta device, from a folder, a config file or a name; no weights are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtplan._errors import DtplanError


class ModelError(DtplanError, ValueError):
    """A model cannot be built from what was given."""


def meta_model(model: str) -> nn.Module:
    """The causal language model of a config, on the meta device: shapes without storage.

    Args:
        model: a model folder, the path of a config.json, or a name that transformers knows.

    Raises:
        ModelError: transformers is missing, there is no such config, or no causal model for it.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError:
        raise ModelError("transformers is needed to build a model: pip install 'dtplan[hf]'") from None
    config = _config(model, transformers)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    with torch.device("meta"):
        try:
            if names:
                built: nn.Module = getattr(transformers, names[0])(config)
            else:
                built = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise ModelError(
                f"{model}: no causal language model for a {type(config).__name__}: {_line(error)}"
            ) from None
    return built


def _config(model: str, transformers: Any) -> Any:
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ModelError(f"{model}: the folder has no config.json")
    if not file.is_file() and (file.suffix == ".json" or (os.sep in model and model.count(os.sep) > 1)):
        raise ModelError(f"{model}: no such file")
    try:
        if file.is_file():
            given = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(given, dict) or "model_type" not in given:
                raise ModelError(f"{file}: not a model's config: it has no `model_type`")
            return transformers.AutoConfig.for_model(given.pop("model_type"), **given)
        return transformers.AutoConfig.from_pretrained(model)
    except OSError as error:
        message = f"{model}: neither a folder, nor a config file, nor a name that is cached here: {_line(error)}"
        raise ModelError(message) from None
    except (ValueError, KeyError) as error:
        raise ModelError(f"{model}: transformers cannot read the config: {_line(error)}") from None


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
