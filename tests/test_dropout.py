"""Dropout on the tp axis: whole values are masked alike on every rank, cut ones each by masks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan.prove.oracle import BOUND, Outcome, errors, outcome, relative_error, whole
from dtplan.prove.pool import GlooPool, Kept
from dtplan.te import engine
from tests import te_standin
from tests.models import batch, build, llama, neox

P = 0.5


@pytest.fixture(scope="module")
def ranks(pool: GlooPool) -> Iterator[Kept]:
    """Two processes: threads would share one generator."""
    with pool.kept(ranks=2) as kept:
        yield kept


def sharded(config: Any, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return dtplan.parallelize(build(config), mesh, **options)


def step(rank: int, config: Any, options: dict[str, Any]) -> tuple[Outcome, list[int]]:
    """Everything that a step gives, and the next numbers of the generator."""
    model = sharded(config, **options)
    torch.manual_seed(7)
    found = outcome(model, batch(config))
    return found, torch.randint(1 << 30, (4,)).tolist()


@contextmanager
def masks() -> Iterator[list[Tensor]]:
    """What every call of dropout that drops something kept, in order."""
    seen: list[Tensor] = []
    inner = nn.functional.dropout

    def watched(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        dropped = inner(input, p, training, inplace)
        if p and training:
            seen.append((dropped != 0).detach().clone())
        return dropped

    nn.functional.dropout = watched
    try:
        yield seen
    finally:
        nn.functional.dropout = inner


def masks_on_rank(rank: int, config: Any, options: dict[str, Any], fused: bool = False) -> list[Tensor]:
    with mock.patch.object(engine, "find", return_value=te_standin.ENGINE if fused else "not here"):
        model = sharded(config, **options)
    assert any(module.style == "te" for module in dtplan.applied(model).bound.modules) == fused
    torch.manual_seed(7)
    with masks() as seen:
        model(**batch(config, length=16))
    return seen


# ------------------------------------------------------------------------------------------------------- cut values


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.parametrize("config", [llama(attention_dropout=P), neox(attention_dropout=P)], ids=["llama", "neox"])
def test_b98_heads_of_all_ranks_have_masks_of_their_own(
    ranks: Kept, config: Any, sequence_parallel: bool, fused: bool
) -> None:
    """Two layers with 2 of 4 heads on each of two ranks: no two of the 16 masks [row, head] x layer are equal."""
    found = ranks.run(masks_on_rank, config, {"sequence_parallel": sequence_parallel}, fused)
    assert [len(on_rank) for on_rank in found] == [2, 2]
    heads = [mask.flatten(0, 1) for on_rank in found for mask in on_rank]
    lower = torch.ones(16, 16).tril().bool()  # what is masked causally is zero in any case
    drawn = [head[lower] for layer in heads for head in layer]
    assert len(drawn) == 16
    assert not any(torch.equal(a, b) for a, b in combinations(drawn, 2))
    kept = torch.stack(drawn).double().mean().item()
    assert abs(kept - P) < 0.06  # 2176 draws: five standard deviations


def test_b98_hidden_dropout_of_sequence_parts_differs(ranks: Kept) -> None:
    """The embedding's, and two in each layer, on [2, 8 of 16, 32] of both ranks."""
    config = neox(hidden_dropout=P, use_parallel_residual=False)
    first, second = ranks.run(masks_on_rank, config, {"sequence_parallel": True})
    assert [mask.shape for mask in first] == [torch.Size((2, 8, 32))] * 5
    assert not any(torch.equal(a, b) for a, b in combinations([*first, *second], 2))


# ----------------------------------------------------------------------------------------------------- whole values


HIDDEN = [neox(hidden_dropout=P), neox(hidden_dropout=P, use_parallel_residual=False)]


def test_b97_hidden_dropout_gives_the_unsharded_numbers_at_every_degree(pool: GlooPool, ranks: Kept) -> None:
    """Both kinds of residual, at tp 2 and 4."""
    found = [*ranks.run(errors_at, 2), *pool.run(errors_at, 4, ranks=4)]
    assert len(found) == 6
    assert max(found) <= BOUND


