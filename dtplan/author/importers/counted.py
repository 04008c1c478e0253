"""The unit of a cut, found by its size: a config field that holds how many there are.

Other systems cut features, and fail when they run where a degree divides features and not heads. A unit makes that a
refusal before anything runs. A unit is given only where the number fits; the path decides between fields of one value.
"""

from __future__ import annotations

import re
from typing import Any

from dtplan.plan.read import config_field

_WIDTH = re.compile(r"intermediate|inner|ffn|ff_dim|d_ff|feed_?forward|mlp_dim")
_NAMES = {
    "intermediate_size": "ffn",
    "ffn_hidden_size": "ffn",
    "moe_intermediate_size": "expert_ffn",
    "expert_ffn_hidden_size": "expert_ffn",
    "shared_expert_intermediate_size": "shared_ffn",
    "shared_intermediate_size": "shared_ffn",
}
_EXPERT = re.compile(r"expert|moe|router")
_ATTENTION = re.compile(r"attn|attention")
_KV = re.compile(r"(^|_)(k|v|key|value)(_|$)")


class Counts:
    """Units of one config; ``used`` are those that were given, as a plan writes them."""

    def __init__(self, config: Any) -> None:
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        self._config = text
        subs = getattr(config, "sub_configs", None) or {}
        own = next((key for key in subs if getattr(config, key, None) is text), None)
        self._prefix = "" if text is config or own is None else f"{own}."
        self.used: dict[str, Any] = {}

    def unit(self, path: str, size: int, *, parts: int = 1) -> str | None:
        """The unit of a dim of ``size`` features in ``parts`` equal parts; None where no number fits."""
        each = size // parts
        of_layer = any(segment.isdecimal() for segment in path.split("."))
        if parts == 1 and size == self._number("vocab_size") and not of_layer:
            return self._use("vocab", {"field": self._prefix + "vocab_size", "indivisible": "uneven"})
        found = self._heads(path, each) if _ATTENTION.search(path) else None
        return found or self._width(path, each)

    def sections(self, path: str, size: int, sizes: tuple[int, ...]) -> list[str] | None:
        """Units of parts that are not equal, whose units all have one width; None where no numbers fit.

        The widest part is cut in heads, narrower ones in kv heads, as the parts of a fused q, k and v are.
        """
        heads, kv_heads = self._number("num_attention_heads"), self._number("num_key_value_heads")
        if sum(sizes) != size or heads is None:
            return None
        if len(set(sizes)) == 1:
            unit = self.unit(path, size, parts=len(sizes))
            return None if unit is None else [unit] * len(sizes)
        width, rest = divmod(max(sizes), heads)
        if rest or kv_heads is None or any(part not in (width * heads, width * kv_heads) for part in sizes):
            return None
        head = self._use("head", self._prefix + "num_attention_heads")
        field = self._prefix + "num_key_value_heads"
        kv_head = self._use("kv_head", [field, self._prefix + "num_attention_heads"])
        return [head if part == width * heads else kv_head for part in sizes]

    def _heads(self, path: str, size: int) -> str | None:
        heads, kv_heads = self._number("num_attention_heads"), self._number("num_key_value_heads")
        if _KV.search(path.rpartition(".")[2]) and kv_heads is not None and size % kv_heads == 0:
            field = self._prefix + "num_key_value_heads"
            return self._use("kv_head", [field, self._prefix + "num_attention_heads"])
        if heads is not None and size % heads == 0:
            return self._use("head", self._prefix + "num_attention_heads")
        return None

    def _width(self, path: str, size: int) -> str | None:
        """The field that is as wide, or a few times so (shared experts lie side by side)."""
        fields = [f for f in self._config.to_dict() if _WIDTH.search(f)]
        fitting = [(f, n) for f in fields if (n := self._number(f)) is not None and size % n == 0 and size // n <= 8]
        expert = bool(_EXPERT.search(path))
        fitting.sort(key=lambda pair: (-pair[1], bool(_EXPERT.search(pair[0])) != expert, len(pair[0])))
        if not fitting:
            return None
        field = fitting[0][0]
        return self._use(_NAMES.get(field, field.removesuffix("_size")), self._prefix + field)

    def _number(self, field: str) -> int | None:
        value = config_field(self._config, field)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def _use(self, unit: str, field: Any) -> str:
        self.used[unit] = field
        return unit
