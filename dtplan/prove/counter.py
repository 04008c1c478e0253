"""Counts collectives as torch dispatches them, by kind; torch's own CommDebugMode trips over module hooks of FSDP2."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
}


class CollectiveCounter(TorchDispatchMode):
    """A context in which ``counts`` grows with every collective of this thread, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = _KINDS.get(func._schema.name.split("::")[1])
            if kind is not None:
                self.counts[kind] += 1
        return func(*args, **(kwargs or {}))
