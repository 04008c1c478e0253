"""A Hugging Face folder, or tensors at hand, for reading: what they hold, and single blocks of the tensors."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtplan._errors import WeightsError
from dtplan.weights.blocks import Block
from dtplan.weights.pickles import PICKLE_FILE, PICKLE_INDEX, map_pickle

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "INDEX_FILE",
    "SINGLE_FILE",
    "BlockReader",
    "Checkpoint",
    "Entry",
    "open_checkpoint",
    "raw_bytes",
    "tensors_at_hand",
]

T = TypeVar("T")

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
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint: its file and where in it, its dtype as the format spells it, and its shape."""

    file: Path
    start: int = 0
    """Of its bytes, from the file's beginning; only for safetensors files."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor; 0 for a dtype that dtplan does not know."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The tensors of a folder, or of a state dict, by name; of files, nothing but headers has been read."""

    place: str
    """What errors name: the folder."""
    tensors: Mapping[str, Entry]
    values: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """The tensors themselves, where they are at hand: of a state dict, or mapped from a pickle."""


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Reads which tensors the files in ``folder`` hold: one file, or shards with an index.

    safetensors files, or else the pickles of old checkpoints, of which only tensors are unpickled.

    Raises WeightsError, which names the file and what to do, when the folder is missing or holds neither, or
    when a file or the index is broken, incomplete, or points out of the folder.
    """
    root = Path(folder)
    with _readable(root):  # asking may be forbidden, too
        return _open(root)


def _open(root: Path) -> Checkpoint:
    if not root.is_dir():
        raise WeightsError(f"{root}: {_why_no_folder(root)}")
    if (root / SINGLE_FILE).is_file():
        return Checkpoint(place=str(root), tensors=read_header(root / SINGLE_FILE))
    if (root / INDEX_FILE).is_file():
        return Checkpoint(place=str(root), tensors=_read_shards(root / INDEX_FILE, read_header))
    if (root / PICKLE_FILE).is_file():
        return tensors_at_hand(map_pickle(root / PICKLE_FILE), root)
    if (root / PICKLE_INDEX).is_file():
        return tensors_at_hand(_read_shards(root / PICKLE_INDEX, map_pickle), root)
    raise WeightsError(f"{root}: {_why_no_weights(root)}")


def tensors_at_hand(values: Mapping[str, Tensor], place: Path | str = "the state dict") -> Checkpoint:
    """A state dict as a checkpoint: whole tensors by name; nothing is copied.

    Raises WeightsError when a tensor is on meta, or is sharded.
    """
    values = {name: value.detach() for name, value in values.items()}
    if unfit := sorted(name for name, value in values.items() if value.is_meta or isinstance(value, DTensor)):
        raise WeightsError(f"{place}: holds tensors on meta or sharded ones, first {unfit[0]}; give whole tensors")
    entries = {
        name: Entry(file=Path(place), dtype=DTYPE_NAMES.get(value.dtype, str(value.dtype)), shape=tuple(value.shape))
        for name, value in values.items()
    }
    return Checkpoint(place=str(place), tensors=entries, values=values)


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
            f"has {_some(pickles)} but neither {SINGLE_FILE} nor {PICKLE_FILE}, nor an index of shards; load the "
            "model with transformers once and write it with `model.save_pretrained(FOLDER)`"
        )
    holds = _some(names) if names else "nothing"
    return f"has no {SINGLE_FILE} and no {INDEX_FILE}, it holds {holds}; give the folder with the weights"


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _read_shards(index: Path, read: Callable[[Path], Mapping[str, T]]) -> dict[str, T]:
    """What ``read`` finds in the files of an ``index``, for each tensor that it lists."""
    root = index.parent
    with _readable(index):
        data = _parse_json(index, index.read_bytes())
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightsError(f"{index}: needs a `weight_map` from tensors to files; download the index again")
    headers: dict[str, Mapping[str, T]] = {}
    for name in sorted(set(weight_map.values())):
        if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise WeightsError(f"{index}: file {name!r} is not inside the folder; do not use this index")
        if not (root / name).is_file():
            raise WeightsError(f"{index}: names {name}, which is not in the folder; download that file")
        headers[name] = read(root / name)
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
    start = PREFIX_BYTES + length
    return {
        name: Entry(
            file=file,
            start=start + fields["data_offsets"][0],
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
    file, once for all ranks of a host.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.bytes_read = 0
        self._tensors, self._values = checkpoint.tensors, checkpoint.values
        self._files: dict[Path, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str, block: tuple[slice, ...]) -> Tensor:
        """The ``block`` of tensor ``name`` in its own dtype, to look at; of a file's, on the CPU.

        Of a file, a view of its mapping: it costs no memory until it is used. Raises WeightsError when it cannot be
        read.
        """
        entry = self._tensors[name]
        if name in self._values:
            view = self._values[name][block or ...]
        else:
            with _reading(name, entry):
                view = self._whole(entry).view(DTYPES[entry.dtype]).view(entry.shape)[block or ...]
        self.bytes_read += view.nbytes
        return view

    def each(self, name: str, blocks: Sequence[Block], use: Callable[[Tensor, Tensor], None]) -> None:
        """Calls ``use`` with what tensor ``name`` holds for each of the ``blocks``, and the block's storage."""
        for block in blocks:
            use(self.read(name, block.slices), block.local)

    def fill(self, name: str, blocks: Sequence[Block]) -> None:
        """Fills the storage of the ``blocks`` from tensor ``name``, converted to its dtype.

        Whole rows go from a file to their place and are never mapped. Raises WeightsError when they cannot be read.
        """
        entry = self._tensors[name]
        for block in blocks:
            out = block.local
            if name in self._values or not _rows_as_they_are(entry, block.slices, out):
                out.copy_(self.read(name, block.slices))
                continue
            before = block.slices[0].start * math.prod(entry.shape[1:]) * out.itemsize if block.slices else 0
            with _reading(name, entry):
                _read_bytes(self._descriptor(entry.file), entry.start + before, out)
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
            _read_bytes(descriptor, entry.start, copied)
            return copied
        # Writable for torch's sake, and private: nothing that is written would reach the file.
        mapped = mmap.mmap(descriptor, ahead + nbytes, access=mmap.ACCESS_COPY, offset=entry.start - ahead)
        return torch.frombuffer(mapped, dtype=torch.uint8)[ahead:]


def _rows_as_they_are(entry: Entry, block: Sequence[slice], out: Tensor) -> bool:
    """Whether the bytes of ``out`` are those of ``block`` in the file, in one piece."""
    whole_rows = all(part.stop - part.start == size for part, size in zip(block[1:], entry.shape[1:], strict=True))
    return whole_rows and out.dtype == DTYPES[entry.dtype] and out.is_cpu and out.is_contiguous()


def _read_bytes(descriptor: int, at: int, out: Tensor) -> None:
    """The bytes of ``out``, which is contiguous, from position ``at`` of a file on."""
    memory = raw_bytes(out)
    while memory:
        count = os.preadv(descriptor, [memory], at)
        if not count:
            raise EOFError(f"the file ends at byte {at}, {len(memory)} bytes too early")
        memory, at = memory[count:], at + count


def raw_bytes(tensor: Tensor) -> memoryview:
    """The storage of a contiguous CPU tensor, as long as that lives."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@contextmanager
def _reading(name: str, entry: Entry) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError) as error:  # ValueError: a mapping past the file's end
        raise WeightsError(f"{entry.file}: tensor {name}: {error}; download the file again") from error
