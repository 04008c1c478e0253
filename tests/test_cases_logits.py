"""Cases under *Loss parallel and masking*, and sampling: what is computed from logits, cut or whole.

B51, B52 and B65 are with the loss over unequal parts, in test_cases_training.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import dtplan
from dtplan import ApplyError
from dtplan.planner.loss import KERNELS, Kernels
from dtplan.prove.oracle import whole
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from tests.cases import gap, ids_of, model_of, t0

OfLogits = Callable[[Any], Tensor]
SIZES = [pytest.param(32, 2, id="32-tp2"), pytest.param(33, 2, id="33-tp2"), pytest.param(5, 4, id="5-tp4")]
"""Vocabulary and degree; of 5 columns over 4 ranks the last has none."""


def mesh_of(tp: int) -> Any:
    return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))


def logits_of(vocabulary: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 3 * torch.randn(*shape, vocabulary, dtype=torch.float64, generator=generator)


def assert_equal_of_parts(found: OfLogits, truth: OfLogits, logits: Tensor, tp: int) -> None:
    """Value and gradient on every rank of a tp group, and of whole logits, are those that ``truth`` gives."""

    def value_and_gradient(fn: OfLogits, leaf: Tensor, given: Any) -> tuple[Tensor, Tensor]:
        value = fn(given)
        scale = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view(value.shape)  # no token counts as another
        (value * scale).sum().backward()
        assert leaf.grad is not None
        return value.detach(), leaf.grad

    def on_rank(rank: int) -> tuple[Tensor, Tensor]:
        placed = [Shard(logits.dim() - 1)]
        leaf = distribute_tensor(logits, mesh_of(tp), placed).to_local().clone().requires_grad_()
        given = DTensor.from_local(
            leaf, mesh_of(tp), placed, run_check=False, shape=logits.shape, stride=logits.stride()
        )
        return value_and_gradient(found, leaf, given)

    leaf = logits.clone().requires_grad_()
    value, gradient = value_and_gradient(truth, leaf, leaf)
    leaf = logits.clone().requires_grad_()
    of_whole = value_and_gradient(found, leaf, leaf)
    parts = simulated_ranks(tp, on_rank)
    for own, _ in (of_whole, *parts):
        torch.testing.assert_close(own, value, rtol=1e-12, atol=1e-14)
    for own in (of_whole[1], torch.cat([part for _, part in parts], -1)):
        torch.testing.assert_close(own, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("vocabulary", "tp"), SIZES)
def test_b60_label_smoothing_is_over_the_whole_vocabulary(vocabulary: int, tp: int, reduction: Any) -> None:
    """With a rank's own mean and size instead, ranks disagree about the loss."""
    labels = torch.tensor([0, vocabulary - 1, vocabulary // 2, -100, 1, vocabulary // 2 - 1])
    options: dict[str, Any] = {"label_smoothing": 0.1, "reduction": reduction}
    assert_equal_of_parts(
        lambda x: dtplan.cross_entropy(x, labels, **options),
        lambda x: F.cross_entropy(x, labels, **options),
        logits_of(vocabulary, 6),
        tp,
    )


@pytest.mark.parametrize(("vocabulary", "tp"), SIZES)
def test_b61_the_entropy_of_cut_logits_has_its_own_gradient(vocabulary: int, tp: int) -> None:
    """torch's loss_parallel gives every log_softmax the gradient of the loss; nothing here asks it."""

    def of_whole(x: Tensor) -> Tensor:
        return -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)

    assert_equal_of_parts(dtplan.entropy, of_whole, logits_of(vocabulary, 2, 3), tp)
    with loss_parallel():
        assert_equal_of_parts(dtplan.entropy, of_whole, logits_of(vocabulary, 2, 3), tp)


def test_b61_logits_of_minus_infinity_add_nothing_to_the_entropy() -> None:
    """A masked part of the vocabulary, here all of a rank's: 0 times -inf would be nan."""
    logits = logits_of(8, 3)
    masked = logits.clone()
    masked[:, 4:] = float("-inf")

    def cut_off(x: Tensor) -> Tensor:
        return dtplan.entropy(x[:, :4])

    assert_equal_of_parts(dtplan.entropy, cut_off, masked, 2)


def test_b61_entropy_and_kl_beside_the_model_s_own_loss_reach_every_parameter() -> None:
    """The loss over cut logits overrides nothing: a log_softmax of them, which torch gathers, is exact too."""
    model, ids = model_of(t0(vocab_size=33)).double(), ids_of(t0(vocab_size=33))

    def step(run: Any, entropy: OfLogits) -> Tensor:
        out = run(ids, labels=ids)
        log_p = out.logits.log_softmax(-1)
        log_p = log_p.full_tensor() if isinstance(log_p, DTensor) else log_p
        kl = F.kl_div(log_p[:, 1:], log_p[:, :-1].detach(), log_target=True, reduction="batchmean")
        loss: Tensor = out.loss - 0.3 * entropy(out.logits[:, :-1]).mean() + 0.2 * kl
        loss.backward()
        return loss.detach()

    reference = copy.deepcopy(model)
    wanted = step(reference, lambda x: torch.distributions.Categorical(logits=x).entropy())
    copies = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int) -> tuple[float, float]:
        sharded = dtplan.parallelize(copies[rank], mesh_of(2), loss_parallel=True)
        loss = step(sharded, dtplan.entropy)
        pairs = [(whole(p.grad), reference.get_parameter(n).grad) for n, p in sharded.named_parameters()]
        return gap(loss, wanted), max(gap(a, b) for a, b in pairs)

    for loss, gradients in simulated_ranks(2, on_rank):
        assert loss < 1e-6  # rotary tables and norms are float32 in transformers
        assert gradients < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_b62_class_weights_count_in_the_mean_of_cut_classes(reduction: Any) -> None:
    """The mean divides by the weights of all labels, not by their number, nor by what a rank owns."""
    labels = torch.tensor([0, 4, 2, -100, 1, 3, 3, 4])
    weight = torch.arange(1, 6, dtype=torch.float64)
    assert_equal_of_parts(
        lambda x: dtplan.cross_entropy(x, labels, weight=weight, reduction=reduction),
        lambda x: F.cross_entropy(x, labels, weight=weight, reduction=reduction),
        logits_of(5, 8),
        2,
    )
    ignored = torch.full((8,), -100)
    assert dtplan.cross_entropy(logits_of(5, 8), ignored, weight=weight, reduction="mean") == 0