def errors_at(rank: int, degree: int) -> float:
    """The largest over logits, loss and gradients of both models."""
    mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
    worst = 0.0
    for config in HIDDEN:
        found, truth = (seeded(model, config) for model in (dtplan.parallelize(build(config), mesh), build(config)))
        undropped = outcome(build(config).eval(), batch(config))
        assert errors(undropped, truth)["logits"] > 0.1  # it acts
        worst = max(worst, *errors(found, truth).values())
    return worst


def seeded(model: nn.Module, config: Any) -> Outcome:
    torch.manual_seed(7)
    return outcome(model, batch(config))


BOTH = {"attention_dropout": P, "hidden_dropout": P}
OPTIONS: dict[str, dict[str, Any]] = {"": {}, "sequence-parallel": {"sequence_parallel": True, "loss_parallel": True}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("config", [neox(**BOTH), neox(**BOTH, use_parallel_residual=False)], ids=["", "sequential"])
def test_b98_a_seed_repeats_and_replicas_and_generators_agree(
    ranks: Kept, config: Any, options: dict[str, Any]
) -> None:
    (one, after), (other, after_other) = ranks.run(step, config, options)
    (again, after_again), _ = ranks.run(step, config, options)
    assert max(errors(one, again).values()) == 0
    assert max(errors(one, other).values()) == 0
    assert after == after_other == after_again


RECOMPUTED = {
    "llama": (llama(attention_dropout=P), "dtplan"),
    "llama by transformers": (llama(attention_dropout=P), "transformers"),
    "neox": (neox(**BOTH), "dtplan"),
    "neox, sequential, by transformers": (neox(**BOTH, use_parallel_residual=False), "transformers"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("config", "by"), RECOMPUTED.values(), ids=RECOMPUTED)
def test_recomputation_repeats_the_masks(ranks: Kept, config: Any, by: str, options: dict[str, Any]) -> None:
    plain, _ = ranks.run(gradients, config, options)
    recomputed, _ = ranks.run(gradients, config, options, by)
    assert plain.keys() == recomputed.keys()
    assert max(relative_error(recomputed[name], grad) for name, grad in plain.items()) <= BOUND


def gradients(rank: int, config: Any, options: dict[str, Any], by: str = "") -> dict[str, Tensor]:
    """Of the model's own loss; ``by`` recomputes units."""
    model = sharded(config, **options, activation_checkpointing=by == "dtplan")
    if by == "transformers":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(7)
    model(**batch(config)).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def test_a_part_of_a_unit_cannot_be_recomputed_in_silence(ranks: Kept) -> None:
    with pytest.raises(dtplan.ApplyError, match="recompute whole units"):
        ranks.run(recompute_a_part)


def recompute_a_part(rank: int) -> None:
    """The second branch of a layer begins on a sequence part, on the rank's own stream."""
    config = neox(hidden_dropout=P, attention_dropout=P, use_parallel_residual=False, num_hidden_layers=1)
    model = sharded(config, sequence_parallel=True)
    norm = model.gpt_neox.layers[0].post_attention_layernorm
    forward = norm.forward
    norm.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    model(**batch(config)).loss.backward()


# ----------------------------------------------------------------------------------------------------------- no cost


def draws(rank: int, config: Any, training: bool) -> bool:
    """Whether a forward moved the generator, or wrapped anything for dropout."""
    model = sharded(config).train(training)
    before = torch.get_rng_state()
    model(**batch(config))
    return not torch.equal(before, torch.get_rng_state())


def test_nothing_is_drawn_without_dropout_or_in_evaluation(ranks: Kept) -> None:
    assert ranks.run(draws, llama(), True) == [False, False]
    assert ranks.run(draws, neox(**BOTH), False) == [False, False]
    assert ranks.run(draws, neox(**BOTH), True) == [True, True]
