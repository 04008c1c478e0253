"""Streaming load: every rank reads from the files only the blocks that it keeps, into its own storage."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dtplan._errors import WeightsError, did_you_mean
from dtplan.weights.agree import agreed, meet
from dtplan.weights.checkpoint import DTYPES, BlockReader, Checkpoint, Entry, open_checkpoint
from dtplan.weights.materialise import materialise
from dtplan.weights.names import ignored_names, may_be_absent, sources
from dtplan.weights.slices import local_part
from dtplan.weights.state import StateTensor, state_tensors

__all__ = ["LoadReport", "load_checkpoint"]

NO_ALIASES: Mapping[str, Sequence[str]] = MappingProxyType({})
MEET_SECONDS = 300.0
COMPARE_BYTES = 16 * 2**20
FLOATS = ("F64", "F32", "F16", "BF16")
"""Stored dtypes that are converted to any floating-point parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did; the lists are the same on all ranks, the bytes are this rank's."""

    loaded: tuple[str, ...]
    """The model's names, all of a tied tensor."""
    missing: tuple[str, ...]
    """The model's names that no key of the checkpoint fills."""
    unexpected: tuple[str, ...]
    """The checkpoint's keys that fit nothing in the model."""
    bytes_read: int
    """Bytes copied out of the files; a tie that is stored twice is read twice, to compare."""
    bytes_kept: int
    """Bytes of this rank's blocks in the dtypes of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Which keys fill which tensors; from metadata alone, so the same on all ranks."""

    checkpoint: Checkpoint
    found: list[tuple[StateTensor, list[str]]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def loaded(self) -> tuple[str, ...]:
        return tuple(name for state, _ in self.found for name in state.names)


def load_checkpoint(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    aliases: Mapping[str, Sequence[str]] = NO_ALIASES,
    strict: bool = True,
    device: torch.device | str | None = None,
) -> LoadReport:
    """Fills ``model``, sharded or whole, live or on meta, from the safetensors files in ``folder``.

    Collective over the default group. Each rank reads the blocks that it keeps and no others, converted to
    the parameter's dtype; what is on meta is allocated on ``device`` and computed buffers are computed again
    (see ``materialise``). ``aliases`` maps a module path to the names that checkpoints may have for it, such
    as ``{"lm_head": ["embed_out"]}``. With ``strict=False`` missing and unexpected names are reported and not
    refused; a missing tensor then keeps its value, and is refused when it has none.

    Raises WeightsError, the same on every rank: a broken folder or file, missing or unexpected names, shapes
    or dtypes that do not fit, tied names with different values, tensors left without a value. Headers are
    checked before the model is touched; after a failure to read, the values in the model are undefined.
    """
    meet("load_checkpoint", MEET_SECONDS)
    plan = agreed(lambda: _match(model, open_checkpoint(folder), aliases, strict=strict))
    agreed(lambda: _audit(plan, materialise(model, device)))
    bytes_read, bytes_kept = agreed(lambda: _read(plan))
    return LoadReport(
        loaded=plan.loaded,
        missing=plan.missing,
        unexpected=plan.unexpected,
        bytes_read=bytes_read,
        bytes_kept=bytes_kept,
    )


def _match(model: nn.Module, checkpoint: Checkpoint, aliases: Mapping[str, Sequence[str]], *, strict: bool) -> _Plan:
    states = state_tensors(model)
    keys = checkpoint.tensors.keys()
    taken = {name for state in states for name in state.names}
    base = getattr(model, "base_model_prefix", "")
    pairs = [(state, sources(state.names, keys, taken, aliases, base)) for state in states]
    rest = keys - {key for _, held in pairs for key in held}
    plan = _Plan(
        checkpoint=checkpoint,
        found=[(state, held) for state, held in pairs if held],
        missing=tuple(s.names[0] for s, held in pairs if not held and not may_be_absent(model, s.names[0])),
        unexpected=tuple(sorted(rest - ignored_names(model, rest))),
    )
    if strict and (plan.missing or plan.unexpected):
        raise WeightsError(_explain_names(plan))
    _check_fit(plan, _embedding_ids(model))
    return plan


def _check_fit(plan: _Plan, embeddings: set[int]) -> None:
    """Raises WeightsError with every tensor whose shape, dtype or placement does not allow the load."""
    problems = []
    for state, keys in plan.found:
        local_part(state.names[0], state.tensor)
        for key in keys:
            problems += _misfits(key, plan.checkpoint.tensors[key], state.tensor, embeddings)
    if problems:
        raise WeightsError(f"{plan.checkpoint.folder}: {_first(problems, separator='; ')}")


def _embedding_ids(model: nn.Module) -> set[int]:
    """The parameters whose first dim is the vocabulary, by the model's own accessors."""
    getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    modules = [getter() for getter in getters if callable(getter)]
    return {
        id(param) for module in modules if isinstance(module, nn.Module) for param in module.parameters(recurse=False)
    }


def _misfits(key: str, entry: Entry, tensor: Tensor, embeddings: set[int]) -> list[str]:
    """Why ``entry`` cannot fill ``tensor``."""
    shape = tuple(tensor.shape)
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


def _explain_names(plan: _Plan) -> str:
    lines = [f"{plan.checkpoint.folder}: the names in the checkpoint and in the model differ"]
    if plan.missing:
        lines.append(f"  {len(plan.missing)} of the model are not in the checkpoint: {_first(plan.missing)}")
    if plan.unexpected:
        lines.append(f"  {len(plan.unexpected)} of the checkpoint fit nothing in the model: {_first(plan.unexpected)}")
    if not plan.found:
        hint = "no name fits: is the checkpoint of this architecture?"
    elif plan.missing and plan.unexpected:
        near = did_you_mean(plan.missing[0], plan.unexpected)
        hint = "give renamed modules as aliases={path: [other path]}" + (near and f"; {plan.missing[0]}: {near}")
    elif plan.missing:
        hint = "if the checkpoint ties its embeddings, build the model with config.tie_word_embeddings=True"
    else:
        hint = "load with strict=False to leave them out"
    return "\n".join([*lines, f"  = {hint}"])


def _first(items: Sequence[str], most: int = 10, separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def _audit(plan: _Plan, undefined: set[str]) -> None:
    """Every tensor that has no value yet must be one that the checkpoint fills."""
    if left := sorted(undefined - set(plan.loaded)):
        raise WeightsError(
            f"{plan.checkpoint.folder}: {len(left)} tensors of the model would be left without a value: "
            f"{_first(left)}; neither the checkpoint nor the model's `_init_weights` gives them one: build "
            "the model on the CPU and not on meta, or load a checkpoint that has them"
        )


@torch.no_grad()
def _read(plan: _Plan) -> tuple[int, int]:
    """Copies this rank's blocks, file by file; returns the bytes read and the bytes kept."""
    kept = 0
    tensors = plan.checkpoint.tensors
    with BlockReader(plan.checkpoint) as reader:
        for state, keys in sorted(plan.found, key=lambda pair: tensors[pair[1][0]].file):
            local, block = local_part(state.names[0], state.tensor)
            assert not local.is_meta
            if not local.numel():
                continue
            reader.read_into(keys[0], block, local)
            kept += local.numel() * DTYPES[tensors[keys[0]].dtype].itemsize
            for other in keys[1:]:
                _compare(keys[0], local, other, reader.read(other, block))
        return reader.bytes_read, kept


def _compare(key: str, local: Tensor, other: str, twin: Tensor) -> None:
    """Two stored copies of one tied tensor must be equal in the model's dtype, bit for bit; ``local`` has the first."""
    # In bands of rows, so that a comparison copies no more than a band.
    first, second = (tensor if tensor.dim() else tensor.view(1) for tensor in (local, twin))
    rows = max(1, COMPARE_BYTES * len(first) // max(local.nbytes, twin.nbytes))
    for ours, theirs in zip(first.split(rows), second.split(rows), strict=True):
        if not torch.equal(_bits(ours), _bits(theirs.to(ours))):
            raise WeightsError(
                f"{key} and {other} are one tied tensor in the model, but differ in the checkpoint; build "
                "the model with config.tie_word_embeddings=False, or remove the wrong one from the checkpoint"
            )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
