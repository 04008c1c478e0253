"""A dict of torch's ``ParallelStyle``s, as ``parallelize_module`` takes it."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from dtplan.author.importers.assemble import Imported, assemble
from dtplan.author.importers.told import ImportPlanError, Told, cannot

Styles = Mapping[str, ParallelStyle]


def from_styles(model: nn.Module, styles: Styles) -> Imported:
    """The plan that ``torch.distributed.tensor.parallel.parallelize_module(model, mesh, styles)`` would apply.

    A value that a style says to be cut along the sequence is in the layout `residual`: what torch fixes, the switch
    ``sequence_parallel`` turns on.

    Args:
        model: the model, which may be on the meta device.
        styles: name, or pattern of a segment each, to style.

    Raises:
        ImportPlanError: there are no styles, or a value is none.
    """
    if not styles:
        raise ImportPlanError("expected names and their torch ParallelStyles, got none")
    for key, style in styles.items():
        if not isinstance(style, ParallelStyle):
            raise ImportPlanError(f"`{key}` is a {type(style).__name__}, no torch ParallelStyle")
    matched: dict[str, tuple[str, ParallelStyle]] = {}
    for name, _ in model.named_modules():
        for key, style in styles.items():
            if _fits(key, name):
                if name in matched:
                    raise ImportPlanError(f"`{matched[name][0]}` and `{key}` both name `{name}`, which torch refuses")
                matched[name] = (key, style)
    dead = [key for key in styles if key not in {key for key, _ in matched.values()}]
    regions = {name for name, (_, style) in matched.items() if _hands_out_whole(style)}
    told = dict(_told(model, {name: style for name, (_, style) in matched.items()}, regions))
    return assemble(model, told, source="torch parallel styles", dead=dead, sequence=_cuts_sequence(told))


def from_code(model: nn.Module, where: str) -> Imported:
    """As ``from_styles``, of the dict at ``module:attribute`` or ``file.py:attribute``, whose code is run.

    The attribute is the dict, or a function that gives it, called with the model if it takes an argument.

    Raises:
        ImportPlanError: there is no such module or attribute.
    """
    place, colon, attribute = where.rpartition(":")
    if not colon or not attribute.isidentifier():
        raise ImportPlanError(f"{where!r} is not MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE")
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    if not hasattr(module, attribute):
        raise ImportPlanError(f"{place} has no `{attribute}`")
    found = getattr(module, attribute)
    if callable(found):
        takes = found.__code__.co_argcount if hasattr(found, "__code__") else 0
        found = found(model) if takes else found()
    if not isinstance(found, Mapping):
        raise ImportPlanError(f"{where} is a {type(found).__name__}, no dict of names to torch ParallelStyles")
    return from_styles(model, found)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportPlanError(f"cannot import {name}: {error}") from None


def _file(path: Path) -> Any:
    if not path.is_file():
        raise ImportPlanError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fits(key: str, name: str) -> bool:
    """Whether torch finds ``name`` by ``key``: segment by segment; an empty key is the model itself."""
    parts, segments = (key.split(".") if key else []), (name.split(".") if name else [])
    return len(parts) == len(segments) and all(fnmatch.fnmatchcase(s, p) for s, p in zip(segments, parts, strict=True))


def _told(model: nn.Module, styles: Styles, regions: set[str]) -> Iterator[tuple[str, Told]]:
    for name, style in styles.items():
        embedding = isinstance(model.get_submodule(name), nn.Embedding)
        inside = any(name.startswith(f"{region}.") for region in regions)
        match style:
            case ColwiseParallel():
                yield name, _colwise(style, prepared=embedding or inside)
            case RowwiseParallel():
                yield name, _rowwise(style, embedding=embedding)
            case SequenceParallel():
                yield name, _sequence(style)
            case PrepareModuleInput():
                yield name, _prepared(_inputs(style), {})
            case PrepareModuleOutput():
                yield name, _prepared({}, _outputs(style))
            case PrepareModuleInputOutput():
                yield name, _prepared(_inputs(style.prepare_module_input), _outputs(style.prepare_module_output))
            case _:
                yield name, cannot(f"torch's {type(style).__name__}")


def _colwise(style: Any, *, prepared: bool) -> Told:
    """``prepared``: the input needs nothing done to it, since a module above was given it whole."""
    (arrives,), (leaves,) = style.input_layouts, style.output_layouts
    taken = {} if prepared else {"input": "sum" if arrives == Replicate() else _move(arrives, Replicate())}
    gathers = {Shard(-1): {}, Replicate(): {"output": "gather"}}.get(leaves)
    if gathers is None or None in taken.values():
        return cannot(f"ColwiseParallel with input_layouts={arrives} and output_layouts={leaves}")
    return Told(rule={"style": "colwise", **taken, **gathers})


def _rowwise(style: Any, *, embedding: bool) -> Told:
    (arrives,), (leaves,) = style.input_layouts, style.output_layouts
    taken = {} if embedding else {Shard(-1): {}, Replicate(): {"input": "slice"}}.get(arrives)
    given = "sum" if leaves == Replicate() else _name(leaves)
    if taken is None or given is None:
        return cannot(f"RowwiseParallel with input_layouts={arrives} and output_layouts={leaves}")
    output = {"to": given, "global_shape": True} if given == "residual" and not style.use_local_output else given
    return Told(rule={"style": "vocab" if embedding else "rowwise", **taken, "output": output})


def _sequence(style: Any) -> Told:
    sharding = style.sequence_sharding
    (layout,) = sharding if isinstance(sharding, tuple) else (sharding,)
    if layout != Shard(1):
        return cannot(f"SequenceParallel along {layout}")
    seen = {} if style.use_local_output else {"output": {"to": "residual", "global_shape": True}}
    return Told(rule={"style": "norm", **seen})


def _prepared(inputs: dict[Any, Any], outputs: dict[Any, Any]) -> Told:
    if None in [*inputs.values(), *outputs.values()]:
        return cannot("its layouts")
    rule: dict[str, Any] = {"input": inputs} if inputs else {}
    if outputs:
        rule["output"] = outputs[0] if list(outputs) == [0] else outputs
    return Told(rule=rule)


def _inputs(style: Any) -> dict[Any, Any]:
    """Position or name of an input -> its move; None for one without words."""
    wanted = [*(style.desired_input_layouts or ())]
    moves: dict[Any, Any] = {i: _move(a, wanted[i]) for i, a in enumerate(style.input_layouts or ()) if a is not None}
    named = style.desired_input_kwarg_layouts or {}
    return moves | {key: _move(a, named[key]) for key, a in (style.input_kwarg_layouts or {}).items() if a is not None}


def _outputs(style: Any) -> dict[Any, Any]:
    pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
    return {i: _move(a, b) for i, (a, b) in enumerate(pairs) if a is not None}


def _name(layout: Placement | None) -> str | None:
    """A layout in the words of the plan language; None for one that it has no word for here."""
    if layout == Shard(1):
        return "residual"
    if layout == Replicate():
        return "R"
    if isinstance(layout, Partial):
        return "P"
    return f"S({layout.dim})" if isinstance(layout, Shard) else None


def _move(arrives: Placement, wanted: Placement) -> Any:
    """From one layout to another; what is cut along the sequence comes from the residual stream by itself."""
    src, dst = _name(arrives), _name(wanted)
    if src is None or dst is None:
        return None
    return dst if src == "residual" else {"from": src, "to": dst}


def _hands_out_whole(style: ParallelStyle) -> bool:
    """Whether the layers below are given a DTensor, so that they sum no gradient themselves."""
    given = getattr(style, "prepare_module_input", style)
    if not isinstance(given, PrepareModuleInput) or given.use_local_output:
        return False
    wanted = [*(given.desired_input_layouts or ()), *(given.desired_input_kwarg_layouts or {}).values()]
    return Replicate() in wanted


def _cuts_sequence(told: Mapping[str, Told]) -> bool:
    return any("residual" in str(said.rule) or said.rule.get("style") == "norm" for said in told.values())
