"""The smallest config on which a refuted plan still fails in the same way: what one reads, and replays, at first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtplan.prove.edits import pattern_of
from dtplan.prove.result import Finding
from dtplan.prove.shrink import COUNTS, WIDTHS, CannotProveError, Reader, layers, like, one_of_each_kind, rebuilt

SECONDS = 5.0
"""Of this process's CPUs, which a busy machine does not shorten; then what was found is told."""
_LEAST_TOKENS = 4
"""Of a sequence: the labels of three are ignored."""
Changes = dict[str, Any]
Batch = tuple[int, int]
Fails = Callable[[Any, Batch], Finding | None]
"""The first finding on a config with a batch of rows x tokens, if any."""


@dataclass(frozen=True, slots=True)
class Small:
    """What was changed of the shrunken config, the batch, and the finding on it."""

    batch: Batch
    finding: Finding
    changes: Mapping[str, Any] = field(default_factory=dict)


def smallest(
    start: Any, batch: Batch, least_rows: int, tp: int, failed: Finding, fails: Fails, *, seconds: float = SECONDS
) -> Small | None:
    """From ``start`` on, a config shrunken for one degree: fewer tokens, layers, heads, then narrower ones.

    Each step is kept if the plan fails there with a finding of the same kind under the same rule.
    """
    end = time.process_time() + seconds

    def same(config: Any, batch: Batch) -> Finding | None:
        if time.process_time() > end:
            return None
        found = fails(config, batch)
        return found if found is not None and way(found) == way(failed) else None

    short = tp * -(-_LEAST_TOKENS // tp)
    tries = ((size, same(start, size)) for size in ((least_rows, short), (least_rows, batch[1]), batch))
    best = next((Small(size, found) for size, found in tries if found is not None), None)
    if best is None:
        return None
    for step in _STEPS:
        for changes in step(_Config(rebuilt(start, best.changes)), tp):
            changed = {**best.changes, **changes}
            try:
                found = same(rebuilt(start, changed), best.batch)
            except CannotProveError:
                continue
            if found is not None:
                best = Small(best.batch, found, changed)
                break
    return best


def way(finding: Finding) -> tuple[str, str]:
    """In which way a plan fails: the kind of the finding, under which rule."""
    return finding.kind, finding.rule or pattern_of(finding.name)


class _Config:
    """A config that holds the text model's sizes, itself or in a config within it."""

    def __init__(self, config: Any) -> None:
        text = config.get_text_config(decoder=True)
        within = [key for key in config.sub_configs if getattr(config, key, None) is text]
        self.read = Reader(text, text.to_dict())
        self._under = f"{within[0]}." if within else ""

    def changes(self, small: Mapping[str, Any]) -> Changes:
        """``small``, by the names that the config has."""
        return {self._under + self.read.key(key): value for key, value in small.items()}


def _one_layer(config: _Config, _tp: int) -> Iterator[Changes]:
    if config.read.need("num_hidden_layers") > 1:
        for kind in one_of_each_kind(config.read):
            yield config.changes(layers(config.read, [kind]))


def _few_heads(config: _Config, tp: int) -> Iterator[Changes]:
    """As many kv heads as ranks, then as many heads as that."""
    read = config.read
    heads, hidden = read.need("num_attention_heads"), read.need("hidden_size")
    kv_heads = read.get("num_key_value_heads") or heads
    head_dim = read.get("head_dim") or hidden // heads
    for fewer in dict.fromkeys((tp, max(heads * tp // kv_heads, tp))):
        if fewer < heads:
            small: Changes = {"num_attention_heads": fewer}
            if read.get("num_key_value_heads"):
                small["num_key_value_heads"] = min(kv_heads, tp)
            if hidden == heads * head_dim:
                small["hidden_size"] = fewer * head_dim
            yield config.changes(small)


def _narrow(config: _Config, tp: int) -> Iterator[Changes]:
    """Two columns a rank in the MLPs, two experts, and a small vocabulary: all at once, then one by one."""
    small: Changes = {}
    for key, least in {
        "intermediate_size": 2 * tp,
        **dict.fromkeys((*WIDTHS, *COUNTS), 2 * tp),
        "vocab_size": 8,
    }.items():
        if isinstance(size := config.read.get(key), int) and (less := like(size, least, [tp])) < size:
            small[key] = less
    ids = {key: value for key, value in config.read.items() if key.endswith("_token_id") and isinstance(value, int)}
    last = small.get("vocab_size", 0) - 1
    clipped = {key: min(value, last) for key, value in ids.items()} if last > 0 else {}
    if small:
        yield config.changes(small | clipped)
    if len(small) > 1:
        for key, value in small.items():
            yield config.changes({key: value} | (clipped if key == "vocab_size" else {}))


_STEPS = (_one_layer, _few_heads, _narrow)
