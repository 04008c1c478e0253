"""Cases under *Saving, resuming, changing the mesh* that resume a training run, and the proof of resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dtplan
from dtplan import WeightsError
from dtplan.prove.oracle import relative_error
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.training.spread import Place
from tests.cases import P0, P1, t0
from tests.models import build, llama, neox
from tests.resuming import PHI3, PHI3_PLAN, Run, Shape, equal, resumed, trained_and_saved

ROUNDING = 1e-13
"""Relative, of float64 sums in another order over three steps."""


# ---------------------------------------------------------------------------------------------------------- proof


def _straight(rank: int, model: nn.Module, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    run = Run(model, (1, 1, 1))
    losses = run.train(0, 3)
    run.checkpoints(folder).save(3)
    return losses + run.train(3, 6), run.holds()


def _rest(rank: int, config: Any, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    run = Run(config, (1, 2, 2))
    found = run.checkpoints(folder).resume()
    assert found is not None
    losses = run.train(found.step, 6)
    return losses, run.holds()


@pytest.mark.parametrize("world", ["gloo", "simulated"])
def test_three_steps_resumed_at_tp_2_x_shard_2_are_those_of_the_straight_run(
    pool: GlooPool, tmp_path: Path, world: str
) -> None:
    config = llama(vocab_size=33, num_key_value_heads=2) if world == "gloo" else neox(tie_word_embeddings=True)
    ((losses, truth),) = simulated_ranks(1, _straight, build(config), str(tmp_path))
    assert len({round(loss, 6) for loss in losses}) == 6
    arguments = _rest, config, str(tmp_path)
    found = pool.run(*arguments) if world == "gloo" else simulated_ranks(4, *arguments)
    # A rank's loss is over its own rows: the first two ranks hold one half, the others the other.
    curve = [(first + second) / 2 for first, second in zip(found[0][0], found[2][0], strict=True)]
    assert curve == [pytest.approx(loss, rel=ROUNDING) for loss in losses[3:]]
    for _, held in found:
        assert held.keys() == truth.keys()
        assert max(relative_error(held[name], truth[name]) for name in truth) <= ROUNDING


# ---------------------------------------------------------------------------------------------------------- cases


def _third_step(rank: int, model: Any, folder: str, straight: bool) -> tuple[float, dict[str, Tensor]]:
    run = Run(model, (1, 2, 2))
    checkpoints = run.checkpoints(folder)
    if straight:
        run.train(0, 2)
        checkpoints.save(2, extra={"position": 8})
    else:
        found = checkpoints.resume()
        assert found is not None
        assert (found.step, found.extra) == (2, {"position": 8})
    (loss,) = run.train(2, 3)
    return loss, run.holds()


def test_b35_the_third_loss_is_bit_equal_after_a_resume_at_an_uneven_vocabulary(tmp_path: Path) -> None:
    config = t0(vocab_size=33)
    straight = simulated_ranks(4, _third_step, build(config), str(tmp_path), True)
    again = simulated_ranks(4, _third_step, config, str(tmp_path), False)
    for (loss, held), (wanted, truth) in zip(again, straight, strict=True):
        assert loss == wanted
        assert equal(held, truth)


def _alone(rank: int, folder: str) -> str:
    run = Run(build(t0()), (1, 1, 2), dtplan.parse_plan(P0))
    checkpoints = run.checkpoints(folder, meet_seconds=2)
    if rank == 0:
        with pytest.raises(WeightsError) as caught:
            checkpoints.save(1)
        return str(caught.value)
    return ""


def test_b79_a_save_on_one_rank_only_is_told_in_seconds(pool: GlooPool, tmp_path: Path) -> None:
    said, _ = pool.run(_alone, str(tmp_path), ranks=2)
    assert "TrainingCheckpoints.save is collective: all 2 ranks must call it, and rank 1 did not within 2 s" in said
    assert list(tmp_path.iterdir()) == []


class _FirstMoment(torch.optim.Optimizer):
    """Makes its state as TransformerEngine's FusedAdam once did, from the global shape, or as it should."""

    def __init__(self, model: nn.Module, how: str) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.how = how

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            like = self.how == "like"
            self.state[parameter]["exp_avg"] = torch.zeros_like(parameter) if like else torch.zeros(parameter.shape)


