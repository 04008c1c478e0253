"""How torch's distributed checkpoint writes and reads here: safetensors files and one JSON index, no pickle.

The files are those that torch's own HuggingFaceStorageReader reads, too: a block is a tensor of the file, and
``DCP_SHARDING_INFO`` in the header says where in the whole tensor it starts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dtplan._errors import WeightsError
from dtplan.weights.checkpoint import DTYPE_NAMES, DTYPES, BlockReader, Checkpoint, read_header
from dtplan.weights.staging import writing
from dtplan.weights.writer import FileTensor, ShardWriter, file_order

__all__ = ["INDEX", "SafetensorsReader", "SafetensorsWriter"]

INDEX = "tensors.json"
PIECE_BYTES = 64 * 2**20


class SafetensorsWriter(StorageWriter):
    """Writes each rank's blocks into safetensors files of its own, and on the coordinator the index.

    A file holds one block of a tensor; a rank that holds k blocks of one writes k files. ``finish`` calls ``done`` on
    the coordinator, once everything is written: that is where a checkpoint is made visible.
    """

    def __init__(self, folder: Path, done: Callable[[], None]) -> None:
        self._folder, self._done = folder, done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer is made for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells each rank its number, for the names of its files."""
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files and waits until they are on the disk."""
        results = []
        for number, items in enumerate(_one_block_each(plan.items)):
            name = f"shard-{plan.storage_data:05d}-{number}.safetensors"
            with writing(self._folder / name):
                _write_file(self._folder / name, items, planner)
            results += [
                WriteResult(index=i.index, size_in_bytes=_file_tensor(i).nbytes, storage_data=name) for i in items
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index: every tensor's dtype, shape, and blocks with offsets, sizes and file."""
        files = {(one.index.fqn, one.index.offset): one.storage_data for part in results for one in part}
        index = {
            name: {
                "dtype": DTYPE_NAMES[stored.properties.dtype],
                "shape": list(stored.size),
                "blocks": [
                    [list(chunk.offsets), list(chunk.sizes), files[name, chunk.offsets]] for chunk in stored.chunks
                ],
            }
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        with writing(self._folder / INDEX):
            (self._folder / INDEX).write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
        self._done()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Writers are made by hand and never found by a path."""
        return False


def _one_block_each(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The items by file, so that no file has two blocks of one tensor."""
    files: list[list[WriteItem]] = []
    count: dict[str, int] = {}
    for item in items:
        number = count[item.index.fqn] = count.get(item.index.fqn, -1) + 1
        if number == len(files):
            files.append([])
        files[number].append(item)
    return files


def _file_tensor(item: WriteItem) -> FileTensor:
    assert item.tensor_data is not None
    shape = tuple(item.tensor_data.chunk.sizes)
    return FileTensor(name=item.index.fqn, dtype=item.tensor_data.properties.dtype, shape=shape)


def _write_file(file: Path, items: Sequence[WriteItem], planner: SavePlanner) -> None:
    ordered = sorted(items, key=lambda item: file_order(_file_tensor(item)))
    offsets = {item.index.fqn: {"saved_offsets": list(item.index.offset or ())} for item in ordered}
    with closing(ShardWriter(file)) as writer:
        writer.write_header(
            [_file_tensor(item) for item in ordered], {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        )
        for item in ordered:
            block = planner.resolve_data(item)
            assert isinstance(block, Tensor)
            for piece in _bytes(block):
                writer.write(piece)
        writer.finish()


def _bytes(block: Tensor) -> Iterator[memoryview]:
    """The block's bytes in pieces, each valid until the next; from any device."""
    flat = block.detach().contiguous().view(-1).view(torch.uint8)
    data = bytearray(min(len(flat), PIECE_BYTES))
    for piece in flat.split(PIECE_BYTES):
        torch.frombuffer(data, dtype=torch.uint8)[: len(piece)].copy_(piece)
        yield memoryview(data)[: len(piece)]


class SafetensorsReader(StorageReader):
    """Reads what ``SafetensorsWriter`` wrote: of a file, the bytes that are needed and no others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader is made for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index as torch's metadata. Raises WeightsError when it is broken."""
        file = self._folder / INDEX
        try:
            index = json.loads(file.read_bytes())
            tensors = {name: _stored(fields) for name, fields in index.items()}
            storage = {
                MetadataIndex(name, offsets): _inside(held)
                for name, fields in index.items()
                for offsets, _, held in fields["blocks"]
            }
        except OSError as error:
            raise WeightsError(
                f"{file}: cannot be read ({error.strerror or error}); resume from another one"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightsError(f"{file}: is broken ({error}); resume from another checkpoint") from error
        return Metadata(state_dict_metadata=dict(tensors), storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps which block is in which file."""
        self._files = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies each item's part of a block to where the planner wants it, file by file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._files[item.storage_index], []).append(item)
        for name, items in by_file.items():
            file = self._folder / name
            with BlockReader(Checkpoint(place=str(self._folder), tensors=read_header(file))) as reader:
                for item in items:
                    inside = zip(item.storage_offsets, item.lengths, strict=True)
                    cut = tuple(slice(start, start + length) for start, length in inside)
                    found = reader.read(item.storage_index.fqn, cut)
                    target = planner.resolve_tensor(item)
                    if found.shape != target.shape or found.dtype != target.dtype:
                        raise WeightsError(
                            f"{file}: {item.storage_index.fqn} is {found.dtype} {list(found.shape)} where {INDEX} "
                            f"says {target.dtype} {list(target.shape)}; the files are of different saves"
                        )
                    with torch.no_grad():
                        target.copy_(found)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Readers are made by hand and never found by a path."""
        return False


def _stored(fields: dict[str, Any]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes, _ in fields["blocks"]]
    size = torch.Size(fields["shape"])
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError("the blocks do not make up the tensor")
    return TensorStorageMetadata(properties=TensorProperties(dtype=DTYPES[fields["dtype"]]), size=size, chunks=chunks)


def _inside(name: str) -> str:
    """The name of a file in the folder itself."""
    if PurePath(name).name != name:
        raise ValueError(f"file {name!r} is not inside the folder")
    return name
