"""Values that differ between ranks, and what becomes of them when the number of ranks changes.

Such a value is kept with the axes along which it differs: "data" (the data-parallel ranks, replicate times shard) and
"tp". It can be given back when those axes are as long as they were; else it is resharded by a function that the user
gives, or refused by name. Nothing is dropped or handed to the wrong rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dtplan._errors import WeightsError
from dtplan.training.plain import decode

__all__ = ["Place", "Reshard", "misfit", "own_value", "spread"]

Reshard = Callable[[Sequence[Any], "Place"], Any]
"""From the values of all ranks that had one, in order, and this rank's place, to this rank's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands."""

    data: int
    """Which of the ``data_size`` data-parallel ranks."""
    data_size: int
    tp: int
    tp_size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Place:
        """This rank's place in a mesh with the axes ``replicate``, ``shard``, ``tp``, or some of them."""
        names = mesh.mesh_dim_names or ()
        size = {name: mesh[name].size() if name in names else 1 for name in ("replicate", "shard", "tp")}
        at = {name: mesh.get_local_rank(name) if name in names else 0 for name in size}
        return cls(
            data=at["replicate"] * size["shard"] + at["shard"],
            data_size=size["replicate"] * size["shard"],
            tp=at["tp"],
            tp_size=size["tp"],
        )


def spread(
    name: str, values: Sequence[Any], places: Sequence[Place], *, over_data: bool | None = None
) -> dict[str, Any]:
    """``values`` of all ranks, encoded, as one record: once for each place along the axes on which they differ.

    ``over_data`` True keeps one for every data-parallel rank even if they are equal; they may not differ along tp.
    """
    by_place = {(place.data, place.tp): value for place, value in zip(places, values, strict=True)}
    data, tp = range(places[0].data_size), range(places[0].tp_size)
    along_data = over_data or any(by_place[d, t] != by_place[0, t] for d in data for t in tp)
    along_tp = any(by_place[d, t] != by_place[d, 0] for d in data for t in tp)
    if over_data and along_tp:
        raise WeightsError(
            f"{name} differs between the ranks of a tp group, which read the same data; keep one value for each "
            "data-parallel rank (dtplan.get_state().dp_rank)"
        )
    axes = [axis for axis, along in (("data", along_data), ("tp", along_tp)) if along]
    kept = [by_place[d, t] for d in (data if along_data else [0]) for t in (tp if along_tp else [0])]
    return {"axes": axes, "sizes": {"data": len(data), "tp": len(tp)}, "values": kept}


def own_value(name: str, record: Mapping[str, Any], place: Place, reshard: Mapping[str, Reshard]) -> Any:
    """This rank's value of what ``spread`` recorded.

    Raises WeightsError: it does not fit, and ``reshard`` has no function under its ``name``.
    """
    if name in reshard:
        return reshard[name]([decode(value) for value in record["values"]], place)
    if problem := misfit(record, place):
        raise WeightsError(
            f"{name} {problem}. Give resume(reshard={{{name!r}: function of (values, place)}}), or "
            f"resume(leave_out=[{name!r}]) to go on without it"
        )
    at = 0
    for axis, index in (("data", place.data), ("tp", place.tp)):
        if axis in record["axes"]:
            at = at * record["sizes"][axis] + index
    return decode(record["values"][at])


def misfit(record: Mapping[str, Any], place: Place) -> str:
    """Why the record cannot be given back here: along an axis on which it differs, ranks are more or fewer now."""
    now = {"data": place.data_size, "tp": place.tp_size}
    changed = [axis for axis in record["axes"] if record["sizes"][axis] != now[axis]]
    return " and ".join(
        f"differs between the {axis} ranks, of which there were {record['sizes'][axis]} and are {now[axis]} now"
        for axis in changed
    )
