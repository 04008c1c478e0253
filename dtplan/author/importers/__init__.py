"""Plans of other systems, read as plans of this one: each means what its source does, omissions included."""

from dtplan.author.importers.assemble import Imported
from dtplan.author.importers.hf import from_hf
from dtplan.author.importers.told import ImportPlanError

__all__ = ["Imported", "ImportPlanError", "from_hf"]
