"""An imported plan as the command `dtplan new` writes it."""

from __future__ import annotations

from dtplan.author.importers import import_plan
from dtplan.author.new import New
from dtplan.author.writer import plan_text
from dtplan.planner.meta import meta_model


def imported_plan(model: str, source: str, file: str | None = None, *, schema: str = "plan.schema.json") -> New:
    """The plan of another system for the model of a config.

    Args:
        model: a model folder, a config.json, or a name that transformers knows; its weights are not read.
        source: one of ``dtplan.author.importers.SOURCES``.
        file: what the source is read from, as of ``import_plan``.
        schema: where an editor finds the plan's JSON Schema, for the first line.

    Raises:
        ModelError: there is no such model.
        ImportPlanError: the source cannot be read.
    """
    draft = import_plan(meta_model(model), source, file).draft
    return New(draft, plan_text(draft, schema=schema))
