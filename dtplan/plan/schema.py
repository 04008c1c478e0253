"""The JSON Schema of a plan file, made from the grammar, for editors (hover text, completion, squiggles)."""

from __future__ import annotations

import json
from typing import Any

from dtplan.plan import grammar
from dtplan.plan.syntax import record


def plan_schema() -> dict[str, Any]:
    """The schema as JSON data (draft 2020-12)."""
    root = record(grammar.PLAN_KEYS, lambda *_args, **_values: None, "A dtplan sharding plan.").schema
    root["properties"]["dtplan"] = root["properties"]["dtplan"] | {"const": 1}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dtplan sharding plan, version 1",
        **root,
        "$defs": {"rules": grammar.RULES_DEFINITION},
    }


def schema_text() -> str:
    """The schema as it is committed: indented, with a newline at the end."""
    return json.dumps(plan_schema(), indent=2, ensure_ascii=True) + "\n"
