"""A Hugging Face safetensors folder, for reading: what it holds, and single blocks of its tensors."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Self

import torch
from torch import Tensor

from dtplan._errors import WeightsError

__all__ = ["DTYPES", "INDEX_FILE", "SINGLE_FILE", "BlockReader", "Checkpoint", "Entry", "open_checkpoint"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""The dtypes that dtplan reads and writes, by the format's names for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint: its file, where its bytes start, its dtype as the format spells it, its shape."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The tensors of a folder by name; nothing but headers has been read."""

    folder: Path
    tensors: Mapping[str, Entry]


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Reads which tensors the safetensors files in ``folder`` hold: one file, or shards with an index.

    Raises WeightsError, which names the file and what to do, when the folder is missing or holds no
    safetensors, or when a file or the index is broken, incomplete, or points out of the folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise WeightsError(f"{root}: {_why_no_folder(root)}")
    if (root / SINGLE_FILE).is_file():
        return Checkpoint(folder=root, tensors=read_header(root / SINGLE_FILE))
    if (root / INDEX_FILE).is_file():
        return Checkpoint(folder=root, tensors=_read_shards(root))
    raise WeightsError(f"{root}: {_why_no_weights(root)}")


def _why_no_folder(root: Path) -> str:
    if root.exists():
        return f"is a file; give the folder that holds {SINGLE_FILE} or {INDEX_FILE}"
    kept = sorted(path.name for path in root.absolute().parent.glob(f".{root.name}.old-*"))
    if kept:
        return f"does not exist; an interrupted save left it as {kept[0]}: rename that to {root.name}"
    return "no such folder; download a model of the Hub first (`hf download NAME --local-dir FOLDER`)"


def _why_no_weights(root: Path) -> str:
    names = sorted(path.name for path in root.iterdir())
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return (
            f"has {_some(shards)} but neither {SINGLE_FILE} nor {INDEX_FILE}; copy the index that belongs to the shards"
        )
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        return (
            f"has {_some(pickles)} but no safetensors, and dtplan does not unpickle weights; load the model "
            "with transformers once and write it with `model.save_pretrained(FOLDER)`"
        )
    holds = _some(names) if names else "nothing"
    return f"has no {SINGLE_FILE} and no {INDEX_FILE}, it holds {holds}; give the folder with the weights"


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _read_shards(root: Path) -> dict[str, Entry]:
    index = root / INDEX_FILE
    with _readable(index):
        data = _parse_json(index, index.read_bytes())
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightsError(f"{index}: needs a `weight_map` from tensors to files; download the index again")
    headers: dict[str, dict[str, Entry]] = {}
    for name in sorted(set(weight_map.values())):
        if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise WeightsError(f"{index}: file {name!r} is not inside the folder; do not use this index")
        if not (root / name).is_file():
            raise WeightsError(f"{index}: names {name}, which is not in the folder; download that file")
        headers[name] = read_header(root / name)
    if absent := [f"{tensor} ({file})" for tensor, file in weight_map.items() if tensor not in headers[file]]:
        raise WeightsError(
            f"{index}: lists tensors that the files do not hold: {_some(absent)}; "
            "index and files are of different saves, download both again"
        )
    return {tensor: headers[file][tensor] for tensor, file in weight_map.items()}


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file; checks that the header is whole and every tensor inside the file.

    Format: the header's length in 8 bytes, little-endian; the header, JSON; the tensors' bytes.
    """
    with _readable(file), file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(PREFIX_BYTES)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < PREFIX_BYTES or length > MAX_HEADER_BYTES:
            cure = "fetch it with `git lfs pull`" if prefix == b"version " else "download it again"
            raise WeightsError(f"{file}: not a safetensors file (header length {length}, file size {size}); {cure}")
        if PREFIX_BYTES + length > size:
            raise WeightsError(
                f"{file}: truncated in its header ({size} of at least {PREFIX_BYTES + length} bytes); download it again"
            )
        header = _parse_json(file, stream.read(length))
    if not isinstance(header, dict):
        raise WeightsError(f"{file}: its header is not a JSON object; download it again")
    header.pop("__metadata__", None)
    ends = [_end_of_entry(file, name, fields) for name, fields in header.items()]
    expected = PREFIX_BYTES + length + max(ends, default=0)
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise WeightsError(f"{file}: {state} ({size} of {expected} bytes); download it again")
    return {
        name: Entry(
            file=file,
            start=PREFIX_BYTES + length + fields["data_offsets"][0],
            dtype=fields["dtype"],
            shape=tuple(fields["shape"]),
        )
        for name, fields in header.items()
    }


def _end_of_entry(file: Path, name: str, fields: Any) -> int:
    """Where the tensor's bytes end, counted from the end of the header."""
    match fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            size = math.prod(shape) if all(type(item) is int and item >= 0 for item in shape) else -1
            whole = size >= 0 <= start <= end
            if whole and (dtype not in DTYPES or end - start == size * DTYPES[dtype].itemsize):
                return end
    raise WeightsError(f"{file}: the header's entry of {name} is broken ({fields}); download it again")


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read ({error.strerror or error}); check the file") from error