def test_b62_a_batch_that_is_cut_is_refused() -> None:
    """The weighted mean of a rank's rows is not that of all rows."""
    logits, labels = logits_of(5, 8), torch.arange(8) % 5

    def on_rank(rank: int) -> None:
        cut = distribute_tensor(logits, mesh_of(2), [Shard(0)])
        for weight in (None, torch.arange(1.0, 6)):
            with pytest.raises(ApplyError, match=r"placed as \(Shard\(dim=0\),\); they are needed cut along the last"):
                dtplan.cross_entropy(cut, labels, weight=weight)
        with pytest.raises(ApplyError, match="they are needed cut along the last dim"):
            dtplan.entropy(cut)

    simulated_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("labels", "options", "says"),
    [
        (torch.zeros(3, dtype=torch.long), {}, r"labels of shape \[3\] and torch.int64 for logits of shape \[4, 5\]"),
        (torch.zeros(4, 5), {}, r"labels of shape \[4, 5\] and torch.float32 .* the number of a class for every row"),
        (torch.zeros(4, dtype=torch.long), {"reduction": "batchmean"}, "reduction='batchmean' is none of 'mean'"),
        (torch.zeros(4, dtype=torch.long), {"weight": torch.ones(2)}, r"weight of shape \[2\] .* each of 5 classes"),
        (
            torch.zeros(4, dtype=torch.long),
            {"weight": torch.ones(5), "label_smoothing": 0.1},
            "and no label_smoothing beside it",
        ),
    ],
    ids=["rows", "probabilities", "reduction", "weights", "weights and smoothing"],
)
def test_arguments_of_the_loss_that_would_be_wrong_in_silence_are_refused(
    labels: Tensor, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ApplyError, match=says):
        dtplan.cross_entropy(logits_of(5, 4), labels, **options)


