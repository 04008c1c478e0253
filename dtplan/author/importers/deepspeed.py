"""DeepSpeed's tensor-parallel training: the ``layer_specs`` of a ``partition_config``, as JSON.

Read as DeepSpeed 0.18 and newer do: the first spec with a pattern that matches ``<module>.weight`` from its beginning
counts; a layer that none matches stays whole; sizes that a module above cut layers holds are divided by the degree.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dtplan._errors import did_you_mean
from dtplan.author.importers.assemble import Imported, assemble, generic
from dtplan.author.importers.told import WHOLE, WHOLE_SUMMED, ImportPlanError, Told, cannot, colwise, rowwise

_SPEC_KEYS = ("patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output", "grad_allreduce")
_SIZES = (
    "n_heads",
    "inner_dim",
    "num_heads",
    "num_kv",
    "num_attention_heads",
    "num_attn_heads",
    "all_head_size",
    "embed_dim",
    "hidden_size",
    "num_key_value_heads",
    "num_kv_heads",
    "kv_n_heads",
    "d_model",
    "num_attention_heads_per_partition",
    "num_multi_query_groups_per_partition",
    "hidden_size_per_partition",
)
"""Attributes that DeepSpeed divides on every module above a layer that it cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """One entry of ``layer_specs``; ``number`` counts from 1."""

    number: int
    patterns: tuple[str, ...]
    kind: str
    parts: tuple[int, ...] | int = 1
    unread: str = ""
    model_types: tuple[str, ...] = ()
    gather: bool = False
    grad_sum: bool = False

    def matches(self, name: str, model_type: str) -> bool:
        return (not self.model_types or model_type in self.model_types) and any(
            re.match(p, name) for p in self.patterns
        )


def from_deepspeed(model: nn.Module, config: str | Path | Mapping[str, Any]) -> Imported:
    """The plan that a DeepSpeed config gives to ``model``, which may be on the meta device.

    Args:
        model: the model; its config's ``model_type`` chooses among specs with ``model_types``.
        config: a file or its data: a DeepSpeed config with ``tensor_parallel.partition_config``, that section, or
            ``{"layer_specs": [...]}``.

    Raises:
        ImportPlanError: it is no such config, or with ``strict_mode`` a layer has no spec.
    """
    section = _partition(_read(config))
    specs = [_spec(number, given) for number, given in enumerate(section["layer_specs"], start=1)]
    used: set[int] = set()
    told = dict(_told(model, specs, section, used))
    told |= _divided(model, told)
    dead = [f"layer_specs {spec.number}: {', '.join(spec.patterns)}" for spec in specs if spec.number not in used]
    return assemble(model, told, source="DeepSpeed's layer_specs", dead=dead)


