"""Hypothesis strategies: small configs, degrees that bind, plans that mean the same, batches of tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from torch import Tensor, nn

from dtplan._errors import BindError
from dtplan.plan import paths
from dtplan.plan.library import builtin_plans
from dtplan.plan.read import parse_plan
from dtplan.plan.rule_grammar import RULE_KEYS
from dtplan.plan.spec import Plan
from dtplan.planner.bind import bind
from dtplan.testing import profiles as _profiles  # noqa: F401 - registered wherever strategies are used

ACTIVATIONS = ("silu", "gelu", "relu", "gelu_new")
_GROUPED_MLP = 8
"""Columns of an MLP come in eights, so that degrees up to 8 may cut it."""


# ---------------------------------------------------------------------------------------------------------- configs


@st.composite
def model_configs(draw: st.DrawFn, /, arch: str | type[Any], **fields: Any) -> Any:
    """Small configs of an architecture: 1 or 2 layers, any ratio of heads to kv heads, uneven vocabularies.

    ``arch`` is a ``model_type`` of transformers ("llama", "gpt_neox") or a config class; ``fields`` are config fields
    that are given instead of drawn: values, or strategies.
    """
    cls = _config_class(arch)
    default = cls()
    known = default.to_dict() | dict.fromkeys(default.attribute_map)
    drawn = {key: value for key, value in draw(_sizes(known)).items() if key in known}
    given = {key: draw(value) if isinstance(value, st.SearchStrategy) else value for key, value in fields.items()}
    return cls(**{**_FIXED, **drawn, **given})


_FIXED: dict[str, Any] = {
    "use_cache": False,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _config_class(arch: str | type[Any]) -> type[Any]:
    if not isinstance(arch, str):
        return arch
    from transformers import CONFIG_MAPPING

    found: type[Any] = CONFIG_MAPPING[arch]
    return found


@st.composite
def _sizes(draw: st.DrawFn, known: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by their usual names; those that a class lacks are left out later."""
    kv_heads = draw(st.sampled_from((2, 4, 1)))  # what comes first is drawn more often, and is what failures shrink to
    ratio = draw(st.sampled_from((1, 2)))
    heads = kv_heads * ratio
    # A part of each head is rotated in some families, and that part must hold whole pairs.
    head_dim = 8 if "rope_parameters" in known or "rotary_pct" in known else draw(st.sampled_from((4, 6, 8)))
    own_width = "head_dim" in known and draw(st.booleans())
    return {
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": draw(st.sampled_from((16, 24))) if own_width else heads * head_dim,
        "intermediate_size": _GROUPED_MLP * draw(st.integers(2, 5)),
        "vocab_size": draw(st.integers(16, 40)),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(ACTIVATIONS)),
        "use_parallel_residual": draw(st.booleans()),
        **{key: 0.0 for key in known if key.endswith(("dropout", "pdrop"))},
    }


# ---------------------------------------------------------------------------------------------------------- degrees


def degrees(
    config: Any = None,
    plan: str | Path | Plan = "auto",
    *,
    tp: Sequence[int] = (2, 4, 1),
    shard: Sequence[int] = (1,),
    replicate: Sequence[int] = (1,),
    ranks: int = 8,
) -> st.SearchStrategy[dict[str, int]]:
    """Sizes of the axes ``tp``, ``shard`` and ``replicate`` as keywords for `bind` and `assert_plan_equivalent`.

    Args:
        config: a model's config; tp degrees are then those at which ``plan`` binds to its model.
        plan: as for `bind`.
        tp: degrees to choose from, the first is what failures shrink to; likewise ``shard`` and ``replicate``.
        shard: of FSDP2.
        replicate: of FSDP2.
        ranks: the most ranks that all axes may take together.

    Raises:
        ValueError: the plan binds at none of the tp degrees.
    """
    allowed = tuple(tp) if config is None else _binding(json.dumps(config.to_dict(), default=str), config, plan, tp)
    axes = [{"tp": t, "shard": s, "replicate": r} for t in allowed for s in shard for r in replicate]
    fitting = [sizes for sizes in axes if sizes["tp"] * sizes["shard"] * sizes["replicate"] <= ranks]
    if not fitting:
        raise ValueError(f"no degrees to draw from: tp {tuple(tp)}, of which {allowed} bind, on at most {ranks} ranks")
    return st.sampled_from(fitting).map(dict)


