"""Safetensors files written piece by piece, so that no file is ever held in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dtplan.weights.checkpoint import DTYPE_NAMES, PREFIX_BYTES

__all__ = ["FileTensor", "ShardWriter", "file_order", "offsets", "write_json"]

ALIGNMENT_BYTES = 8
NO_METADATA: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A whole tensor as a file holds it: global shape, no padding."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def file_order(tensor: FileTensor) -> tuple[int, str, str]:
    """Sorts tensors inside a file: wide dtypes first, which aligns every tensor, then by name."""
    return (-tensor.dtype.itemsize, DTYPE_NAMES[tensor.dtype], tensor.name)


class ShardWriter:
    """Writes one safetensors file: the header, then the tensors' bytes as they come.

    Nothing is buffered here, so every failure to write shows in the call that met it. Methods raise OSError.
    """

    def __init__(self, file: Path) -> None:
        self._stream = file.open("xb", buffering=0)

    @classmethod
    def again(cls, file: Path) -> ShardWriter:
        """The same file, begun by another rank: for `write_at`."""
        writer = cls.__new__(cls)
        writer._stream = file.open("r+b", buffering=0)  # noqa: SLF001 - its own class
        return writer

    def write_header(self, tensors: Sequence[FileTensor], metadata: Mapping[str, str] = NO_METADATA) -> None:
        """Announces the ``tensors``, whose bytes follow in this order (``offsets``), and further ``metadata``."""
        self.write(memoryview(_header(tensors, metadata)))

    def write_at(self, offset: int, data: memoryview) -> None:
        """Writes ``data`` from ``offset`` of the file on."""
        self._stream.seek(offset)
        self.write(data)

    def write(self, data: memoryview) -> None:
        """Appends ``data``."""
        while data:  # a write may be partial
            data = data[self._stream.write(data) :]

    def finish(self) -> None:
        """Waits until the file is on the disk."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Closes the file, finished or not."""
        self._stream.close()


def offsets(tensors: Sequence[FileTensor]) -> list[int]:
    """Where the bytes of each tensor begin in a file of these ``tensors``."""
    at = len(_header(tensors, NO_METADATA))
    starts = []
    for tensor in tensors:
        starts.append(at)
        at += tensor.nbytes
    return starts


def _header(tensors: Sequence[FileTensor], metadata: Mapping[str, str]) -> bytes:
    """The length of the header, and the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def write_json(file: Path, value: object) -> None:
    """Writes ``value`` as transformers writes its JSON files."""
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
