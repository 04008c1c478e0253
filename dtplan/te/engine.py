"""TransformerEngine itself: the one place that imports it. Tried on 2.20 with torch 2.11 and CUDA 13 on H200."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """The modules of TransformerEngine's torch package, and where and in which dtypes its layers compute."""

    layers: Any
    recipes: Any
    buffers: Any
    """Where userbuffers are set up."""
    version: str
    devices: frozenset[str] = frozenset({"cuda"})
    dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})


@functools.cache
def find() -> Engine | str:
    """TransformerEngine, or why there is none."""
    try:
        layers = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
        buffers = importlib.import_module("transformer_engine.pytorch.module.base")
        version = str(importlib.import_module("transformer_engine").__version__)
    except ImportError as error:
        return f"TransformerEngine cannot be imported ({error}): pip install 'dtplan[te]'"
    except OSError as error:  # a library that it needs is not on this machine
        return f"TransformerEngine does not load here ({error})"
    return Engine(layers=layers, recipes=recipes, buffers=buffers, version=version)
