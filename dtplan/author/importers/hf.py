"""transformers' tensor-parallel plans: ``base_model_tp_plan``, the class's own rules, and the rule for embeddings.

A rule on a module cuts its parameters and changes its forward; a rule on a parameter cuts that one, and wins for it.
What no rule names is whole, and its gradient is not summed.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from dtplan._errors import did_you_mean
from dtplan.author.importers.assemble import Imported, assemble
from dtplan.author.importers.told import (
    EMBEDDING_COLWISE,
    REDUCED,
    VOCAB,
    WHOLE,
    WHOLE_SUMMED,
    ImportPlanError,
    Told,
    cannot,
    colwise,
    rowwise,
)

_MLA = Told(rule={"style": "replicate", "grad": "complete", "output": {"sum_grad_of_last": "qk_rope_head_dim"}})
_EXPERT_PARALLEL = cannot("whole experts on some ranks (expert parallelism) are not in the plan language")

MODULE_STYLES: dict[str, Told | None] = {
    "colwise": colwise(),
    "colwise_gather_output": colwise(gather=True),
    "colwise_rep": colwise(gather=True),
    "rowwise": rowwise(),
    "rowwise_split_input": rowwise(split=True),
    "rowwise_rep": rowwise(split=True),
    "embedding_rowwise": VOCAB,
    "embedding_colwise": EMBEDDING_COLWISE,
    "packed_colwise": colwise(parts=2),
    "packed_rowwise": cannot("it cuts parameters in halves and leaves the module's forward as it is"),
    "replicated_with_grad_allreduce": WHOLE_SUMMED,
    "sequence_parallel": WHOLE_SUMMED,  # the input is taken as a part of the sequence already
    "moe_tp_experts": None,  # by the arguments of the module's forward
    "moe_identity_expert": cannot("an input that is divided by the degree, because a sum over ranks follows"),
    "mla_kv_a_proj": _MLA,
    "local_params": Told(),
    "replicate": WHOLE,
    "all_reduce": REDUCED,
    "ep_router": _EXPERT_PARALLEL,
    "ep_dispatch_experts": _EXPERT_PARALLEL,
    "megamoe_experts": _EXPERT_PARALLEL,  # these two: of transformers 5.17, no longer of 5.24
    "megamoe_router": _EXPERT_PARALLEL,
    "grouped_gemm": _EXPERT_PARALLEL,
}
"""Every style that transformers 5.17 and 5.24 register, and what it does to a module."""


def from_hf(model: nn.Module, rules: Mapping[str, str] | None = None) -> Imported:
    """The plan that transformers would apply to ``model``, which may be on the meta device.

    Args:
        model: a transformers model; its ``tp_plan`` is read: the config's rules under the base model's name, those of
            the class (for ``lm_head``) and the one for the input embedding.
        rules: path or path with ``*`` for numbers -> style name, laid over the model's own, as
            ``DistributedConfig(tp_plan=...)`` does.

    Raises:
        ImportPlanError: there are no rules, or a style is not known.
    """
    plan = {**(getattr(model, "tp_plan", None) or {}), **(rules or {})}
    if not plan:
        raise ImportPlanError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}: its config gives no "
            "`base_model_tp_plan`; `dtplan new --model CONFIG` drafts a plan from the model itself"
        )
    for path, style in plan.items():
        if style not in MODULE_STYLES:
            near = did_you_mean(str(style), MODULE_STYLES)
            hint = f"{near} known:" if near else "known:"
            raise ImportPlanError(
                f"the rule for `{path}` has the style {style!r}, which is not known; {hint} "
                f"{', '.join(sorted(MODULE_STYLES))}; to replace that rule alone, give another: {{{path!r}: STYLE}}"
            )
    told = dict(_told(model, plan))
    names = {generic(n) for n, _ in model.named_modules()} | {generic(n) for n, _ in model.named_parameters()}
    dead = sorted(path for path in plan if path not in names)
    return assemble(model, told, source="transformers' tensor-parallel plan", dead=dead)


def read_rules(file: str) -> dict[str, str]:
    """Rules from a JSON file of paths to style names.

    Raises:
        ImportPlanError: it cannot be read, or is something else.
    """
    try:
        given = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ImportPlanError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(given, dict) or not all(isinstance(style, str) for style in given.values()):
        raise ImportPlanError(
            f'{file}: expected a mapping from paths to style names: {{"layers.*.mlp.up_proj": "colwise"}}'
        )
    return given


def generic(name: str) -> str:
    """A name with ``*`` for each whole number in it, as transformers writes its rules."""
    return re.sub(r"\.\d+(\.|$)", lambda found: ".*" + found[1], name)


def _told(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, Told]]:
    alternating = _alternating(model)
    for name, module in model.named_modules():
        style = plan.get(generic(name)) if name else None
        if style is not None:
            yield name, _of_module(module, style)
        for each, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{name}.{each}" if name else each
            own = plan.get(generic(path))
            if own is not None:
                said = _of_parameter(each, parameter, own)
                halves = said.parts == 1 and "shard" in said.rule and path.endswith(alternating)
                yield path, dataclasses.replace(said, parts=2) if halves else said


def _alternating(model: nn.Module) -> tuple[str, ...]:
    """Ends of names of parameters whose checkpoints alternate the rows of two halves.

    transformers cuts rows as the checkpoint has them and reorders each rank's own, so a plain cut is one of each half.
    Private transformers API, tried on 5.17 and 5.24: ``conversion_mapping``.
    """
    from transformers import conversion_mapping

    model_type = getattr(getattr(model, "config", None), "model_type", "")
    found = conversion_mapping.get_checkpoint_conversion_mapping(model_type)  # type: ignore[no-untyped-call]
    return tuple(
        pattern
        for one in found or ()
        if "Interleave" in [type(operation).__name__ for operation in getattr(one, "operations", None) or ()]
        for pattern in one.target_patterns
    )


def _of_module(module: nn.Module, style: str) -> Told:
    told = MODULE_STYLES[style]
    if told is None:
        return _experts(module)
    sized = {"colwise": "out_features", "rowwise": "in_features"}.get(str(told.rule.get("style")), "")
    if sized and not isinstance(module, nn.Embedding) and not hasattr(module, sized) and not told.why_not:
        return cannot(f"transformers refuses `{style}` on a {type(module).__name__}, which has no `{sized}`")
    return told


def _experts(module: nn.Module) -> Told:
    """Every rank computes a part of every expert, from whole hidden states and routing weights; outputs are summed."""
    arguments = list(inspect.signature(module.forward).parameters)
    summed = [arguments[i] for i in (0, 2) if i < len(arguments)]
    return Told(rule={"input": dict.fromkeys(summed, "sum"), "output": "sum"})


def _of_parameter(name: str, parameter: Tensor, style: str) -> Told:
    """A rule on a parameter cuts it, and changes no forward; styles that are only about forward leave it whole."""
    told = MODULE_STYLES[style]
    if told is _EXPERT_PARALLEL:
        return told
    rows, last = max(parameter.dim() - 2, 0), parameter.dim() - 1
    halves = 2 if style.startswith("packed") and parameter.dim() > 1 else 1
    if style.startswith("embedding"):
        return Told(rule={"shard": 0 if style == "embedding_rowwise" else 1})
    if style.startswith(("colwise", "packed_colwise")):
        return Told(rule={"shard": rows}, parts=halves)
    bias = name == "bias" if style.startswith("rowwise") else parameter.dim() == 1
    if style.startswith(("rowwise", "packed_rowwise")) and not bias:
        return Told(rule={"shard": last}, parts=halves)
    return WHOLE