def test_a_label_that_no_rank_owns_gives_no_loss_that_looks_right() -> None:
    """torch raises an error on the CPU and stops the device elsewhere; here the loss is nan, and nothing waits."""
    labels = torch.tensor([1, 5, -1, -100])

    def on_rank(rank: int) -> list[bool]:
        cut = distribute_tensor(logits_of(5, 4), mesh_of(2), [Shard(1)])
        losses: list[bool] = dtplan.cross_entropy(cut, labels, reduction="none").isnan().tolist()
        return losses

    assert simulated_ranks(2, on_rank) == [[False, True, True, False]] * 2


@pytest.mark.parametrize(("vocabulary", "tp"), SIZES)
def test_b63_a_kernel_sees_its_rank_s_columns_and_no_index_beyond_them(vocabulary: int, tp: int) -> None:
    """A fused kernel takes its bounds from the shape that it reads and checks none of its indices."""
    logits = logits_of(vocabulary, 6)
    labels = torch.tensor([0, vocabulary - 1, 1, -100, vocabulary // 2, vocabulary - 2])
    wanted = F.cross_entropy(logits, labels)

    def fused(kernel: Callable[..., Tensor], columns: int, index_at: int | None) -> Callable[..., Tensor]:
        def checked(x: Tensor, *rest: Any) -> Tensor:
            assert not any(isinstance(value, DTensor) for value in (x, *rest))
            assert x.shape == (6, columns)
            if index_at is not None:
                index = rest[index_at]
                assert index.min() >= 0
                assert index.max() < max(columns, 1)
            return kernel(x, *rest)

        return checked

    def on_rank(rank: int) -> tuple[Tensor, int]:
        cut = distribute_tensor(logits, mesh_of(tp), [Shard(1)])
        columns = cut.to_local().shape[1]
        cut.requires_grad_()
        kernels = Kernels(*(fused(k, columns, at) for k, at in zip(KERNELS, (None, 1, 2), strict=True)))
        loss = dtplan.cross_entropy(cut, labels, compiled=kernels)
        loss.backward()
        return loss.detach(), columns

    parts = simulated_ranks(tp, on_rank)
    assert sum(columns for _, columns in parts) == vocabulary
    for loss, _ in parts:
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize(("vocabulary", "tp"), SIZES)
def test_b64_log_probs_have_gradients_on_ranks_that_do_not_own_the_target(vocabulary: int, tp: int, owner: int) -> None:
    """An all-reduce that cannot be differentiated leaves zeros there; here all targets are one rank's."""
    labels = torch.full((2, 3), -(-vocabulary // tp) * owner)
    labels[1, 1] = -100

    def of_whole(x: Tensor) -> Tensor:
        found = x.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return found.where(labels != -100, 0)

    assert_equal_of_parts(lambda x: dtplan.log_probs(x, labels), of_whole, logits_of(vocabulary, 2, 3), tp)


# --- Sampling ---

SAMPLING = {"max_new_tokens": 12, "do_sample": True, "use_cache": True}


def _sampled(rank: int) -> tuple[list[int], list[int], list[float]]:
    config = t0(use_cache=True, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    model, prompt = model_of(config), ids_of(config, rows=1, length=4)
    torch.manual_seed(7)
    wanted = model.generate(prompt, **SAMPLING)
    sharded = dtplan.parallelize(model, mesh_of(2))
    torch.manual_seed(7 + rank)
    return sharded.generate(prompt, **SAMPLING)[0].tolist(), wanted[0].tolist(), torch.rand(2).tolist()


def test_b99_ranks_that_are_seeded_apart_sample_the_same_tokens(pool: GlooPool) -> None:
    """Else each draws its own and the cache is of no text at all; right are the tokens of one device, rank 0's seed."""
    first, second = pool.run(_sampled, ranks=2)
    assert first[0] == first[1] == second[0]
    assert first[2] == second[2], "the streams go on alike"


@pytest.mark.parametrize("switch", ["sequence_parallel", "loss_parallel"])
@pytest.mark.parametrize("tp", [1, 2])
def test_b99_generation_from_cut_tokens_or_logits_is_refused(switch: str, tp: int) -> None:
    copies = [model_of(t0()) for _ in range(tp)]

    def on_rank(rank: int) -> None:
        sharded: Any = dtplan.parallelize(copies[rank], mesh_of(tp), **{switch: True})  # type: ignore[arg-type]
        with pytest.raises(ApplyError, match="parallelize without sequence_parallel and loss_parallel"):
            sharded.generate(ids_of(t0()), max_new_tokens=2)

    simulated_ranks(tp, on_rank)
