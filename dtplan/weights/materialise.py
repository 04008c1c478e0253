"""From the meta device to storage: each tensor allocated once, ties kept, computed buffers computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dtplan.weights.state import mesh_device, original_name

__all__ = ["materialise", "put_in", "with_owner"]


def materialise(model: nn.Module, device: torch.device | str | None = None) -> set[str]:
    """Gives every meta parameter and buffer of ``model`` storage; returns the names that still have no value.

    A tensor stays the same object under all its names, a parameter with its ``requires_grad`` and its place
    in FSDP2, and gets storage for this rank's block only. Parameters go to ``device`` (default: the mesh's;
    "cpu" under FSDP2's CPU offload), buffers to the mesh's device. Buffers that were on meta are computed by
    transformers' own ``_init_weights``. Values that exist are kept.
    """
    home = mesh_device(model)
    there = torch.device(device) if device is not None else home or torch.device("cpu")
    undefined = {id(param) for param in model.parameters() if param.is_meta}
    for param in model.parameters():
        if param.is_meta:
            put_in(param, torch.empty_like(param, device=there))
    empty = {id(buffer) for buffer in model.buffers() if buffer.is_meta}
    for buffer in model.buffers():
        if buffer.is_meta:
            put_in(buffer, torch.empty_like(buffer, device=home or there))
        elif home is not None and buffer.device != home:
            put_in(buffer, buffer.to(home))
    undefined |= _recompute_buffers(model, empty)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {original_name(name) for name, tensor in named if id(tensor) in undefined}


@torch.no_grad()
def put_in(tensor: Tensor, content: Tensor) -> None:
    """Puts ``content`` under the object ``tensor``, at which ties, optimizers and FSDP2 go on pointing.

    FSDP2 pads the new storage to even size by itself, at the first forward.
    """
    if isinstance(tensor, nn.Parameter):
        content = nn.Parameter(content, requires_grad=tensor.requires_grad)
    content.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, content)


def _recompute_buffers(model: nn.Module, empty: set[int]) -> set[int]:
    """Runs the init of the modules that own an ``empty`` buffer; the ids of those that it gave no value.

    transformers >= 5 computes rotary frequencies, causal masks and the like in ``_init_weights`` of the
    nearest model around the module. Its init functions leave tensors alone that carry ``_is_hf_initialized``.
    """
    undefined: set[int] = set()
    for owner, module in with_owner(model, None):
        before = {
            name: (buffer, buffer._version)
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) in empty
        }
        if before and owner is not None:
            with torch.no_grad(), _parameters_kept(module):
                owner._init_weights(module)  # type: ignore[operator]
        for name, (buffer, version) in before.items():
            # Writing a tensor in place raises its version; a replaced one is another object.
            if module._buffers[name] is buffer and buffer._version == version:
                undefined.add(id(buffer))
    return undefined


def with_owner(module: nn.Module, owner: nn.Module | None) -> Iterator[tuple[nn.Module | None, nn.Module]]:
    """Every module from ``module`` down, each with the nearest enclosing one that knows ``_init_weights``."""
    owner = module if hasattr(module, "_init_weights") else owner
    yield owner, module
    for child in module.children():
        yield from with_owner(child, owner)


@contextmanager
def _parameters_kept(module: nn.Module) -> Iterator[None]:
    """Marks the module's parameters as initialised to transformers' init functions, and unmarks them."""
    marked = [param for param in module.parameters() if not hasattr(param, "_is_hf_initialized")]
    for param in marked:
        param._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param in marked:
            del param._is_hf_initialized  # type: ignore[attr-defined]
