"""Tiny models cut by hand, their checkpoints, and comparison to the bit; without a plan. For tests of weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from dtplan._errors import WeightsError
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights.layouts import file_layout
from dtplan.weights.save import save_checkpoint


def llama(*, vocab: int = 33, tied: bool = True, layers: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    )
    return cast(LlamaForCausalLM(config), dtype)


def neox(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=33, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return cast(GPTNeoXForCausalLM(config), dtype)


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Parameters in ``dtype``; buffers keep theirs, as when transformers builds a model in a dtype."""
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


def on_meta(model: Any) -> Any:
    """The same model as a user builds it before a load: on meta, in the same dtypes."""
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    return cast(empty, next(model.parameters()).dtype)


ROWWISE = ("o_proj.weight", "down_proj.weight", "attention.dense.weight", "dense_4h_to_h.weight")
COLUMN_BIASES = ("query_key_value.bias", "dense_h_to_4h.bias")


def tp_placement(name: str, param: Tensor) -> Placement:
    if param.ndim == 1 and not name.endswith(COLUMN_BIASES):
        return Replicate()
    return Shard(1 if name.endswith(ROWWISE) else 0)


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """Every parameter a DTensor, as after an apply: cut on tp, then FSDP2 over the other axes; ties kept."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        made: dict[int, nn.Parameter] = {}
        for path, module in model.named_modules():
            for name, param in list(module._parameters.items()):
                if param is None:
                    continue
                if id(param) not in made:
                    local = distribute_tensor(param.data, mesh["tp"], [tp_placement(f"{path}.{name}", param)])
                    made[id(param)] = nn.Parameter(local, requires_grad=param.requires_grad)
                module._parameters[name] = made[id(param)]
    axes = tuple(axis for axis in ("replicate", "shard") if axis in names)
    if axes:
        for module in model.modules():
            if type(module).__name__.endswith(("DecoderLayer", "NeoXLayer")):
                fully_shard(module, mesh=mesh[axes])
        fully_shard(model, mesh=mesh[axes])
    return model


def mesh_of(axes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def on_ranks(axes: dict[str, int], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """``fn(mesh, *args)`` on simulated ranks."""
    return simulated_ranks(math.prod(axes.values()), lambda _: fn(mesh_of(axes), *args))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        assert torch.equal(bits(tensor), bits(right[name])), name


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def expected(model: nn.Module) -> dict[str, Tensor]:
    """What a file of the model holds: each parameter once."""
    return dict(model.named_parameters())


def saved(model: nn.Module, folder: Path) -> Path:
    """The model written by safetensors itself."""
    folder.mkdir(parents=True, exist_ok=True)
    in_files = file_layout(model).renamed
    tensors = {in_files(name): param.detach() for name, param in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def refusal(fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        fn(*args, **options)
    return str(caught.value)


class Row(nn.Module):
    """A weight of one row, of which some ranks hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(17, 1)
        self.register_buffer("steps", torch.tensor(3))


def ready(model: nn.Module, folder: Path, **options: Any) -> dict[str, bytes]:
    """Saves, and returns what a folder holds that loads."""
    save_checkpoint(model, folder, **options)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def other_llama() -> Any:
    model = llama()
    for param in model.parameters():
        param.data += 1
    return model
