"""What each rank of a leg does: shard a copy, run it, compare, train a few steps, compare again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dtplan.plan.spec import Plan
from dtplan.planner.apply import parallelize
from dtplan.planner.bind import bind
from dtplan.planner.bound import BoundPlan
from dtplan.planner.clip import clip_grad_norm_
from dtplan.planner.loss import causal_lm_loss
from dtplan.prove.oracle import BOUND, Outcome, errors, float64_casts, logits_of, outcome, relative_error, wholes
from dtplan.prove.result import Leg

STEPS = 3
STEPPED = "stepped "
"""Begins the name of a parameter's error after the steps."""
_MAX_NORM = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What ranks need to run a leg; it travels to processes by pickle."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    plan: Plan
    leg: Leg
    truth: Outcome
    stepped: Mapping[str, Tensor]
    """The unsharded model's parameters after the optimizer's steps."""
    zero: frozenset[str]
    steps: int = STEPS
    """Optimizer steps after which parameters are compared as well; 0: none."""


def bound_plan(job: Job) -> BoundPlan:
    """The job's plan bound to its model at its leg's degrees.

    Raises:
        BindError: the plan is refused.
    """
    leg = job.leg
    return bind(
        job.model,
        job.plan,
        tp=leg.tp,
        shard=leg.shard,
        replicate=leg.replicate,
        sequence_parallel=leg.sequence_parallel,
        loss_parallel=leg.loss_parallel,
    )


def errors_on_rank(rank: int, job: Job) -> dict[str, float]:
    """Relative errors of everything that ``rank`` holds after a step, and of parameters after all steps."""
    # Gathering what FSDP2 and tp both cut takes two steps, which torch would warn of on every rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    sharded = sharded_model(job)
    batch, truth = part_of(job, rank)
    found = compare(outcome(sharded, batch), truth, job.zero)
    if not job.steps:
        return found
    largest = torch.tensor([max(found.values())], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # whether to go on is for all ranks to say
    if largest.item() > BOUND:
        return found
    train(sharded, batch, clip=clip_grad_norm_, steps=job.steps)
    parameters = wholes(sharded, {name: p.detach() for name, p in sharded.named_parameters()})
    return found | {STEPPED + name: relative_error(p, job.stepped[name]) for name, p in parameters.items()}


def sharded_model(job: Job) -> nn.Module:
    """A copy of the model, sharded on a mesh of all ranks."""
    leg = job.leg
    mesh = init_device_mesh("cpu", tuple(leg.mesh.values()), mesh_dim_names=tuple(leg.mesh))
    return parallelize(
        copy.deepcopy(job.model),
        mesh,
        job.plan,
        sequence_parallel=leg.sequence_parallel,
        loss_parallel=leg.loss_parallel,
    )


def part_of(job: Job, rank: int) -> tuple[Mapping[str, Tensor], Outcome]:
    """The rows that a data-parallel rank reads, and what is true of them. FSDP2 averages the gradients."""
    parts, index = job.leg.shard * job.leg.replicate, rank // job.leg.tp
    batch = {key: value.chunk(parts)[index] for key, value in job.batch.items()}
    logits = job.truth.logits.chunk(parts)[index]
    return batch, Outcome(logits=logits, loss=causal_lm_loss(logits, batch["labels"]), grads=job.truth.grads)


def compare(found: Outcome, truth: Outcome, zero: Container[str]) -> dict[str, float]:
    """``errors``, but a gradient that is zero up to rounding is measured against the largest of the model."""
    distances = errors(found, truth)
    largest = max(grad.abs().max().item() for grad in truth.grads.values())
    for name in truth.grads:
        if name in zero and name in found.grads and found.grads[name].shape == truth.grads[name].shape:
            distances[f"grad {name}"] = ((found.grads[name] - truth.grads[name]).abs().max() / largest).item()
    return distances


def train(model: nn.Module, batch: Mapping[str, Tensor], *, clip: Callable[..., Any], steps: int = STEPS) -> None:
    """``steps`` steps of AdamW with clipping; the gradients of the first are there already."""
    # With a small eps, AdamW divides rounding by rounding where a gradient is near zero.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    for step in range(steps):
        if step:
            model.zero_grad()
            with float64_casts():
                causal_lm_loss(logits_of(model, batch), batch["labels"]).backward()
        clip(model.parameters(), _MAX_NORM)
        optimizer.step()
