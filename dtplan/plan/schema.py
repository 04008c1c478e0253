"""The JSON Schema of a plan file, made from the grammar, for editors (hover text, completion, squiggles).

``python -m dtplan.plan.schema > dtplan/plan.schema.json`` renews the committed one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from dtplan.plan.grammar import PLAN
from dtplan.plan.rule_grammar import RULES_SCHEMA


def plan_schema() -> dict[str, Any]:
    """The schema as JSON data (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dtplan sharding plan, version 1",
        **PLAN.schema,
        "$defs": {"rules": RULES_SCHEMA},
    }


def schema_text() -> str:
    """The schema as it is committed: indented, with a newline at the end."""
    return json.dumps(plan_schema(), indent=2, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
