"""The JSON Schema of a plan file, made from the grammar, for editors (hover text, completion, squiggles).

``python -m dtplan.plan.schema > dtplan/plan.schema.json`` renews the committed one.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

from dtplan.plan.grammar import PLAN
from dtplan.plan.rule_grammar import RULES_SCHEMA, STYLE_ALIASES, STYLES

EXAMPLES: dict[str, Any] = {
    "dtplan": 1,
    "name": "my_model",
    "extends": "llama",
    "serves": ["LlamaForCausalLM"],
    "units": {"head": "num_attention_heads", "vocab": {"field": "vocab_size", "indivisible": "uneven"}},
    "residual": {"sequence_parallel": "S(1)"},
    "rules": {"model.layers.*.mlp.{gate,up}_proj": {"style": "colwise", "unit": "ffn"}},
    "variants": [{"when": {"tie_word_embeddings": True}, "rules": {"lm_head": "replicate"}}],
    "ties": [["model.embed_tokens.weight", "lm_head.weight"]],
    "names": {"lm_head": ["embed_out"]},
    "te": {"model.layers.*": [{"layer": "Linear", "linear": "self_attn.o_proj"}]},
    "fsdp": {"units": ["model.layers.*"]},
}
"""Key of a plan -> a value as it is written."""
RULE_EXAMPLES: dict[str, Any] = {
    "style": "colwise",
    "shard": 0,
    "sections": ["head", "kv_head", "kv_head"],
    "unit": "head",
    "grad": "sum",
    "once": True,
    "like": "Embedding",
    "input": "R",
    "output": {"to": "residual", "global_shape": True},
    "parallel_residual": "hidden_states",
    "localize": ["num_heads"],
    "localize_per": {"num_key_value_groups": "kv_head"},
    "reads": ["conv1d"],
    "below": True,
    "optional": True,
    "override": True,
}
"""Key of a rule -> a value as it is written."""


def plan_schema() -> dict[str, Any]:
    """The schema as JSON data (draft 2020-12), with examples for an editor to offer."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dtplan sharding plan, version 1",
        **copy.deepcopy(PLAN.schema),
        "$defs": {"rules": copy.deepcopy(RULES_SCHEMA)},
    }
    short, rule = schema["$defs"]["rules"]["additionalProperties"]["anyOf"][0]["anyOf"]
    for properties, examples in ((schema["properties"], EXAMPLES), (rule["properties"], RULE_EXAMPLES)):
        for key, example in examples.items():
            properties[key]["examples"] = [example]
    for styles in (short, rule["properties"]["style"]):
        styles["enumDescriptions"] = [_meaning(style) for style in styles["enum"]]
    return schema


def _meaning(style: str) -> str:
    """What an editor shows beside a style that it offers."""
    return STYLES.get(style) or f"the same as {STYLE_ALIASES[style]}"


def schema_text() -> str:
    """The schema as it is committed: indented, with a newline at the end."""
    return json.dumps(plan_schema(), indent=2, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
