"""Generation on the tp axis: every rank draws the next token, all alike, and caches the heads that it computes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtplan.planner.dropout import generator_of

_SHAPE_OF_CACHE = "_get_static_cache_init_shape"
"""Private transformers API, tried on 5.17 and 5.24; a release without it makes no cache beforehand."""


def draw_alike(model: nn.Module, tp: DeviceMesh) -> None:
    """Let ``model.generate`` begin on the random stream of the first rank of ``tp``.

    Ranks that were seeded apart would each go on with tokens of their own, and the model reads them as one sequence.
    """
    generate: Any = getattr(model, "generate", None)
    if generate is None or tp.size() == 1:
        return

    @functools.wraps(generate)
    def alike(*args: Any, **kwargs: Any) -> Any:
        share_stream(tp)
        return generate(*args, **kwargs)

    model.generate = alike  # type: ignore[assignment]


def cache_own_heads(model: nn.Module, tp: DeviceMesh) -> None:
    """Let every layer of a static cache make its tensors for the heads that it is given, those of its rank.

    For a prompt in chunks ``model.generate`` makes them beforehand, with the config's heads, if it knows their shape.
    """
    if tp.size() > 1 and hasattr(model, _SHAPE_OF_CACHE):
        setattr(model, _SHAPE_OF_CACHE, _unknown)


def _unknown() -> None:
    return None


def share_stream(tp: DeviceMesh) -> None:
    """Give the default generator of every rank of ``tp`` the state that it has on the first. Collective."""
    on_cpu = tp.device_type == "cpu"
    generator = generator_of(torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device()))
    own = generator.get_state()
    first = own.to(tp.device_type, copy=True)
    dist.broadcast(first, group=tp.get_group(), group_src=0)
    if not torch.equal(first.cpu(), own):
        generator.set_state(first.cpu())
