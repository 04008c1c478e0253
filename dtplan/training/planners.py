"""What torch's distributed checkpoint is told to write and to read: the blocks that a rank holds of whole tensors.

torch's own planners take a DTensor's chunks from its placements, and are wrong for ``_StridedShard`` (a rank with rows
2, 3, 6, 7 is recorded as one chunk at 2) and for fused parameters. Here every rank names its blocks itself, in the
tensors of Hugging Face checkpoints, so no placement and no degree reaches the metadata.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dtplan._errors import WeightsError
from dtplan.weights.blocks import Block

__all__ = ["BlockLoadPlanner", "BlockSavePlanner", "Blocks", "state_dict_of"]

Blocks = Mapping[str, Sequence[Block]]
"""A tensor's name in the checkpoint -> this rank's blocks of it."""


def state_dict_of(blocks: Blocks) -> dict[str, Any]:
    """What the planners take as the state dict: one entry, since torch wraps and logs every entry by itself."""
    return {"blocks": blocks}


class BlockSavePlanner(DefaultSavePlanner):
    """Writes the blocks of a ``Blocks``; what several ranks hold, the one with the least to write writes.

    That the blocks of all ranks make up each tensor, torch's planner checks.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held: dict[tuple[str, torch.Size], Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """The planner is given what ``state_dict_of`` made."""
        self.state_dict, self.is_coordinator = state_dict["blocks"], is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item for every block."""
        items = []
        for name, held in cast("Blocks", self.state_dict).items():
            for block in held:
                chunk = _chunk(block)
                self._held[name, chunk.offsets] = block.local
                written = TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=block.local.dtype), size=torch.Size(block.shape)
                )
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=written))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The storage of a block."""
        assert write_item.index.offset is not None
        return self._held[write_item.index.fqn, write_item.index.offset]


class BlockLoadPlanner(LoadPlanner):
    """Fills the blocks of a ``Blocks`` from whatever chunks the checkpoint has."""

    def __init__(self) -> None:
        self._blocks: Blocks = {}
        self._metadata = Metadata({})
        self._held: dict[tuple[str, torch.Size], Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """The planner is given what ``state_dict_of`` made."""
        assert metadata is not None
        self._blocks, self._metadata = state_dict["blocks"], metadata

    def create_local_plan(self) -> LoadPlan:
        """For every block the parts of chunks that it overlaps."""
        items: list[ReadItem] = []
        for name, held in self._blocks.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            for block in held:
                chunk = _chunk(block)
                self._held[name, chunk.offsets] = block.local
                found = create_read_items_for_chunk_list(name, stored, [chunk])
                covered = sum(math.prod(item.lengths) for item in found)
                if covered != math.prod(chunk.sizes):
                    raise WeightsError(
                        f"{name}: the checkpoint has {covered} of {math.prod(chunk.sizes)} elements of a block at "
                        f"{list(chunk.offsets)}; it is not whole: resume from another one"
                    )
                items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it was made."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never: there are tensors only."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where in this rank's storage an item goes."""
        assert read_item.dest_index.offset is not None
        block = self._held[read_item.dest_index.fqn, read_item.dest_index.offset]
        inside = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return block[tuple(slice(start, start + length) for start, length in inside)] if block.dim() else block

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """``resolve_tensor`` gave a view, so there is nothing to do."""


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size([part.start for part in block.slices]),
        sizes=torch.Size([part.stop - part.start for part in block.slices]),
    )