_BINDING: dict[tuple[Any, ...], tuple[int, ...]] = {}


def _binding(key: str, config: Any, plan: str | Path | Plan, tp: Sequence[int]) -> tuple[int, ...]:
    """Those of ``tp`` at which the plan binds to the config's causal model and can be applied."""
    known = (key, plan.digest if isinstance(plan, Plan) else str(plan), *tp)
    if known not in _BINDING:
        model = on_meta(config)
        _BINDING[known] = tuple(degree for degree in tp if _binds(model, plan, degree))
    return _BINDING[known]


def _binds(model: nn.Module, plan: str | Path | Plan, tp: int) -> bool:
    try:
        bind(model, plan, tp=tp)
    except BindError:
        return False
    return True


def on_meta(config: Any) -> nn.Module:
    """The causal model of a config, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


# ------------------------------------------------------------------------------------------------------------ plans


@st.composite
def plans(draw: st.DrawFn, plan: str | Path | None = None) -> Plan:
    """A built-in plan (or the given one), written otherwise: all draws of one plan mean the same.

    Its rules come in another order, braces may be written out, groups of rules may be flat, it has another name, or it
    is extended by a plan that changes nothing.
    """
    name = draw(st.sampled_from(sorted(builtin_plans()))) if plan is None else str(plan)
    builtin = name in builtin_plans()
    path = builtin_plans()[name] if builtin else Path(name)
    if builtin and draw(st.booleans()):
        return parse_plan(json.dumps({"dtplan": 1, "name": "kin", "extends": name}), "kin.yaml")
    written = json.loads(_as_json(path, path.stat().st_mtime_ns))
    written["name"] = draw(st.sampled_from((written.get("name", path.stem), "renamed")))
    for part in (written, *written.get("variants", ())):
        if "rules" in part:
            part["rules"] = draw(_rewritten(part["rules"]))
    return parse_plan(json.dumps(written, indent=1), f"{path.stem}-rewritten.yaml")  # JSON is YAML


@functools.lru_cache(maxsize=64)
def _as_json(path: Path, changed_ns: int) -> str:
    """What a plan file says; YAML takes its time."""
    return json.dumps(yaml.safe_load(path.read_text(encoding="utf-8")))


@st.composite
def _rewritten(draw: st.DrawFn, rules: Mapping[str, Any]) -> dict[str, Any]:
    """The same rules: in another order, flat or in their groups, with or without braces."""
    entries = list(_flat(rules).items()) if draw(st.booleans()) else list(rules.items())
    if draw(st.booleans()):
        entries = [(path, rule) for pattern, rule in entries for path in _expanded(pattern)]
    return dict(draw(st.permutations(entries)))


def _flat(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Rules by whole paths: ``{a: {.: x, b.c: y}}`` becomes ``{a: x, a.b.c: y}``."""
    flat: dict[str, Any] = {}
    for pattern, rule in rules.items():
        if isinstance(rule, Mapping) and not any(key in RULE_KEYS for key in rule):
            flat |= {pattern if below == "." else f"{pattern}.{below}": inner for below, inner in _flat(rule).items()}
        else:
            flat[pattern] = rule
    return flat


def _expanded(pattern: str) -> list[str]:
    return [pattern] if pattern == "." else [".".join(segments) for segments in paths.expand(pattern)]


# ---------------------------------------------------------------------------------------------------------- batches


@st.composite
def token_batches(
    draw: st.DrawFn, vocab_size: int, *, rows: int = 3, length: int = 12, multiple_of: int = 1
) -> dict[str, Tensor]:
    """``input_ids`` and ``labels`` [1 to rows, 1 to length]: random tokens, some labels ignored (-100).

    ``multiple_of``: of the sequence length, which sequence parallelism cuts.
    """
    shape = draw(st.integers(1, rows)), multiple_of * draw(st.integers(1, max(1, length // multiple_of)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    ids = torch.randint(0, vocab_size, shape, generator=generator)
    labels = ids.clone()
    labels[:, : draw(st.integers(0, shape[1] // 2))] = -100
    return {"input_ids": ids, "labels": labels}