def _parse_json(file: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: broken JSON ({error}); download it again") from error


class BlockReader:
    """Reads blocks of a checkpoint's tensors; a context manager, which keeps the files open meanwhile.

    ``bytes_read`` counts the bytes of the blocks. Of a block of columns the system reads whole pages of the
    file; the ranks of a host share them.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.bytes_read = 0
        self._tensors = checkpoint.tensors
        self._files: dict[Path, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str, block: tuple[slice, ...]) -> Tensor:
        """The ``block`` of tensor ``name`` in the file's dtype, on the CPU; for reading only.

        A view of the mapped file: it costs no memory until it is used. Raises WeightsError when it cannot be read.
        """
        entry = self._tensors[name]
        with _reading(name, entry):
            view = self._whole(entry).view(DTYPES[entry.dtype]).view(entry.shape)[block or ...]
        self.bytes_read += view.nbytes
        return view

    def read_into(self, name: str, block: tuple[slice, ...], out: Tensor) -> None:
        """Fills ``out`` with the ``block`` of tensor ``name``, in the dtype and on the device of ``out``.

        Whole rows go from the file to their place, and are never mapped. Raises WeightsError when they cannot be read.
        """
        entry = self._tensors[name]
        rows_only = all(part.stop - part.start == size for part, size in zip(block[1:], entry.shape[1:], strict=True))
        if not rows_only or out.dtype != DTYPES[entry.dtype] or not (out.is_cpu and out.is_contiguous()):
            out.copy_(self.read(name, block))
            return
        first = block[0].start * math.prod(entry.shape[1:]) * out.itemsize if block else 0
        with _reading(name, entry):
            self._fill(out, self._descriptor(entry.file), entry.start + first)
        self.bytes_read += out.nbytes

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
            self._stack.callback(os.close, self._files[file])
        return self._files[file]

    def _whole(self, entry: Entry) -> Tensor:
        """All bytes of a tensor, mapped for as long as they are used; copied where the file does not align them."""
        dtype, descriptor = DTYPES[entry.dtype], self._descriptor(entry.file)
        nbytes = math.prod(entry.shape) * dtype.itemsize
        ahead = entry.start % mmap.ALLOCATIONGRANULARITY
        if not nbytes or ahead % dtype.itemsize:
            copied = torch.empty(nbytes, dtype=torch.uint8)
            self._fill(copied, descriptor, entry.start)
            return copied
        # Writable for torch's sake, and private: nothing that is written would reach the file.
        mapped = mmap.mmap(descriptor, ahead + nbytes, access=mmap.ACCESS_COPY, offset=entry.start - ahead)
        return torch.frombuffer(mapped, dtype=torch.uint8)[ahead:]

    def _fill(self, out: Tensor, descriptor: int, at: int) -> None:
        """The bytes of ``out``, which is contiguous, from the file's position ``at`` on."""
        if not out.nbytes:
            return
        memory = memoryview((ctypes.c_char * out.nbytes).from_address(out.data_ptr())).cast("B")
        while memory:
            count = os.preadv(descriptor, [memory], at)
            if not count:
                raise EOFError(f"the file ends at byte {at}, {len(memory)} bytes too early")
            memory, at = memory[count:], at + count


@contextmanager
def _reading(name: str, entry: Entry) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError) as error:  # ValueError: a mapping past the file's end
        raise WeightsError(f"{entry.file}: tensor {name}: {error}; download the file again") from error
