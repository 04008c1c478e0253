"""Numbers that a module's forward works with and that are sizes of the whole: a rank's are a part of them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def number_at(module: nn.Module, path: str) -> Any:
    """The attribute at a dotted path, such as ``num_heads`` or ``config.num_attention_heads``; None if not there."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def divide(module: nn.Module, paths: tuple[str, ...], parts: int) -> None:
    """Divide each number by ``parts``. An object on the way, as the config that all modules share, is copied first."""
    copied: dict[str, Any] = {}
    for path in paths:
        *owners, name = path.split(".")
        owner: Any = module
        for depth, attribute in enumerate(owners):
            where = ".".join(owners[: depth + 1])
            if where not in copied:
                copied[where] = copy.copy(getattr(owner, attribute))
                setattr(owner, attribute, copied[where])
            owner = copied[where]
        setattr(owner, name, getattr(owner, name) // parts)
