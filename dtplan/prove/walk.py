"""What every module of a model did in one forward: the order, the shapes, the outputs, and where it stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Shape = tuple[int, ...]


class Walk:
    """Filled while the model that it watches runs. A module that runs again is ``name`` with ``#2`` and so on."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []
        self.inputs: dict[str, tuple[Shape, ...]] = {}
        self.outputs: dict[str, Tensor] = {}
        """A module's output, or the first tensor of it: this rank's part, detached."""
        self.inside: list[str] = []
        """Modules that are running; after an error, those in which it happened."""

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Watch ``model``."""
        handles = []
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            times = 1 + sum(call.split("#")[0] == name for call in self.started)
            call = name if times == 1 else f"{name}#{times}"
            self.started.append(call)
            self.inside.append(call)
            self.inputs[call] = tuple(tuple(t.shape) for t in _tensors([*args, *kwargs.values()]))

        return hook

    def _leave(self, _module: nn.Module, _args: object, output: Any) -> None:
        call = self.inside.pop()
        self.finished.append(call)
        found = next(iter(_tensors([output])), None)
        if found is not None and found.is_floating_point():
            local = found.to_local() if isinstance(found, DTensor) else found
            self.outputs[call] = local.detach().clone()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
