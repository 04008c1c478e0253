"""Weights without a checkpoint: the model's own initial distributions, the same global values at every degree.

Every rank draws the whole of a unit (a transformer block, or a module outside of them) on the CPU, from a seed that
only depends on the user's seed and on names, and keeps its own blocks. So neither the mesh, nor the device, nor the
order of units has a say, and no rank holds more than one whole unit at a time.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtplan._errors import WeightsError
from dtplan.planner.apply import Applied, applied
from dtplan.planner.stored import Stored
from dtplan.weights.agree import agreed, meet
from dtplan.weights.materialise import materialise, with_owner
from dtplan.weights.state import StateTensor, original_name, state_tensors

__all__ = ["initialize"]

_DRAWING = threading.Lock()
"""Simulated ranks are threads and share the random generator: one module is drawn at a time."""


def initialize(model: nn.Module, seed: int = 0, *, meet_seconds: float = 30.0) -> None:
    """Gives every parameter of a parallelized model the value that the model's own init draws for it.

    Collective over all ranks. The same ``seed`` gives the same whole tensors at every tp, shard and replicate degree,
    on CPUs and GPUs. Distributions are those of the model: transformers' ``_init_weights``, and ``reset_parameters``
    of a module that it leaves alone. A model on the meta device gets its storage, computed buffers are computed, ties
    are kept. The random generators are left as they were.

    Raises:
        WeightsError: the same on every rank: a rank did not call, or a parameter is left without a value.
        ApplyError: the model is not parallelized.
    """
    done = applied(model)
    meet("initialize", meet_seconds)
    state_tensors(model)  # FSDP2 puts its sharded parameters back
    undefined: set[str] = agreed(lambda: materialise(model, "cpu" if done.cpu_offload else None))
    agreed(lambda: _initialize(model, seed, done, undefined))


@torch.no_grad()
def _initialize(model: nn.Module, seed: int, done: Applied, undefined: set[str]) -> None:
    states = state_tensors(model, done.stored)
    tree = _unfused(model, done.stored)
    draw = _Draw(
        seed=seed,
        targets={name: state for state in states for name in state.names},
        homes=_homes(tree),
        owners={id(module): owner for owner, module in with_owner(tree, None)},
    )
    drawn: set[str] = set()
    for name, module, whole in _groups(tree, "", set(done.bound.fsdp_units)):
        for source, value in draw.group(name, module, whole=whole):
            for block in draw.targets[source].blocks():
                block.local.copy_(value[block.slices])
            if not _is_blank(value):
                drawn.update(draw.targets[source].names)
    parameters = {id(parameter) for parameter in model.parameters()}
    left = [state.names[0] for state in states if id(state.tensor) in parameters and state.names[0] not in drawn]
    left += sorted(undefined - {owner for state in states for owner in state.owners})
    if left:
        raise WeightsError(
            f"{len(left)} tensors are left without a value: {', '.join(left[:8])}; neither the model's `_init_weights` "
            "nor `reset_parameters` of their modules gives them one: build the model on the CPU, or load a checkpoint"
        )


def _unfused(model: nn.Module, stored: Mapping[str, Stored]) -> nn.Module:
    """``model``, or if layers of it were fused, the model as it was, on meta: its own init knows those modules alone.

    Raises WeightsError when it cannot be built again.
    """
    if all(part.source == name for name, one in stored.items() for part in one.parts):
        return model
    kind: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config = getattr(model, "config", None)
    if config is None:
        raise WeightsError(f"{kind.__name__} has fused layers and no config, so its init cannot be known: te='off'")
    with torch.device("meta"):
        built: nn.Module = kind(config)
    return built


def _homes(model: nn.Module) -> dict[int, str]:
    """Parameter -> the name under which it is drawn: of a tied one the name that transformers ties the others to."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(original_name(name))
    return {key: min(found, key=lambda name: name in tied) for key, found in names.items()}


