"""All layouts as data, for `dtplan fit --json`."""

from __future__ import annotations

from typing import Any

from dtplan.sizing.fit import Fit, Row, Variant


def as_json(fitted: Fit) -> dict[str, Any]:
    """All rows as data; bytes, seconds."""
    return {
        "schema_version": 1,
        "architecture": fitted.architecture,
        "plan": fitted.plan,
        "parameters": fitted.parameters,
        "usable_bytes": fitted.ask.usable,
        "compiled": fitted.ask.compiled,
        "smallest": _named(fitted.smallest),
        "fastest": _named(fitted.fastest),
        "refused": {str(tp): why for tp, why in fitted.refused.items()},
        "rows": [
            {
                "tp": row.tp,
                "shard": row.shard,
                "replicate": row.replicate,
                "micro_batches": row.times,
                "parameter_bytes": row.held.parameters,
                "gradient_bytes": row.held.gradients,
                "optimizer_bytes": row.held.optimizer,
                "variants": [_variant_json(variant, fitted.ask.usable) for variant in row.variants],
            }
            for row in fitted.rows
        ],
        "switches": [_variant_json(variant, fitted.ask.usable) for variant in fitted.others],
    }


def _named(choice: tuple[Row, Variant] | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    row, variant = choice
    switches = {
        "sequence_parallel": variant.switches.sequence_parallel,
        "checkpointing": variant.switches.checkpointing,
    }
    return {"tp": row.tp, "shard": row.shard, "replicate": row.replicate, **switches}


def _variant_json(variant: Variant, usable: int) -> dict[str, Any]:
    axes = {entry.axis for entry in variant.book.entries}
    return {
        "sequence_parallel": variant.switches.sequence_parallel,
        "checkpointing": variant.switches.checkpointing,
        "layers": variant.switches.layers,
        "activation_bytes": variant.peak.activations,
        "rest_bytes": variant.peak.rest,
        "peak_bytes": variant.peak.total,
        "peak_at": variant.peak.where,
        "fits": variant.peak.total <= usable,
        "collectives": {axis: _collectives(variant, axis) for axis in sorted(axes)},
        "seconds": variant.estimate.seconds,
        "terms": [
            {"name": t.name, "seconds": t.seconds, "exposed_seconds": t.exposed, "told": t.told}
            for t in variant.estimate.terms
        ],
    }


def _collectives(variant: Variant, axis: str) -> dict[str, int]:
    own = [entry for entry in variant.book.entries if entry.axis == axis]
    size = variant.bound.degrees[axis]
    return {"calls": sum(e.count for e in own), "wire_bytes": sum(e.wire_bytes(size) for e in own)}
