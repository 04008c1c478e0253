"""A checkpoint loaded onto shards and saved again must be the same, byte for byte: shown on simulated ranks."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtplan._errors import BindError
from dtplan.planner.apply import parallelize
from dtplan.planner.bind import bind
from dtplan.planner.meta import meta_model
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights import api
from dtplan.weights.checkpoint import DTYPES, Checkpoint, open_checkpoint
from dtplan.weights.compare import Difference, differences
from dtplan.weights.layouts import file_layout
from dtplan.weights.names import ignored_names, sources
from dtplan.weights.state import state_tensors

Verdict = Literal["equal", "differs", "refused"]
SCHEMA_VERSION = 1
TIMEOUT_S = 3600.0
_MARKS: Mapping[Verdict, str] = {"equal": "ok", "differs": "DIFFERS", "refused": "REFUSED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """One mesh: what came back. Bytes are sums over its ranks."""

    mesh: Mapping[str, int]
    verdict: Verdict
    differences: tuple[Difference, ...] = ()
    reason: str = ""
    """Why the plan refused the mesh."""
    bytes_read: int = 0
    bytes_kept: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """All meshes of one checkpoint."""

    model: str
    plan: str
    tensors: int
    bytes: int
    """Of the checkpoint's tensors."""
    renamed: Mapping[str, str]
    """The checkpoint's names that transformers spells otherwise, or that are ties; saved as transformers does."""
    left_out: tuple[str, ...]
    """The checkpoint's tensors that models compute, which are not loaded."""
    trips: tuple[Trip, ...]

    @property
    def exit_code(self) -> int:
        """0 if all came back the same, 1 if not."""
        return 0 if all(trip.verdict == "equal" for trip in self.trips) else 1

    def to_json(self) -> dict[str, Any]:
        """The result as JSON data."""
        return {"schema_version": SCHEMA_VERSION, "equal": not self.exit_code, **dataclasses.asdict(self)}

    def as_text(self) -> str:
        """The result for people: a line a mesh, and what differs."""
        lines = [f"{self.plan} on {self.model}: {self.tensors} tensors, {self.bytes / 1e6:.1f} MB"]
        lines += [f"{name} is saved as {other}" for name, other in self.renamed.items()]
        lines += [f"not loaded, since models compute them: {', '.join(self.left_out)}"] if self.left_out else []
        for trip in self.trips:
            lines += _lines(trip)
        same = sum(trip.verdict == "equal" for trip in self.trips)
        return "\n".join([*lines, "", f"{same} of {len(self.trips)} meshes gave the checkpoint back, byte for byte"])


def round_trip(
    model: str,
    plan: str = "auto",
    *,
    tp: Sequence[int] = (1, 2, 4),
    fsdp: bool = False,
    on_trip: Callable[[Trip], None] = lambda _trip: None,
) -> RoundTrip:
    """Load the checkpoint in the folder ``model`` at every degree, save it, and compare.

    The model has the dtypes of the files, so that nothing is converted. Ranks are threads of this process, which
    holds the whole model; what is saved goes to a temporary folder.

    Args:
        model: a folder with a config and weights.
        plan: the built-in one for the model's class, another's name, or a file.
        tp: degrees, in ranks.
        fsdp: each degree also with FSDP2 over two shards.
        on_trip: called after each mesh.

    Raises:
        ModelError, WeightsError: the folder cannot be read.
        BindError: the plan does not serve the model at all; a mesh that it refuses is a result.
    """
    built = meta_model(model)
    source = open_checkpoint(model)
    bound = bind(built, plan, tp=1)
    renamed = _match(built, source, bound.aliases)
    left_out = ignored_names(built, source.tensors.keys() - renamed.keys())
    trips = []
    for mesh in _meshes(tp, fsdp=fsdp):
        trips.append(_trip(built, plan, mesh, source, renamed, left_out))
        on_trip(trips[-1])
    return RoundTrip(
        model=model,
        plan=bound.plan,
        tensors=len(source.tensors),
        bytes=sum(entry.nbytes for entry in source.tensors.values()),
        renamed={name: other for name, other in renamed.items() if name != other},
        left_out=tuple(sorted(left_out)),
        trips=tuple(trips),
    )


def _meshes(tp: Sequence[int], *, fsdp: bool) -> Iterator[Mapping[str, int]]:
    for degree in tp:
        yield {"tp": degree}
        if fsdp:
            yield {"shard": 2, "tp": degree}


def _match(model: nn.Module, source: Checkpoint, aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The checkpoint's names and those under which they are saved; gives the model the dtypes of the files."""
    states = state_tensors(model)
    taken = {name for state in states for name in state.names}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    found = {}
    layout, base = file_layout(model), getattr(model, "base_model_prefix", "")
    for state in itertools.chain.from_iterable(one.apart(layout) or [one] for one in states):
        saved_as = layout.renamed(min(state.names, key=lambda name: name in tied))
        for key in sources(state.names, source.tensors, taken, aliases, base, layout.renamed):
            found[key] = saved_as
            dtype = DTYPES.get(source.tensors[key].dtype)
            if dtype is not None and dtype.is_floating_point and state.tensor.is_floating_point():
                state.tensor.data = state.tensor.data.to(dtype)
    return found


def _trip(
    model: nn.Module,
    plan: str,
    mesh: Mapping[str, int],
    source: Checkpoint,
    renamed: Mapping[str, str],
    left_out: set[str],
) -> Trip:
    started = time.monotonic()
    world = mesh["tp"] * mesh.get("shard", 1)
    with tempfile.TemporaryDirectory(prefix="dtplan-") as scratch:
        target = Path(scratch) / "saved"
        try:
            moved = simulated_ranks(world, _on_rank, model, plan, mesh, source.place, target, timeout_s=TIMEOUT_S)
        except BindError as error:
            return Trip(mesh=mesh, verdict="refused", reason=str(error), seconds=time.monotonic() - started)
        found = tuple(differences(source, open_checkpoint(target), renamed, left_out))
    return Trip(
        mesh=mesh,
        verdict="differs" if found else "equal",
        differences=found,
        bytes_read=sum(read for read, _ in moved),
        bytes_kept=sum(kept for _, kept in moved),
        seconds=time.monotonic() - started,
    )


def _on_rank(
    _rank: int, model: nn.Module, plan: str, mesh: Mapping[str, int], source: str, target: Path
) -> tuple[int, int]:
    axes = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    sharded = parallelize(copy.deepcopy(model), axes, plan)
    report = api.load(sharded, source)
    api.save(sharded, target)
    return report.bytes_read, report.bytes_kept


def _lines(trip: Trip) -> list[str]:
    mesh = " x ".join(f"{name} {size}" for name, size in trip.mesh.items())
    head = f"{_MARKS[trip.verdict]:<8}{mesh}  ({trip.seconds:.1f} s)"
    if trip.verdict == "refused":
        return [f"{head}: the plan refuses this degree", *(f"        {line}" for line in trip.reason.splitlines())]
    head += f": {trip.bytes_read / 1e6:.1f} MB read, {trip.bytes_kept / 1e6:.1f} MB kept by all ranks"
    lines = [head, *(f"      - {one.name}: {one.says}" for one in trip.differences[:10])]
    more = len(trip.differences) - 10
    return [*lines, f"        and {more} more"] if more > 0 else lines
