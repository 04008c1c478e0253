"""Which random numbers dropout draws on the tp axis.

Ranks are seeded alike, so their generators agree: what every rank holds whole, or as a term of one sum, is masked alike
everywhere, as it must be. A value that is cut (heads, columns, under sequence parallelism the residual stream) is
another one on every rank and must not get the same mask. While such a value is in hand, the generator is on a stream of
the rank's own; it is seeded by one draw of the shared stream and the tp rank, so recomputation, which puts the
generator back to where it was, repeats it, and a saved generator state resumes it. Nothing is wrapped in a model
without dropout.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtplan._errors import ApplyError
from dtplan.plan.spec import Layout
from dtplan.planner.bound import BoundModule, BoundPlan
from dtplan.planner.styles import Tp

Forward = Callable[..., Any]

_TAG = 0x5D7A_1000 << 32
"""In the upper half of a rank's seeds, by which its streams are known; a CPU generator runs on the lower half alone."""
_LOW = 0xFFFF_FFFF
_SPREAD = 0x9E37_79B1
"""Odd, so that ranks get different seeds for one draw (Knuth's multiplicative hash)."""
_NAMES = re.compile(r"(^|_|p)drop(out)?(_p|_prob|_rate)?$")
_ATTENTION = re.compile(r"att.*drop")


class Streams:
    """The two streams of one rank: the shared one, and while it is left, where it was left."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._left: dict[torch.device, tuple[int, Tensor]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def own(self, device: torch.device) -> None:
        """Go over to the rank's own stream, unless the generator is on it."""
        generator = generator_of(device)
        seed = generator.initial_seed()
        if device in self._left and seed == self._left[device][0]:
            return
        if seed & ~_LOW == _TAG:
            raise ApplyError(
                "the random generator is on a stream of dropout that began elsewhere: recompute whole units "
                "(activation_checkpointing=True) and not parts of them, or, on simulated ranks, which share one "
                "generator, set dropout to 0"
            )
        drawn = int(torch.randint(_LOW, (), device="cpu").item())
        seed = _TAG | (drawn + _SPREAD * (self._rank + 1)) & _LOW
        self._left[device] = seed, generator.get_state()
        generator.manual_seed(seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def shared(self) -> None:
        """Go back to the shared stream, to where it was left."""
        for device, (seed, state) in self._left.items():
            generator = generator_of(device)
            if generator.initial_seed() == seed:
                generator.set_state(state)
        self._left.clear()


def generator_of(device: torch.device) -> torch.Generator:
    """From which torch draws on ``device`` by default."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def add_streams(model: nn.Module, bound: BoundPlan, tp: Tp) -> None:
    """Let the generator follow the layouts of values, module by module; units and the model end where they began."""
    if tp.group.size == 1 or not drops(model):
        return
    streams = Streams(tp.group.rank)
    units = {*bound.fsdp_units, ""}
    for entry in bound.modules:
        after = _after(entry)
        for name in entry.names:
            before = None if name in units else _before(entry)  # where recomputation begins
            if bound.sequence_parallel or drops(_stretch(model, bound, name)):
                module = model.get_submodule(name)
                module.forward = _followed(module, streams, before=before, after=after)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and bound.sequence_parallel:
            module.forward = _on_parts(module, streams)  # type: ignore[method-assign]
    for name in units:
        unit = model.get_submodule(name)
        unit.forward = _ending_shared(unit.forward, streams)


def _before(module: BoundModule) -> bool | None:
    """Whether the value that the module works on is cut; None: the rule does not say."""
    return _is_cut(module.inputs[0].dst) if module.inputs and module.shared is None else None


def _after(module: BoundModule) -> bool | None:
    """Whether the module's output is cut; None: the rule does not say."""
    if module.outputs:  # a global shape is for code outside the blocks, which begins and ends on the shared stream
        return _is_cut(module.outputs[0].dst) and not module.outputs[0].global_shape
    gives_columns = module.style == "colwise" or module.kind == "te.LayerNormLinear"
    return True if gives_columns and any(t.placement.dim is not None for t in module.tensors) else None


def _is_cut(layout: Layout) -> bool:
    return layout.dim is not None


def _stretch(model: nn.Module, bound: BoundPlan, name: str) -> nn.Module:
    """The nearest module around ``name`` in which what it cuts is joined again."""
    joins = [n for m in bound.modules for n in m.names if any(move.src.word == "P" for move in m.outputs)]
    while name:
        name = name.rpartition(".")[0]
        if any(join.startswith(f"{name}.") for join in joins):
            break
    return model.get_submodule(name)


def drops(module: nn.Module) -> bool:
    """Whether dropout may act in a module: a Dropout inside, or a number whose name says so."""
    return any(p > 0 for inner in module.modules() for p in _probabilities(inner))


def _probabilities(module: nn.Module) -> Iterator[float]:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        yield module.p
    config = getattr(module, "config", None)
    named = [(name, value) for name, value in vars(module).items() if _NAMES.search(name)]
    named += [(name, value) for name, value in vars(config).items() if _ATTENTION.search(name)] if config else []
    yield from (value for _, value in named if isinstance(value, int | float) and not isinstance(value, bool))


def _followed(module: nn.Module, streams: Streams, *, before: bool | None, after: bool | None) -> Forward:
    inner = module.forward

    def follow(value: Any, *, cut: bool | None) -> None:
        if cut is False:
            streams.shared()
        elif cut and (tensor := _first_tensor(value)) is not None:
            streams.own(tensor.device)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        follow((*args, *kwargs.values()), cut=before)
        out = inner(*args, **kwargs)
        follow(out, cut=after)
        return out

    return forward


def _on_parts(module: nn.Dropout, streams: Streams) -> Forward:
    """Dropout of a DTensor that is cut (the embedding's output under sequence parallelism): each rank its part."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not (module.training and isinstance(input, DTensor) and any(p.is_shard() for p in input.placements)):
            return inner(input)
        local = input.to_local()
        streams.own(local.device)
        try:
            dropped = inner(local)
        finally:
            streams.shared()
        return DTensor.from_local(
            dropped, input.device_mesh, input.placements, run_check=False, shape=input.shape, stride=input.stride()
        )

    return forward


def _ending_shared(inner: Forward, streams: Streams) -> Forward:
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        finally:
            streams.shared()

    return forward


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    return next((v for v in value if isinstance(v, Tensor)), None) if isinstance(value, tuple) else None
