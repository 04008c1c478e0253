"""`GraphedStep` without a GPU: its refusals, its bookkeeping, and what transformers does while a step is recorded.

Recording itself is tested on GPUs (tests/gpu/te_job.py).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import dtplan
from dtplan.planner import graphed
from dtplan.prove.simulated import simulated_ranks
from tests.models import build, llama


@pytest.mark.parametrize(
    ("axes", "changes", "why"),
    [
        ({"tp": 2}, {}, "the model is not on GPUs"),
        ({"shard": 2, "tp": 1}, {}, "FSDP2 is around the model"),
        ({"tp": 2}, {"attention_dropout": 0.1}, "the model drops values at random"),
    ],
    ids=["cpu", "fsdp", "dropout"],
)
def test_what_cannot_be_recorded_is_refused(axes: dict[str, int], changes: dict[str, Any], why: str) -> None:
    copies = [build(llama(**changes)).train()] * 2
    copies[1] = copy.deepcopy(copies[0])

    def on_rank(rank: int) -> str:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        model = dtplan.parallelize(copies[rank], mesh, loss_parallel=True)
        with pytest.raises(dtplan.ApplyError) as refused:
            dtplan.GraphedStep(model)
        return str(refused.value)

    for message in simulated_ranks(2, on_rank):
        assert why in message
        assert "call model(...) and loss.backward() instead" in message


def test_a_model_that_was_not_parallelized_is_refused() -> None:
    with pytest.raises(dtplan.ApplyError, match="parallelize"):
        dtplan.GraphedStep(nn.Linear(2, 2))


class Played:
    """In place of a CUDA graph: runs the step anew, on what the inputs hold, into the gradients that were recorded."""

    def __init__(self, step: graphed.Recorded, loss: Tensor, *, adds: bool) -> None:
        self.step, self.loss, self.adds = step, loss, adds

    def replay(self) -> None:
        kept = [p.grad for p in self.step.parameters]
        for parameter in self.step.parameters:
            parameter.grad = None
        loss = self.step.loss_of(**self.step.inputs)
        loss.backward()
        self.loss.copy_(loss.detach())
        for parameter, grad, own in zip(self.step.parameters, kept, self.step.grads, strict=True):
            assert own is not None
            assert parameter.grad is not None
            own.copy_(own + parameter.grad if self.adds else parameter.grad)
            parameter.grad = grad


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> tuple[graphed.Recorded, nn.Linear]:
    def recorded(self: graphed.Recorded) -> tuple[Any, Tensor]:
        for parameter in self.parameters if not self._graphs else ():
            parameter.grad = torch.zeros_like(parameter)
        loss = torch.zeros(())
        return Played(self, loss, adds=bool(self._graphs)), loss

    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(graphed.Recorded, "_warm_up", lambda self: None)
    monkeypatch.setattr(graphed.Recorded, "_recorded", recorded)
    model = nn.Linear(3, 1, bias=False)
    return graphed.Recorded(model, lambda x: model(x).sum()), model


def test_gradients_are_set_anew_or_added_to(step: tuple[graphed.Recorded, nn.Linear]) -> None:
    run, model = step
    one, two = torch.ones(2, 3), torch.full((2, 3), 5.0)
    for batch, accumulate, wanted in [
        (one, False, 2.0),
        (two, False, 10.0),
        (one, True, 12.0),
        (two, True, 22.0),
        (one, False, 2.0),
    ]:
        loss = run({"x": batch}, accumulate=accumulate)
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, torch.full((1, 3), wanted))
        assert torch.equal(loss, model(batch).sum())
    model.zero_grad()  # leaves none, so there is nothing to add to
    run({"x": one}, accumulate=True)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((1, 3), 2.0))


def test_a_returned_loss_is_not_overwritten_by_the_next_step(step: tuple[graphed.Recorded, nn.Linear]) -> None:
    run, model = step
    first = run({"x": torch.ones(2, 3)}, accumulate=False)
    run({"x": torch.zeros(2, 3)}, accumulate=False)
    assert torch.equal(first, model(torch.ones(2, 3)).sum())


def test_adding_to_other_gradients_is_refused(step: tuple[graphed.Recorded, nn.Linear]) -> None:
    run, model = step
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(dtplan.ApplyError, match="accumulate=True adds to gradients of its own steps"):
        run({"x": torch.ones(2, 3)}, accumulate=True)


@pytest.mark.parametrize(
    "other",
    [{"x": torch.ones(2, 4)}, {"x": torch.ones(2, 3).double()}, {"y": torch.ones(2, 3)}],
    ids=lambda o: next(iter(o)),
)
def test_another_batch_is_refused_with_both_shapes(step: tuple[graphed.Recorded, nn.Linear], other: Any) -> None:
    run, _ = step
    run({"x": torch.ones(2, 3)}, accumulate=False)
    with pytest.raises(dtplan.ApplyError, match=r"recorded for x \[2, 3\] torch.float32, called with .*: pad"):
        run(other, accumulate=False)


@pytest.mark.parametrize("capturing", [False, True], ids=["warm-up", "recording"])
@pytest.mark.parametrize(
    ("batch", "mask"),
    [
        ({}, None),
        ({"attention_mask": torch.ones(2, 8, dtype=torch.long)}, (2, 1, 8, 8)),
        ({"position_ids": torch.arange(8)[None] % 4}, (2, 1, 8, 8)),
    ],
    ids=["whole", "padded", "packed"],
)
def test_masks_are_made_as_while_recording(
    monkeypatch: pytest.MonkeyPatch, batch: dict[str, Tensor], mask: tuple[int, ...] | None, capturing: bool
) -> None:
    """None for whole sequences (fast kernels); one for what may be padded or packed, whose values nobody looks at."""
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: capturing)
    model: Any = AutoModelForCausalLM.from_config(llama(attn_implementation="sdpa"))
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with graphed._masks_as_recorded(packed="position_ids" in batch):
        model(input_ids=torch.zeros(2, 8, dtype=torch.long), **batch)
    assert (None if seen[0] is None else tuple(seen[0].shape)) == mask
