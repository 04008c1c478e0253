"""Ranks that share one GPU, over gloo, where there are fewer GPUs than ranks: for what they compute, and no times."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dtplan

_LIBRARY = torch.library.Library("_c10d_functional", "IMPL")


def begin() -> bool:
    """Set up ranks with a GPU each, or sharing one, all of them one tp group: whether they share it."""
    world = int(os.environ["WORLD_SIZE"])
    shared = torch.cuda.device_count() < world
    if shared:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:gloo")
        _gather_on_the_cpu()
    dtplan.init(tensor_parallel_degree=world)
    return shared


def _gather_on_the_cpu() -> None:
    """Gather and scatter there what torch's functional collectives would hand to gloo as it is: it crashes on GPUs."""
    functional = torch.ops._c10d_functional

    def moved(op: Any, x: Tensor, *args: Any) -> Tensor:
        out: Tensor = functional.wait_tensor(op(x.cpu(), *args)).to(x.device)
        return out

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        _LIBRARY.impl(name, functools.partial(moved, getattr(functional, name).default), "CUDA")
