"""A checkpoint rewritten as safetensors, without a model: from pickles, and with modules renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dtplan._errors import WeightsError
from dtplan.weights.checkpoint import DTYPES, INDEX_FILE, BlockReader, Checkpoint, open_checkpoint
from dtplan.weights.gather import Box, Held, whole_tensors
from dtplan.weights.shards import index_of, pack, write_files
from dtplan.weights.staging import Staging, writing
from dtplan.weights.writer import FileTensor, write_json

__all__ = ["Converted", "convert"]

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was written."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int
    left_out: tuple[str, ...]
    """Names whose tensor is another name's, in memory: ties, which safetensors holds once."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    renames: Mapping[str, str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Converted:
    """Writes the weights in ``source``, safetensors or pickles, to ``target`` as safetensors; other files are copied.

    Bytes go from file to file in pieces. ``renames`` maps module paths to new ones, such as
    ``{"embed_out": "lm_head"}``; an empty path is a prefix of all, so ``{"": "model"}`` puts it in front. Dtypes and
    values stay. ``target`` appears whole or not at all. One process; no process group is used.

    Raises WeightsError: a broken source, two tensors that would have one name, a target that cannot be written.
    """
    checkpoint = open_checkpoint(source)
    names = _renamed(checkpoint, renames or {})
    left_out = _repeated(checkpoint)
    with BlockReader(checkpoint) as reader:
        held = [_held(reader, checkpoint, name, to) for name, to in names.items() if name not in left_out]
        files = pack([one.tensor for one in held], max_shard_bytes)
        wholes = whole_tensors([one.tensor for one in held], [[list(one.blocks) for one in held]])
        staging = Staging(target, secrets.token_hex(4))
        staging.open()
        try:
            write_files(staging.path, files, held, wholes, writers=[0], device=torch.device("cpu"))
            with writing(staging.path):
                if len(files) > 1:
                    write_json(staging.path / INDEX_FILE, index_of(held, files))
                shutil.copytree(source, staging.path, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)
            staging.commit()
        except BaseException:
            staging.discard()
            raise
    total = sum(one.tensor.nbytes for one in held)
    return Converted(
        folder=staging.target, files=tuple(files), tensors=len(held), bytes=total, left_out=tuple(sorted(left_out))
    )


def _renamed(checkpoint: Checkpoint, renames: Mapping[str, str]) -> dict[str, str]:
    """Old name -> new name; of several paths that fit a name, the longest counts."""
    names = {name: _rename(name, renames) for name in checkpoint.tensors}
    by_new: dict[str, str] = {}
    for name, to in names.items():
        if to in by_new:
            raise WeightsError(f"{checkpoint.place}: {by_new[to]} and {name} would both be {to}; rename one of them")
        by_new[to] = name
    idle = [path for path in renames if not any(_below(name, path) for name in names)]
    if idle:
        raise WeightsError(
            f"{checkpoint.place}: no tensor is below {idle[0]!r}; there are {', '.join([*names][:3])}..."
        )
    return names


def _rename(name: str, renames: Mapping[str, str]) -> str:
    fitting = [path for path in renames if _below(name, path)]
    if not fitting:
        return name
    path = max(fitting, key=len)
    rest = name[len(path) :].removeprefix(".")
    return ".".join(part for part in (renames[path], rest) if part)


def _below(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(path + ".")


def _repeated(checkpoint: Checkpoint) -> set[str]:
    """Names after the first whose tensor is the same memory."""
    seen: set[tuple[object, ...]] = set()
    repeated = set()
    for name, value in checkpoint.values.items():
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if value.numel() and place in seen:
            repeated.add(name)
        seen.add(place)
    return repeated


def _held(reader: BlockReader, checkpoint: Checkpoint, name: str, to: str) -> Held:
    entry = checkpoint.tensors[name]
    if entry.dtype not in DTYPES:
        raise WeightsError(f"{entry.file}: tensor {name}: safetensors has no {entry.dtype}")
    tensor = FileTensor(name=to, dtype=DTYPES[entry.dtype], shape=entry.shape)
    view = reader.read(name, tuple(slice(0, size) for size in entry.shape))
    return Held(tensor=tensor, blocks=_whole(view))


def _whole(view: Tensor) -> Mapping[Box, Tensor]:
    """The whole tensor as one block; a scalar counts as one row, and an empty tensor has none."""
    if not view.numel():
        return {}
    view = view if view.dim() else view.view(1)
    return {tuple((0, size) for size in view.shape): view}