def _with_state_made(rank: int, model: nn.Module, how: str, folder: str) -> str:
    run = Run(model, (1, 2, 1), make=lambda sharded: _FirstMoment(sharded, how))
    run.optimizer.step()
    try:
        run.checkpoints(folder).save(1)
    except WeightsError as error:
        return str(error)
    return "saved"


def test_b59_state_made_from_the_global_shape_is_refused_by_name(tmp_path: Path) -> None:
    """State made by zeros(shape) is whole on every rank; made by zeros_like it lies as its parameter and is saved."""
    (refused,) = set(simulated_ranks(2, _with_state_made, build(t0()), "shape", str(tmp_path)))
    assert "optimizer state exp_avg of model.embed_tokens.weight: a plain tensor of shape [32, 32]" in refused
    assert "where the parameter is a DTensor of shape [32, 32] placed as (" in refused
    assert "torch.zeros_like makes such" in refused
    assert set(simulated_ranks(2, _with_state_made, build(t0()), "like", str(tmp_path))) == {"saved"}


def _fourth_step(rank: int, model: Any, folder: str, straight: bool) -> tuple[float, dict[str, Tensor]]:
    run = Run(model, (1, 1, 2), dtplan.parse_plan(P0))
    if straight:
        run.train(0, 3)
        run.checkpoints(folder).save(3)
    else:
        assert run.checkpoints(folder).resume() is not None
    (loss,) = run.train(3, 4)
    return loss, run.holds()


def test_b79_the_fourth_loss_and_the_moments_are_bit_equal_after_a_resume(tmp_path: Path) -> None:
    straight = simulated_ranks(2, _fourth_step, build(t0()), str(tmp_path), True)
    again = simulated_ranks(2, _fourth_step, t0(), str(tmp_path), False)
    for (loss, held), (wanted, truth) in zip(again, straight, strict=True):
        assert loss == wanted
        assert any(name.endswith("exp_avg_sq") for name in held)
        assert equal(held, truth)


@pytest.mark.parametrize("vocab_size", [5, 33])
def test_b83_every_whole_tensor_equals_the_source_under_tp_and_fsdp(tmp_path: Path, vocab_size: int) -> None:
    model = build(t0(vocab_size=vocab_size))
    source = {f"{name} ": parameter.detach() for name, parameter in model.named_parameters()}
    for held in simulated_ranks(4, _untrained, model, (1, 2, 2), str(tmp_path)):
        assert equal(held, source)
    index = json.loads((tmp_path / "step-00000000" / "tensors.json").read_text())
    assert {name: said["shape"] for name, said in index.items()} == {
        f"model.{name.strip()}": list(tensor.shape) for name, tensor in source.items()
    }
    ((held, _),) = simulated_ranks(1, _resumed_at, t0(vocab_size=vocab_size), (1, 1, 1), str(tmp_path))
    assert equal(held, source)


def _untrained(rank: int, model: nn.Module, shape: Shape, folder: str) -> dict[str, Tensor]:
    run = Run(model, shape, P1)
    run.checkpoints(folder).save(0)
    return run.holds()


def _resumed_at(rank: int, config: Any, shape: Shape, folder: str, plan: str = P1) -> tuple[dict[str, Tensor], int]:
    run = Run(config, shape, plan)
    found = run.checkpoints(folder).resume()
    assert found is not None
    return run.holds(), found.step


@pytest.mark.parametrize("after", [(1, 2, 1), (1, 2, 2), (1, 1, 1)], ids=["dp2", "dp2-tp2", "one"])
def test_b85_fused_gate_and_up_are_equal_on_another_number_of_devices(
    b85: tuple[Path, dict[str, Tensor]], after: Shape
) -> None:
    folder, truth = b85
    assert any("gate_up_proj.weight exp_avg" in name for name in truth)
    world = after[0] * after[1] * after[2]
    for held, _ in simulated_ranks(world, resumed, PHI3, after, str(folder), PHI3_PLAN):
        assert equal(held, truth)


