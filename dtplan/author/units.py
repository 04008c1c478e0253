"""Which config field counts the units of a dim, found by the number of units in a model whose counts all differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtplan.author.sample import Sample
from dtplan.prove.shrink import COUNTS

_NAMES = {
    "num_attention_heads": "head",
    "num_key_value_heads": "kv_head",
    "num_kv_heads": "kv_head",
    "n_kv_heads": "kv_head",
    "intermediate_size": "ffn",
    "n_inner": "ffn",
    "ffn_dim": "ffn",
    "ffn_hidden_size": "ffn",
    "moe_intermediate_size": "expert_ffn",
    "shared_expert_intermediate_size": "shared_ffn",
    "shared_intermediate_size": "shared_ffn",
}
"""Config field -> the unit's usual name."""
_NO_UNITS = re.compile(
    r"vocab|token|position|window|layer|rank|_dim$|_per_tok|group|pretraining|chunk|topk|top_k|^hidden_size$|^n_embd$|^d_model$|word_embed"
    "|kernel|stride|scale|seed|image|patch|channel|length"
)
"""Fields whose numbers count no units, or say how wide one is."""
_MOST_WIDE = 8
_USUAL_DEGREE = 8


@dataclass(frozen=True, slots=True)
class Counted:
    """A config field that counts units: its own name, the plan's unit, and the number in the sample."""

    field: str
    unit: str
    count: int


@dataclass(slots=True)
class Units:
    """The units of a draft, filled as rules ask for them. ``real`` is the decoder's config of the real model."""

    sample: Sample
    real: Any
    used: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Unit -> what a reader may wonder about."""

    def counted(self) -> list[Counted]:
        """Fields that may count units; those with a usual name first."""
        found = []
        for name, count in self.sample.fields():
            usual = self._usual(name)
            if count > 1 and (usual in _NAMES or (name not in COUNTS and not _NO_UNITS.search(usual))):
                found.append(Counted(name, self._unit_name(name), count))
        return sorted(found, key=lambda c: self._usual(c.field) not in _NAMES)

    @property
    def known(self) -> set[int]:
        """Numbers of units that a field counts."""
        return {counted.count for counted in self.counted()}

    def of(self, count: int, rows: int) -> str | None:
        """The unit of a dim of ``rows`` that was found to have ``count`` units; None where no field says it."""
        for counted in self.counted():
            if counted.count == count:
                return self._use(counted)
        for counted in self.counted():
            if rows % counted.count == 0 and 1 < rows // counted.count <= _MOST_WIDE and count == rows:
                return self._use(counted)
        hidden = self._own("hidden_size")
        width = getattr(self.sample.text, "hidden_size", None)
        if isinstance(width, int) and count == rows and rows % width == 0:
            self.used.setdefault("ffn", self.sample.prefix + hidden)
            self.notes["ffn"] = f"the MLP has {rows // width} {hidden} columns"
            return "ffn"
        return None

    def width(self, unit: str, features: int) -> str | None:
        """The config field that holds the features of one unit: of those with that number, the one named most alike."""
        words = set(unit.split("_"))
        alike = {name: len(words & set(name.split("_"))) for name, value in self.sample.fields() if value == features}
        best = max(alike, key=lambda name: alike[name], default=None)
        return self.sample.prefix + best if best is not None and alike[best] else None

    def vocabulary(self) -> str:
        """The unit of the vocabulary, which need not be divided."""
        name = self.sample.prefix + self._own("vocab_size")
        self.used.setdefault("vocab", {"field": name, "indivisible": "uneven"})
        return "vocab"

    def in_order(self) -> dict[str, Any]:
        """Heads before columns before the vocabulary."""
        order = ["head", "kv_head", "ffn", "expert_ffn", "shared_ffn"]
        return dict(sorted(self.used.items(), key=lambda item: [*order, item[0]].index(item[0]) + (item[0] == "vocab")))

    def shared(self, count: int) -> str | None:
        """The unit of ``count``, of which several ranks may have the same one.

        Where the real model has so few that usual degrees need it, the unit says so.
        """
        counted = next((one for one in self.counted() if one.count == count), None)
        if counted is None:
            return None
        fields = self.used.get(counted.unit)
        if 1 < self._really(counted.field) < _USUAL_DEGREE and not isinstance(fields, dict):
            self.used[counted.unit] = {"field": fields, "indivisible": "replicate_kv"}
            self.notes[counted.unit] = "above their number, ranks share one"
        return counted.unit

    def keeps_whole(self, counts: Iterable[int]) -> bool:
        """Whether no usual degree divides the real number of a unit that is counted by one of ``counts``."""
        for counted in self.counted():
            real = self._really(counted.field)
            if counted.count in counts and real > 1 and all(real % d for d in range(2, _USUAL_DEGREE + 1)):
                return True
        return False

    def _really(self, name: str) -> int:
        value = getattr(self.real, name, None)
        return value if type(value) is int else 0

    # --- names

    def _use(self, counted: Counted) -> str:
        fields = [counted.field, *self._otherwise(counted)]
        told = [self.sample.prefix + name for name in fields]
        field: Any = told[0] if len(told) == 1 else told
        if self.keeps_whole({counted.count}):
            self.notes[counted.unit] = f"{self._really(counted.field)}: where no degree divides it, it stays whole"
            field = {"field": field, "indivisible": "replicate"}
        self.used.setdefault(counted.unit, field)
        return counted.unit

    def _otherwise(self, counted: Counted) -> Iterator[str]:
        """The field that counts where the first is not set."""
        if counted.unit == "kv_head":
            yield self._own("num_attention_heads")
        elif counted.unit == "ffn" and getattr(self.real, counted.field, None) is None:
            hidden = self._own("hidden_size")
            self.notes["ffn"] = f"without {counted.field}, columns are a multiple of {hidden}"
            yield hidden

    def _unit_name(self, name: str) -> str:
        usual = self._usual(name)
        if usual in _NAMES:
            return _NAMES[usual]
        short = re.sub(r"^(num_|n_|linear_num_|linear_)|(_size)$", "", usual)
        return short.removesuffix("s") or usual

    def _usual(self, name: str) -> str:
        return {own: usual for usual, own in self._map.items()}.get(name, name)

    def _own(self, usual: str) -> str:
        return self._map.get(usual, usual)

    @property
    def _map(self) -> Mapping[str, str]:
        return getattr(self.sample.text, "attribute_map", None) or {}
