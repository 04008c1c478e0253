"""Streaming load: every rank reads from the files only the blocks that it keeps, into its own storage."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dtplan._errors import WeightsError, did_you_mean
from dtplan.planner.stored import Stored
from dtplan.weights.agree import agreed, gather_objects, meet, rank_and_world
from dtplan.weights.checkpoint import DTYPES, BlockReader, Checkpoint, Entry, open_checkpoint, tensors_at_hand
from dtplan.weights.layouts import file_layout
from dtplan.weights.materialise import materialise
from dtplan.weights.names import ignored_names, may_be_absent, sources
from dtplan.weights.rank0 import Broadcast, shared_by_rank0
from dtplan.weights.state import NOTHING_FUSED, StateTensor, comm_device, state_tensors

__all__ = ["LoadReport", "Source", "load_checkpoint"]

NO_ALIASES: Mapping[str, Sequence[str]] = MappingProxyType({})
Source = str | os.PathLike[str] | Mapping[str, Tensor]
"""A folder, or whole tensors by name."""
MEET_SECONDS = 300.0
LOGGER = logging.getLogger("dtplan")
COMPARE_BYTES = 16 * 2**20
FLOATS = ("F64", "F32", "F16", "BF16")
"""Stored dtypes that are converted to any floating-point parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did; the lists are the same on all ranks, the bytes are this rank's."""

    loaded: tuple[str, ...]
    """The model's names, all of a tied tensor."""
    missing: tuple[str, ...]
    """The names in checkpoints of what no key of the checkpoint fills; the model's own, fused tensors aside."""
    unexpected: tuple[str, ...]
    """The checkpoint's keys that fit nothing in the model."""
    bytes_read: int
    """Bytes copied out of the source; a tie that is stored twice is read twice, to compare. With ``from_rank0``
    rank 0 reads all, and the others none."""
    bytes_kept: int
    """Bytes of this rank's blocks in the dtypes of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Which keys fill which tensors; from metadata alone, so the same on all ranks."""

    checkpoint: Checkpoint
    found: list[tuple[StateTensor, list[str]]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    open: frozenset[str]
    """The model's names that are not, or not wholly, filled."""

    @property
    def loaded(self) -> tuple[str, ...]:
        """The model's names that are filled; of a fused tensor, once all its parts are found."""
        filled = dict.fromkeys(owner for state, _ in self.found for owner in state.owners)
        return tuple(owner for owner in filled if owner not in self.open)


def load_checkpoint(
    model: nn.Module,
    source: Source | None,
    *,
    from_rank0: bool = False,
    aliases: Mapping[str, Sequence[str]] = NO_ALIASES,
    stored: Mapping[str, Stored] = NOTHING_FUSED,
    strict: bool = True,
    device: torch.device | str | None = None,
) -> LoadReport:
    """Fills ``model``, sharded or whole, live or on meta, from the files in a folder, or from a state dict.

    Collective over the default group. Each rank reads the blocks that it keeps and no others, converted to
    the parameter's dtype; with ``from_rank0`` rank 0 reads and sends, and the ``source`` of other ranks is not
    looked at. What is on meta is allocated on ``device`` and computed buffers are computed again
    (see ``materialise``). ``stored`` says which parameters are put together from parts. ``aliases`` maps a module
    path to the names that checkpoints may have for it, such as ``{"lm_head": ["embed_out"]}``. With
    ``strict=False`` missing and unexpected names are reported and not refused; a missing tensor then keeps its
    value, and is refused when it has none.

    Raises WeightsError, the same on every rank: a broken folder or file, missing or unexpected names, shapes
    or dtypes that do not fit, tied names with different values, tensors left without a value. Headers are
    checked before the model is touched; after a failure to read, the values in the model are undefined.
    """
    meet("load_checkpoint", MEET_SECONDS)
    opened = shared_by_rank0(lambda: _opened(source, model)) if from_rank0 else agreed(lambda: _opened(source, model))
    _refuse_other_checkpoints(opened)
    plan = agreed(lambda: _match(model, opened, aliases, stored, strict=strict))
    agreed(lambda: _audit(plan, materialise(model, device)))
    reader = Broadcast(opened, comm_device(model)) if from_rank0 else BlockReader(opened)
    bytes_read, bytes_kept = agreed(lambda: _read(plan, reader))
    _log_names(plan)
    return LoadReport(
        loaded=plan.loaded,
        missing=plan.missing,
        unexpected=plan.unexpected,
        bytes_read=bytes_read,
        bytes_kept=bytes_kept,
    )


def _opened(source: Source | None, model: nn.Module) -> Checkpoint:
    if source is None:
        raise WeightsError("there is nothing to load: give a folder or a state dict, or from_rank0=True on all ranks")
    if isinstance(source, Mapping):
        return tensors_at_hand(source)
    file_layout(model).checked()
    return open_checkpoint(source)


def _refuse_other_checkpoints(opened: Checkpoint) -> None:
    """Ranks whose folders or state dicts differ would load parts of different models."""
    lists = repr(sorted((name, entry.dtype, entry.shape) for name, entry in opened.tensors.items()))
    said = gather_objects(hashlib.sha256(lists.encode()).hexdigest())
    if others := [rank for rank, one in enumerate(said) if one != said[0]]:
        raise WeightsError(
            f"{opened.place}: lists other tensors on ranks {others} than on rank 0; give all ranks the same "
            "checkpoint, or rank 0 alone with from_rank0=True"
        )


def _match(
    model: nn.Module,
    checkpoint: Checkpoint,
    aliases: Mapping[str, Sequence[str]],
    stored: Mapping[str, Stored],
    *,
    strict: bool,
) -> _Plan:
    states = state_tensors(model, stored)
    keys = checkpoint.tensors.keys()
    taken = {name for state in states for name in state.names}
    base = getattr(model, "base_model_prefix", "")
    layout = file_layout(model)

    def held_by(state: StateTensor) -> list[str]:
        return sources(state.names, keys, taken, aliases, base, layout.renamed)

    pairs = []
    for state in states:
        apart = [] if held_by(state) else [(piece, held_by(piece)) for piece in state.apart(layout)]
        pairs += apart if any(held for _, held in apart) else [(state, held_by(state))]
    rest = keys - {key for _, held in pairs for key in held}
    plan = _Plan(
        checkpoint=checkpoint,
        found=[(state, held) for state, held in pairs if held],
        missing=tuple(s.names[0] for s, held in pairs if not held and not may_be_absent(model, s.names[0])),
        unexpected=tuple(sorted(rest - ignored_names(model, rest))),
        open=frozenset(owner for state, held in pairs if not held for owner in state.owners),
    )
    if strict and (plan.missing or plan.unexpected):
        raise WeightsError(f"{_differing_names(plan)}\n  = {_hint(plan)}")
    _check_fit(plan, _embedding_ids(model))
    return plan


def _check_fit(plan: _Plan, embeddings: set[int]) -> None:
    """Raises WeightsError with every tensor whose shape, dtype or placement does not allow the load."""
    problems = []
    for state, keys in plan.found:
        state.blocks()
        for key in keys:
            problems += _misfits(key, plan.checkpoint.tensors[key], state, embeddings)
    if problems:
        raise WeightsError(f"{plan.checkpoint.place}: {_first(problems, separator='; ')}")


def _embedding_ids(model: nn.Module) -> set[int]:
    """The parameters whose first dim is the vocabulary, by the model's own accessors."""
    getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    modules = [getter() for getter in getters if callable(getter)]
    return {
        id(param) for module in modules if isinstance(module, nn.Module) for param in module.parameters(recurse=False)
    }


def _misfits(key: str, entry: Entry, state: StateTensor, embeddings: set[int]) -> list[str]:
    """Why ``entry`` cannot fill ``state``."""
    shape, tensor = state.shape, state.tensor
    if entry.shape != shape:
        if id(tensor) in embeddings and entry.shape[1:] == shape[1:]:
            cure = "the vocabularies differ: resize the embeddings before parallelize"
        else:
            cure = "the model's config is not this checkpoint's"
        return [f"{key} has shape {entry.shape}, the model's has {shape}: {cure}"]
    converts = entry.dtype in FLOATS and tensor.is_floating_point()
    if not converts and DTYPES.get(entry.dtype) != tensor.dtype:
        return [f"{key} is stored as {entry.dtype}, the model's is {tensor.dtype}: dequantise the file first"]
    return []


def _differing_names(plan: _Plan) -> str:
    lines = [f"{plan.checkpoint.place}: the names in the checkpoint and in the model differ"]
    if plan.missing:
        lines.append(f"  {len(plan.missing)} of the model are not in the checkpoint: {_first(plan.missing)}")
    if plan.unexpected:
        lines.append(f"  {len(plan.unexpected)} of the checkpoint fit nothing in the model: {_first(plan.unexpected)}")
    return "\n".join(lines)


def _hint(plan: _Plan) -> str:
    """What to do about names that differ."""
    stored = [(state, key, plan.checkpoint.tensors[key].dtype) for state, keys in plan.found for key in keys]
    fp8 = [key for state, key, dtype in stored if dtype.startswith("F8") and DTYPES.get(dtype) != state.tensor.dtype]
    if fp8:
        return f"{_first(fp8, 1)}: stored in FP8, with scales that dtplan does not apply: dequantise the file first"
    if not plan.found:
        return "no name fits: is the checkpoint of this architecture?"
    if plan.missing and plan.unexpected:
        near = did_you_mean(plan.missing[0], plan.unexpected)
        return "tell the plan of renamed modules, `names: {path: [other path]}`" + (
            near and f"; {plan.missing[0]}: {near}"
        )
    if plan.missing:
        return "if the checkpoint ties its embeddings, build the model with config.tie_word_embeddings=True"
    return "load with strict=False to leave them out"


def _log_names(plan: _Plan) -> None:
    """What a load that is not strict left out, once for all ranks."""
    if (plan.missing or plan.unexpected) and rank_and_world()[0] == 0:
        LOGGER.warning("%s", _differing_names(plan))


def _first(items: Sequence[str], most: int = 10, separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def _audit(plan: _Plan, undefined: set[str]) -> None:
    """Every tensor that has no value yet must be one that the checkpoint fills."""
    if left := sorted(undefined - set(plan.loaded)):
        raise WeightsError(
            f"{plan.checkpoint.place}: {len(left)} tensors of the model would be left without a value: "
            f"{_first(left)}; neither the checkpoint nor the model's `_init_weights` gives them one: build "
            "the model on the CPU and not on meta, or load a checkpoint that has them"
        )


@torch.no_grad()
def _read(plan: _Plan, reader: BlockReader | Broadcast) -> tuple[int, int]:
    """Copies this rank's blocks, file by file; returns the bytes read and the bytes kept."""
    kept = 0
    tensors = plan.checkpoint.tensors

    with reader:
        for state, keys in sorted(plan.found, key=lambda pair: tensors[pair[1][0]].file):
            held = state.blocks()
            assert not any(block.local.is_meta for block in held)
            reader.fill(keys[0], held)
            itemsize = DTYPES[tensors[keys[0]].dtype].itemsize
            kept += sum(block.local.numel() * itemsize for block in held)
            for other in keys[1:]:
                reader.each(other, held, functools.partial(_compare, keys[0], other))
    return reader.bytes_read, kept


def _compare(key: str, other: str, twin: Tensor, kept: Tensor) -> None:
    """What was ``kept`` of ``key`` and its ``twin``, another stored copy of one tied tensor, must be equal bits."""
    # In bands of rows, so that a comparison copies no more than a band.
    first, second = (tensor if tensor.dim() else tensor.view(1) for tensor in (kept, twin))
    rows = max(1, COMPARE_BYTES * len(first) // max(first.nbytes, second.nbytes, 1))
    for ours, theirs in zip(first.split(rows), second.split(rows), strict=True):
        if not torch.equal(_bits(ours), _bits(theirs.to(ours.device, ours.dtype))):
            raise WeightsError(
                f"{key} and {other} are one tied tensor in the model, but differ in the checkpoint; build "
                "the model with config.tie_word_embeddings=False, or remove the wrong one from the checkpoint"
            )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