@pytest.fixture(scope="module")
def b85(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Saved at dp 4."""
    folder = tmp_path_factory.mktemp("b85")
    truth, *_ = simulated_ranks(4, trained_and_saved, build(PHI3), (1, 4, 1), str(folder), PHI3_PLAN)
    return folder, truth


def _with_loader(rank: int, model: nn.Module, folder: str) -> dict[str, Tensor]:
    run = Run(model, (1, 2, 2))
    run.train(0, 2)
    run.checkpoints(folder).save(2, per_rank={"loader": {"rows": 100 + run.data}})
    return run.holds()


def _loader_resumed(rank: int, config: Any, shape: Shape, folder: str, how: str) -> Any:
    run = Run(config, shape)
    options: dict[str, Any] = {"left out": {"leave_out": ["loader"]}, "resharded": {"reshard": {"loader": _joined}}}
    try:
        found = run.checkpoints(folder).resume(**options.get(how, {}))
    except WeightsError as error:
        return str(error), {}
    assert found is not None
    return found.per_rank.get("loader"), run.holds()


def _joined(values: Any, place: Place) -> Any:
    return {"rows": sum(value["rows"] for value in values), "for": [place.data, place.data_size]}


def test_b86_a_loaders_state_is_resharded_or_refused_by_name_and_never_dropped(tmp_path: Path) -> None:
    config = t0()
    truth, *_ = simulated_ranks(4, _with_loader, build(config), str(tmp_path))

    def at(shape: Shape, how: str = "") -> list[Any]:
        found = simulated_ranks(shape[1] * shape[2], _loader_resumed, config, shape, str(tmp_path), how)
        assert all(equal(held, truth) for _, held in found if held)
        return [value for value, _ in found]

    for shape in ((1, 4, 1), (1, 1, 2)):
        (refused,) = set(at(shape))
        assert f"loader differs between the data ranks, of which there were 2 and are {shape[1]} now" in refused
        assert "resume(reshard={'loader': " in refused
        assert at(shape, "left out") == [None] * shape[1] * shape[2]
    assert at((1, 4, 1), "resharded") == [{"rows": 201, "for": [rank, 4]} for rank in range(4)]
    assert at((1, 2, 1)) == [{"rows": 100}, {"rows": 101}], "as many data ranks, at another tp"


def test_b87_moments_and_the_count_of_steps_survive_another_tp(tmp_path: Path) -> None:
    config = t0(num_key_value_heads=4)
    truth, *_ = simulated_ranks(2, trained_and_saved, build(config), (1, 1, 2), str(tmp_path))
    assert {tensor.item() for name, tensor in truth.items() if name.endswith(" step")} == {2.0}
    for tp in (1, 4):
        for held, _ in simulated_ranks(tp, resumed, config, (1, 1, tp), str(tmp_path)):
            assert equal(held, truth)


class _Plain(nn.Module):
    """A layer for the streams to be saved with (B98)."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 4)


def _streams(rank: int, folder: str, tp: int, saves: bool, out: list[str]) -> Any:
    torch.manual_seed(5)  # a process' shared stream
    plan = dtplan.parse_plan("dtplan: 1\nrules: {score: {style: colwise}}\n")
    mesh = init_device_mesh("cpu", (1, tp), mesh_dim_names=("shard", "tp"))
    model = dtplan.parallelize(_Plain().double(), mesh, plan)
    own = torch.Generator().manual_seed(1000 + (rank if saves else 50))
    checkpoints = dtplan.TrainingCheckpoints(folder, model, generators={"attention": own})
    torch.rand(3)
    torch.rand(rank + 1, generator=own)
    if saves:
        checkpoints.save(1)
    else:
        torch.manual_seed(6)
        try:
            found = checkpoints.resume(leave_out=out)
        except WeightsError as error:
            return str(error)
        assert found is not None
    return torch.rand(4).tolist(), torch.rand(4, generator=own).tolist()


def test_b98_the_shared_and_the_own_stream_of_a_rank_go_on_where_they_were(pool: GlooPool, tmp_path: Path) -> None:
    wanted = pool.run(_streams, str(tmp_path), 2, True, [], ranks=2)
    assert wanted[0][0] == wanted[1][0], "the shared stream"
    assert wanted[0][1] != wanted[1][1], "the own ones"
    assert pool.run(_streams, str(tmp_path), 2, False, [], ranks=2) == wanted
    (refused,) = pool.run(_streams, str(tmp_path), 1, False, [], ranks=1)
    assert "rng.attention differs between the tp ranks, of which there were 2 and are 1 now" in refused
    ((shared, own),) = pool.run(_streams, str(tmp_path), 1, False, ["rng.attention"], ranks=1)
    assert shared == wanted[0][0], "the shared stream goes on at another tp"
    assert own not in [stream for _, stream in wanted]