def _read(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    try:
        given = json.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise ImportPlanError(f"{config}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ImportPlanError(f"{config}: not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ImportPlanError(f"{config}: a DeepSpeed config is a mapping, this is a {type(given).__name__}")
    return given


def _partition(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section with ``layer_specs``, wherever it lies."""
    section: Mapping[str, Any] = given.get("tensor_parallel", given)
    if section.get("preset_model"):
        raise ImportPlanError(
            f"`preset_model: {section['preset_model']}` names specs inside DeepSpeed: write them out as `layer_specs`"
        )
    section = section.get("partition_config") or section
    if not isinstance(section.get("layer_specs"), list):
        raise ImportPlanError(
            "no `layer_specs` in tensor_parallel.partition_config: without them DeepSpeed guesses layers by name, "
            "which is no plan; `dtplan new --model CONFIG` drafts one from the model"
        )
    return section


def _spec(number: int, given: Any) -> _Spec:
    where = f"layer_specs {number}"
    if not isinstance(given, dict) or not isinstance(given.get("patterns"), list):
        raise ImportPlanError(f"{where}: a spec is a mapping with a list of `patterns`")
    for key in given:
        if key not in _SPEC_KEYS:
            hint = did_you_mean(key, _SPEC_KEYS) or f"keys are {', '.join(_SPEC_KEYS)}"
            raise ImportPlanError(f"{where}: unknown key `{key}`; {hint}")
    kind = str(given.get("partition_type", "column")).lower()
    if kind not in ("column", "row", "skip"):
        raise ImportPlanError(f"{where}: `partition_type` is {kind!r}, it is column, row or skip")
    for pattern in given["patterns"]:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ImportPlanError(f"{where}: {pattern!r} is no regular expression: {error}") from None
    parts, unread = _parts(given, 0 if kind == "column" else 1)
    return _Spec(
        number=number,
        patterns=tuple(given["patterns"]),
        kind=kind,
        parts=parts,
        unread=unread,
        model_types=tuple(str(name).lower() for name in given.get("model_types") or ()),
        gather=bool(given.get("gather_output")),
        grad_sum=bool(given.get("grad_allreduce")),
    )


def _parts(given: Mapping[str, Any], usual: int) -> tuple[tuple[int, ...] | int, str]:
    """How many parts the cut dim has, or their sizes; and what of ``shape`` has no words."""
    shape, dim = given.get("shape"), given.get("partition_dim")
    dim = usual if dim is None else dim
    if shape is None:
        return 1, "" if dim == usual else f"partition_dim {dim} for this partition_type"
    if dim != usual or len(shape) != 2 or not 0 <= dim < len(shape):
        return 1, f"shape {shape} cut along dim {dim}"
    here = shape[dim]
    if isinstance(here, list):
        return tuple(here), ""
    return (here if isinstance(here, int) and here > 0 else 1), ""


def _told(
    model: nn.Module, specs: Sequence[_Spec], section: Mapping[str, Any], used: set[int]
) -> Iterator[tuple[str, Told]]:
    model_type = str(getattr(getattr(model, "config", None), "model_type", "")).lower()
    heads = tuple(section.get("lm_head_patterns") or ("lm_head", "embed_out"))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules():
        for each, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{name}.{each}" if name else each
            spec = next((s for s in specs if s.matches(path, model_type)), None)
            if spec is not None:
                used.add(spec.number)
            layer = each == "weight" and parameter.dim() == 2
            if layer and spec is None and section.get("strict_mode"):
                raise ImportPlanError(f"strict_mode: no spec of layer_specs matches `{generic(path)}`")
            if spec is not None and spec.grad_sum:
                yield path, WHOLE_SUMMED
            elif layer and spec is not None and spec.kind != "skip":
                tied = len(names[id(parameter)]) > 1
                yield name, _of_layer(module, spec, head=name.rpartition(".")[2] in heads, tied=tied)


def _of_layer(module: nn.Module, spec: _Spec, *, head: bool, tied: bool) -> Told:
    if isinstance(module, nn.Embedding):
        return cannot("an embedding that is cut along its features and not gathered")
    if spec.unread:
        return cannot(spec.unread)
    if spec.kind == "row":
        return rowwise(split=True) if head else Told(rule=rowwise().rule, **_as_parts(spec.parts))
    if spec.gather and tied:
        return WHOLE  # DeepSpeed leaves both ends of such a tie whole
    return Told(rule=colwise(gather=spec.gather).rule, **_as_parts(spec.parts))


def _as_parts(parts: tuple[int, ...] | int) -> dict[str, Any]:
    return {"sizes": parts} if isinstance(parts, tuple) else {"parts": parts}


def _divided(model: nn.Module, told: Mapping[str, Told]) -> dict[str, Told]:
    """Modules above cut layers whose sizes DeepSpeed divides; those that their code reads after building."""
    cut = [name for name, said in told.items() if said.rule.get("style") in ("colwise", "rowwise")]
    found = {}
    for name, module in model.named_modules():
        if not name or name in told or not any(each.startswith(name + ".") for each in cut) or _holds_blocks(module):
            continue
        sizes = [size for size in _SIZES if type(getattr(module, size, None)) is int and _reads(type(module), size)]  # type: ignore[arg-type]
        if sizes:
            found[name] = Told(rule={"style": "replicate", "localize": sizes})
    return found


def _holds_blocks(module: nn.Module) -> bool:
    """Whether it or a module right below it holds parameters of three dims, which DeepSpeed takes for experts."""
    owners = [module, *module.children()]
    return any(p.dim() > 2 for owner in owners for p in owner.parameters(recurse=False))


@functools.cache
def _reads(cls: Any, attribute: str) -> bool:
    """Whether a method of the class other than its constructor reads an attribute."""
    methods = [
        m
        for name, m in inspect.getmembers(cls, inspect.isfunction)
        if name != "__init__" and m.__module__ == cls.__module__
    ]
    return any(f"self.{attribute}" in inspect.getsource(method) for method in methods)
