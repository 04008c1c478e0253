"""A Hugging Face model on the meta device, from a folder, a config file or a name; no weights are read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
    transformers = _transformers()
    file = _file(model)
    if file:
        return _built(_config(_read(file), str(file), transformers), model, transformers)
    return _built(_named(model, transformers), model, transformers)


def model_of_config(config: Mapping[str, Any], where: str) -> nn.Module:
    """As ``meta_model``, from a config's data; ``where`` names its origin in errors."""
    transformers = _transformers()
    return _built(_config(config, where, transformers), where, transformers)


def config_data(model: str) -> dict[str, Any]:
    """The config that ``meta_model`` builds from, as JSON data: a file's own, or what a named one changes.

    Left out is what says nothing of the model: where it came from, and by which version it was written.

    Raises:
        ModelError: as ``meta_model``.
    """
    file = _file(model)
    data = _read(file) if file else json.loads(_named(model, _transformers()).to_json_string(use_diff=True))
    return {key: value for key, value in data.items() if key not in ("_name_or_path", "transformers_version")}


def _transformers() -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError:
        raise ModelError("transformers is needed to build a model: pip install 'dtplan[hf]'") from None
    return transformers


def _built(config: Any, model: str, transformers: Any) -> nn.Module:
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    with torch.device("meta"):
        try:
            if names:
                built: nn.Module = getattr(transformers, names[0])(config)
            else:
                built = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError as error:
            raise ModelError(
                f"{model}: no causal language model for a {type(config).__name__}: {_line(error)}"
            ) from None
        except Exception as error:  # noqa: BLE001 - each class refuses in its own way, or lacks a library
            kind = type(config).__name__
            raise ModelError(f"{model}: {names[0] if names else kind} refuses the config: {_line(error)}") from None
    return built


def _file(model: str) -> Path | None:
    """The config's file; None where ``model`` is a name."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ModelError(f"{model}: the folder has no config.json")
    if not file.is_file() and (file.suffix == ".json" or (os.sep in model and model.count(os.sep) > 1)):
        raise ModelError(f"{model}: no such file")
    return file if file.is_file() else None


def _read(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file}: transformers cannot read the config: {_line(error)}") from None
    if not isinstance(given, dict) or "model_type" not in given:
        raise ModelError(f"{file}: not a model's config: it has no `model_type`")
    return given


def _config(given: Mapping[str, Any], where: str, transformers: Any) -> Any:
    try:
        fields: dict[str, Any] = _with_numbers(given)
        return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # noqa: BLE001 - each class validates its fields in its own way
        raise ModelError(f"{where}: transformers cannot read the config: {_line(error)}") from None


def _with_numbers(value: Any) -> Any:
    """A config's data with the numbers that JSON has no words for: transformers writes {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_numbers(one) for name, one in value.items()}
    return [_with_numbers(one) for one in value] if isinstance(value, list) else value


def _named(model: str, transformers: Any) -> Any:
    load = transformers.AutoConfig.from_pretrained
    try:
        try:
            return load(model, local_files_only=True)  # what is cached is at hand, and asking the hub takes its time
        except OSError:
            return load(model)
    except OSError as error:
        message = f"{model}: neither a folder, nor a config file, nor a name that is cached here: {_line(error)}"
        raise ModelError(message) from None
    except (ValueError, KeyError) as error:
        raise ModelError(f"{model}: transformers cannot read the config: {_line(error)}") from None


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