def _groups(module: nn.Module, name: str, units: set[str]) -> Iterator[tuple[str, nn.Module, bool]]:
    """What is drawn at one time: ``(name, module, whether with all that is inside)``.

    A unit of the plan or an element of a list of modules; a module with none of them inside; and what lies around
    them, each module for itself.
    """
    if not any(_begins_unit(inside, f"{name}.{path}", units) for path, inside in _inside(module)):
        yield name, module, True
        return
    for path, child in module.named_children():
        full_name = f"{name}.{path}" if name else path
        if isinstance(module, nn.ModuleList) or full_name in units:
            yield full_name, child, True
        else:
            yield from _groups(child, full_name, units)
    yield name, module, False


def _inside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path, inside) for path, inside in module.named_modules() if inside is not module)


def _begins_unit(module: nn.Module, name: str, units: set[str]) -> bool:
    return isinstance(module, nn.ModuleList) or name.removeprefix(".") in units


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """Draws whole values, group by group."""

    seed: int
    targets: Mapping[str, StateTensor]
    """Name in checkpoints -> what of the model it fills."""
    homes: Mapping[int, str]
    owners: Mapping[int, nn.Module | None]
    """Module -> the model around it whose ``_init_weights`` is for it."""

    def group(self, name: str, module: nn.Module, *, whole: bool) -> Iterator[tuple[str, Tensor]]:
        """``(name, whole value)`` of every parameter whose home is in the group."""
        members = list(self._twins(name, module, whole=whole))
        for full_name, real, twin in members:
            with _DRAWING:
                self._run(full_name, self.owners[id(real)], twin)
        for full_name, _, twin in members:
            for key, value in twin._parameters.items():
                if value is not None and not value.is_meta:
                    yield original_name(_join(full_name, key)), value.detach()

    def _twins(self, name: str, module: nn.Module, *, whole: bool) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        """``(name, module, its twin with whole parameters)``, children first, as transformers initialises."""
        twin: nn.Module = object.__new__(type(module))
        twin.__dict__ = dict(module.__dict__)
        twin._modules = {}
        twin._parameters = {key: self._blank(_join(name, key), one) for key, one in module._parameters.items()}
        twin._buffers = {key: None if one is None else one.clone() for key, one in module._buffers.items()}
        for path, child in module._modules.items() if whole else ():
            if child is not None:
                inside = list(self._twins(_join(name, path), child, whole=True))
                twin._modules[path] = inside[-1][2]
                yield from inside
        yield name, module, twin

    def _blank(self, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """A whole parameter to be drawn, nan for now; one without storage if it is drawn under another name."""
        if parameter is None:
            return None
        name = original_name(name)
        home = self.homes[id(parameter)] == name
        if home and name not in self.targets:
            raise WeightsError(
                f"{name} is in no layer of the sharded model: its layers were changed after it was built"
            )
        like = self.targets[name].tensor if home else parameter
        fill = math.nan if like.is_floating_point() else 0
        shape = self.targets[name].shape if home else parameter.shape
        blank = torch.full(shape, fill, dtype=like.dtype, device="cpu" if home else "meta")
        twin = nn.Parameter(blank, requires_grad=False)
        if not home:
            twin._is_hf_initialized = True  # type: ignore[attr-defined] # so transformers' init functions pass it by
        return twin

    def _run(self, name: str, owner: nn.Module | None, twin: nn.Module) -> None:
        """The inits of one module, from a seed of its own."""
        generator = torch.default_generator
        before = generator.get_state()
        number = hashlib.sha256(f"{self.seed} {original_name(name)}".encode()).digest()
        generator.manual_seed(int.from_bytes(number[:8], "little") >> 1)
        try:
            if owner is not None:
                owner._init_weights(twin)  # type: ignore[operator]
            reset = getattr(twin, "reset_parameters", None)
            if reset is not None and any(_is_blank(one) for one in twin._parameters.values()):
                reset()  # what the module does when it is built, before its model's own init
                if owner is not None:
                    owner._init_weights(twin)  # type: ignore[operator]
        except AttributeError as error:
            raise WeightsError(
                f"the init of {name or type(twin).__name__} needs more than its own parameters ({error}); build the "
                "model on the CPU and not on meta"
            ) from error
        finally:
            generator.set_state(before)


def _is_blank(value: Tensor | None) -> bool:
    """Whether something of it was not drawn; a sum is nan if a term is, and takes no memory."""
    return value is not None and value.is_floating_point() and not value.is_meta and bool(value.sum().isnan())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
