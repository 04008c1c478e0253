"""Sharded save: a sharded model becomes the folder that transformers loads; no rank ever holds the model."""

from __future__ import annotations

import copy
import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtplan._errors import WeightsError
from dtplan.planner.stored import Stored
from dtplan.weights.agree import agreed, gather_objects, meet, rank_and_world
from dtplan.weights.blocks import Block
from dtplan.weights.checkpoint import DTYPE_NAMES, INDEX_FILE
from dtplan.weights.gather import Box, Held, Whole, whole_tensors
from dtplan.weights.layouts import class_name, file_layout
from dtplan.weights.shards import Files, index_of, pack, write_files
from dtplan.weights.staging import Staging, writing
from dtplan.weights.state import NOTHING_FUSED, StateTensor, comm_device, state_tensors
from dtplan.weights.writer import FileTensor, write_json

__all__ = ["SaveReport", "save_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save wrote; the same on all ranks."""

    folder: Path
    files: tuple[str, ...]
    """The safetensors files, in order."""
    tensors: int
    bytes: int
    """Bytes of all tensors, headers aside."""


def save_checkpoint(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    stored: Mapping[str, Stored] = NOTHING_FUSED,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    meet_seconds: float = 30.0,
) -> SaveReport:
    """Writes ``model`` to ``folder`` as transformers would: config, safetensors under its names.

    Collective over the default group. Tied tensors are written once, padding never, fused parameters (``stored``)
    as the tensors that they were put together from. Files of at most
    ``max_shard_bytes`` bytes of tensors (or one larger tensor) are planned from global shapes. A rank that sees
    the folder writes the rows that it holds; the rest travels in pieces, so a rank holds a few and never a file.
    Values are written as they are; floating-point ones in ``dtype``, when it is given. The folder appears at
    once: until then an older one stays whole in its place, and files of it that are not weights are carried
    over. When a rank has not called within ``meet_seconds`` of the others, all that did raise.

    Raises WeightsError, the same on every rank: a rank did not call, the calls or the models differ over
    ranks, a tensor is on meta or is not placed as one block, the folder cannot be written.
    """
    meet("save_checkpoint", meet_seconds)
    first = rank_and_world()[0] == 0
    held = agreed(lambda: _held_tensors(model, stored, dtype))
    surveys = gather_objects(_survey(held, f"{os.fspath(folder)!r} {max_shard_bytes}"))
    wholes = agreed(lambda: _join(held, surveys))
    files = pack([one.tensor for one in held], max_shard_bytes)
    staging = Staging(folder, surveys[0].token)
    agreed(staging.open if first else _wait)
    try:
        writers = [rank for rank, sees in enumerate(gather_objects(staging.path.is_dir())) if sees]
        write_files(staging.path, files, held, wholes, writers=writers, device=comm_device(model))
        agreed((lambda: _finish(staging, model, held, files, tokenizer)) if first else _wait)
    except BaseException:
        if first:
            staging.discard()
        raise
    total = sum(one.tensor.nbytes for one in held)
    return SaveReport(folder=staging.target, files=tuple(files), tensors=len(held), bytes=total)


def _wait() -> None:
    """The part of every other rank in what rank 0 does alone."""


def _held_tensors(model: nn.Module, stored: Mapping[str, Stored], dtype: torch.dtype | None) -> list[Held]:
    """This rank's blocks of the tensors to save, in the model's order, each under one name, as transformers does."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    dropped = getattr(model, "_keys_to_ignore_on_save", None) or ()
    layout = file_layout(model).checked()
    held = []
    for state in state_tensors(model, stored):
        names = [name for name in state.names if name not in dropped]
        if apart := state.apart(layout) if names else []:
            held += [_hold(one.names[0], one, dtype) for one in apart]
        elif names:
            # transformers ties targets to a source, and saves the source.
            held.append(_hold(layout.renamed(min(names, key=lambda name: name in tied)), state, dtype))
    return held


def _hold(name: str, state: StateTensor, dtype: torch.dtype | None) -> Held:
    tensor = state.tensor
    if tensor.is_meta:
        raise WeightsError(f"{name} is on the meta device and has no values: load or initialise the model first")
    stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if stored not in DTYPE_NAMES:
        allowed = ", ".join(str(one) for one in DTYPE_NAMES)
        raise WeightsError(f"{name}: safetensors has no {stored}; pass a dtype out of {allowed}")
    return Held(
        tensor=FileTensor(name=name, dtype=stored, shape=state.shape),
        blocks=dict(_rows(block) for block in state.blocks()),
    )


def _rows(block: Block) -> tuple[Box, Tensor]:
    """The block as what it covers and its storage; a scalar counts as one row."""
    if not block.slices:
        return ((0, 1),), block.local.view(1)
    return tuple((part.start, part.stop) for part in block.slices), block.local


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """What a rank tells the others before a save."""

    digest: str
    """Of what must be the same on all ranks: the call, and the tensors' names, dtypes and global shapes."""
    boxes: list[list[Box]]
    token: str
    """Rank 0's goes into the name of the temporary folder."""


def _survey(held: Sequence[Held], call: str) -> _Survey:
    text = "\n".join([call, *(repr(one.tensor) for one in held)])
    return _Survey(
        digest=hashlib.sha256(text.encode()).hexdigest(),
        boxes=[list(one.blocks) for one in held],
        token=secrets.token_hex(4),
    )


def _join(held: Sequence[Held], surveys: Sequence[_Survey]) -> list[Whole]:
    others = [rank for rank, survey in enumerate(surveys) if survey.digest != surveys[0].digest]
    if others:
        raise WeightsError(
            f"save_checkpoint: on ranks {others} the folder, dtype or max_shard_bytes differ from rank "
            "0's, or the model has other tensors; make the same call with the same model on every rank"
        )
    return whole_tensors([one.tensor for one in held], [survey.boxes for survey in surveys])


def _finish(staging: Staging, model: nn.Module, held: Sequence[Held], files: Files, tokenizer: Any) -> None:
    """What rank 0 does alone: the index, the config and the tokenizer; then the folder into its place."""
    config = getattr(model, "config", None)
    generation_config = getattr(model, "generation_config", None)
    with writing(staging.path):
        if len(files) > 1:
            write_json(staging.path / INDEX_FILE, index_of(held, files))
        if config is not None:
            _saved_config(config, model, held).save_pretrained(staging.path)
        for part in (generation_config, tokenizer):
            if part is not None:
                part.save_pretrained(staging.path)
    staging.commit()


def _saved_config(config: Any, model: nn.Module, held: Sequence[Held]) -> Any:
    """A copy of the config that names the model's class and the files' dtype, as transformers saves it."""
    saved = copy.deepcopy(config)
    saved.architectures = [class_name(model)]
    dtypes = (one.tensor.dtype for one in held if one.tensor.dtype.is_floating_point)
    saved.dtype = str(next(dtypes, torch.get_default_dtype())).removeprefix("torch.")
    return saved
