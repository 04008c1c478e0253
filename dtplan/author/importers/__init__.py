"""Plans of other systems, read as plans of this one: each means what its source does, omissions included."""

from __future__ import annotations

from torch import nn

from dtplan.author.importers.assemble import Imported
from dtplan.author.importers.deepspeed import from_deepspeed
from dtplan.author.importers.hf import from_hf, read_rules
from dtplan.author.importers.styles import from_code, from_styles
from dtplan.author.importers.told import ImportPlanError

__all__ = [
    "SOURCES",
    "ImportPlanError",
    "Imported",
    "from_code",
    "from_deepspeed",
    "from_hf",
    "from_styles",
    "import_plan",
]

SOURCES = ("hf", "deepspeed", "styles")


def import_plan(model: nn.Module, source: str, file: str | None = None) -> Imported:
    """The plan of ``source``, one of ``SOURCES``, for ``model``, which may be on the meta device.

    Args:
        model: the model.
        source: `hf`, transformers' own plan; `deepspeed`, a DeepSpeed config; `styles`, a dict of torch styles.
        file: of `hf`, a JSON file of rules that are laid over the model's own; of `deepspeed`, the JSON config; of
            `styles`, `module:attribute` or `file.py:attribute`, whose code is run.

    Raises:
        ImportPlanError: the source cannot be read.
    """
    if source == "hf":
        return from_hf(model, None if file is None else read_rules(file))
    if file is None:
        wanted = "a DeepSpeed config" if source == "deepspeed" else "`file.py:attribute` with a dict of torch styles"
        raise ImportPlanError(f"`{source}` is read from a file: give {wanted}")
    return from_deepspeed(model, file) if source == "deepspeed" else from_code(model, file)
