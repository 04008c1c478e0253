"""Live models of a shrunken config, with random weights, and batches for them."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dtplan.prove.shrink import CannotProveError

M = TypeVar("M", bound=nn.Module)
_MOST_PARAMETERS = 50_000_000
"""Of a shrunken model; 8 bytes each, twice on every simulated rank."""


def refuse_unfit(cls: type[nn.Module], config: Any) -> None:
    """Look at a shrunken model on the meta device before anything of it is built.

    Raises:
        CannotProveError: the class refuses the config, or has too many parameters for this CPU.
    """
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in cls(config).parameters())
    except Exception as error:
        raise CannotProveError(
            f"{cls.__name__} refuses its shrunken config ({type(error).__name__}: {error}): its sizes have other "
            "names than those that are known; nothing is said about the plan"
        ) from error
    if count > _MOST_PARAMETERS:
        raise CannotProveError(
            f"{cls.__name__} has {count:,} parameters even when shrunken, because its config has sizes of other names "
            f"than those that are known; at most {_MOST_PARAMETERS:,} are built: nothing is said about the plan"
        )


def live_model(cls: type[nn.Module], config: Any, seed: int) -> nn.Module:
    """``cls(config)`` in float64 with random parameters."""
    return randomized(cls(config).double().train(), seed)


def randomized(model: M, seed: int) -> M:
    """``model`` with parameters drawn anew: none has a gradient that is small by symmetry."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Wide matrices would push attention into one-hot weights, whose gradients vanish.
            std = 0.3 if parameter.dim() < 2 else 1.0 / math.sqrt(parameter.shape[-1])
            parameter.normal_(0.0, std, generator=generator)
    return model


def token_batch(config: Any, *, rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """Random tokens [rows, length] and their labels; each row ignores as many, so that means of parts agree."""
    generator = torch.Generator().manual_seed(seed + 1)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    vocabulary = text.vocab_size
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}
