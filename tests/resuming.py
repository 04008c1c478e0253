"""What tests of training checkpoints share: a model that trains on a mesh, and what it holds, by whole tensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR
from transformers import Phi3Config

import dtplan
from dtplan.prove.oracle import float64_casts, whole
from dtplan.weights.state import original_name
from tests.models import batch, build, on_meta

PHI3 = Phi3Config(  # type: ignore[call-arg]
    vocab_size=33,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    attn_implementation="eager",
    use_cache=False,
)
PHI3_PLAN = "phi3"
Shape = tuple[int, int, int]
"""Degrees: replicate, shard, tp."""
Made = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; an eps that keeps rounding out of directions."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1]}, {"params": [p for p in parameters if p.dim() <= 1]}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Run:
    """One rank of a training run, on ``shape``; its model is ``model``, cut, or a config's on meta."""

    def __init__(self, model: Any, shape: Shape, plan: Any = "auto", make: Made = adamw) -> None:
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
        self.data = mesh.get_local_rank("replicate") * shape[1] + mesh.get_local_rank("shard")
        self.data_size = shape[0] * shape[1]
        start = copy.deepcopy(model) if isinstance(model, nn.Module) else on_meta(model).double()
        self.model: Any = dtplan.parallelize(start, mesh, plan)
        self.optimizer = make(self.model)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def checkpoints(self, folder: Any, **options: Any) -> dtplan.TrainingCheckpoints:
        return dtplan.TrainingCheckpoints(folder, self.model, self.optimizer, self.scheduler, **options)

    def train(self, first: int, last: int) -> list[float]:
        """Steps ``first`` to ``last - 1`` on four rows each; the losses over all rows."""
        losses = []
        for step in range(first, last):
            rows = batch(self.model.config, rows=4, seed=step)
            own = {key: value.chunk(self.data_size)[self.data] for key, value in rows.items()}
            self.optimizer.zero_grad()
            with float64_casts():
                # The sum over own labels, over the number of all: FSDP2 takes the mean over data-parallel ranks.
                count = int((rows["labels"][:, 1:] != -100).sum())
                loss = self.model(**own, num_items_in_batch=count, use_cache=False).loss * self.data_size
                loss.backward()
            losses.append(loss.item())
            dtplan.clip_grad_norm_(self.model, 0.5)
            self.optimizer.step()
            self.scheduler.step()
        return losses

    def holds(self) -> dict[str, Tensor]:
        """Every parameter and state of the optimizer, whole, under the names and in the layout of checkpoints."""
        found: dict[str, Tensor] = {}
        stored = dtplan.applied(self.model).stored
        for name, parameter in self.model.named_parameters():
            for key, value in {"": parameter, **self.optimizer.state.get(parameter, {})}.items():
                tensor = whole(value.detach()).clone() if isinstance(value, Tensor) else torch.tensor(float("nan"))
                fused = stored.get(original_name(name)) if tensor.shape == parameter.shape else None
                parts = fused.split(tensor) if fused is not None else {original_name(name): tensor}
                found |= {f"{source} {key}": part for source, part in parts.items()}
        return found


def trained_and_saved(rank: int, model: Any, shape: Shape, folder: str, plan: Any = "auto", make: Made = adamw) -> Any:
    """Two steps, then a checkpoint of them; what is held."""
    run = Run(model, shape, plan, make)
    run.train(0, 2)
    run.checkpoints(folder).save(2)
    return run.holds()


def resumed(rank: int, config: Any, shape: Shape, folder: str, plan: Any = "auto", make: Made = adamw) -> Any:
    """A model on meta, resumed; what is held, and the learning rates."""
    run = Run(config, shape, plan, make)
    found = run.checkpoints(folder).resume()
    assert found is not None
    assert found.step == 2
    assert run.scheduler.last_epoch == 2
    return run.holds(), [group["lr"] for group in run.optimizer.param_groups]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether both hold the same, bit for bit."""
    same = (one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)
    return one.keys() == other.keys() and all(same)


__all__ = ["PHI3", "PHI3_PLAN", "Run", "adamw", "build", "equal", "momentum", "resumed", "trained_and_saved"]
