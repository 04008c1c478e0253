"""Small state as JSON and back: numbers, text, lists, dicts, tuples and small tensors, bit for bit; no pickle."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtplan._errors import WeightsError
from dtplan.weights.checkpoint import DTYPE_NAMES, DTYPES

__all__ = ["decode", "encode"]

MAX_TENSOR_BYTES = 16 * 2**20
_TENSOR, _TUPLE, _DICT, _COUNTER = "__tensor__", "__tuple__", "__dict__", "__counter__"
_TAGS = (_TENSOR, _TUPLE, _DICT, _COUNTER)


def encode(value: Any, path: str) -> Any:
    """``value`` as what JSON can say; ``decode`` gives it back.

    Raises:
        WeightsError: it starts with ``path``, the place of what cannot be said: an object, a DTensor, a tensor of
            more than 16 MiB.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value, path)
    if type(value) in (list, tuple):
        items = [encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
        return items if type(value) is list else {_TUPLE: items}
    if isinstance(value, Mapping):
        if isinstance(value, Counter):
            return {_COUNTER: _encode_items(value, path)}
        if all(isinstance(key, str) and key not in _TAGS for key in value):
            return {key: encode(item, f"{path}.{key}") for key, item in value.items()}
        return {_DICT: _encode_items(value, path)}
    raise WeightsError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be written without pickle, which "
        "dtplan neither writes nor reads; give numbers, text, lists, tuples, dicts and plain tensors"
    )


def _encode_items(value: Mapping[Any, Any], path: str) -> list[Any]:
    return [[encode(key, f"{path} (a key)"), encode(item, f"{path}[{key!r}]")] for key, item in value.items()]


def _encode_tensor(value: Tensor, path: str) -> dict[str, Any]:
    if isinstance(value, DTensor):
        raise WeightsError(f"{path}: is a DTensor; small state takes plain tensors, of which every rank has the whole")
    if value.nbytes > MAX_TENSOR_BYTES or value.dtype not in DTYPE_NAMES:
        raise WeightsError(
            f"{path}: a tensor of {value.nbytes} bytes of {value.dtype}; small state takes at most "
            f"{MAX_TENSOR_BYTES} bytes of {', '.join(map(str, DTYPE_NAMES))}"
        )
    data = bytearray(value.nbytes)
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(value.detach().contiguous().view(-1).view(torch.uint8))
    text = base64.b64encode(data).decode()
    return {_TENSOR: DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data": text}


def decode(value: Any) -> Any:
    """What ``encode`` was given; tensors on the CPU.

    Raises:
        WeightsError: no ``encode`` wrote this.
    """
    match value:
        case list():
            return [decode(item) for item in value]
        case {"__tensor__": str(dtype), "shape": [*shape], "data": str(data)} if dtype in DTYPES:
            return _decode_tensor(DTYPES[dtype], shape, data)
        case {"__tuple__": [*items]}:
            return tuple(decode(item) for item in items)
        case {"__dict__": [*items]}:
            return dict(_decode_items(items))
        case {"__counter__": [*items]}:
            return Counter(dict(_decode_items(items)))
        case dict() if any(tag in value for tag in _TAGS):
            raise WeightsError(f"small state is broken: {str(value)[:80]}")
    return {key: decode(item) for key, item in value.items()} if isinstance(value, dict) else value


def _decode_items(items: list[Any]) -> list[tuple[Any, Any]]:
    try:
        return [(decode(key), decode(item)) for key, item in items]
    except (TypeError, ValueError):
        raise WeightsError(f"small state is broken: {str(items)[:80]}") from None


def _decode_tensor(dtype: torch.dtype, shape: list[Any], text: str) -> Tensor:
    try:
        data = bytearray(base64.b64decode(text, validate=True))
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(data)} bytes")  # noqa: TRY301 - all that can be wrong with it is told alike
        return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WeightsError(f"small state is broken: a tensor of shape {shape}: {error}") from None
