"""Degrees as SageMaker's library defines them, and the two-step front door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import dtplan
from dtplan import ApplyError, BindError, DegreesError
from dtplan.planner.degrees import Degrees, read_degrees
from dtplan.prove.pool import GlooPool
from tests.models import batch, build, llama, on_meta


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 64))
def test_the_mesh_holds_every_rank_or_the_degrees_are_refused(world: int, tp: int, shard: int) -> None:
    degrees = Degrees(tensor_parallel_degree=tp, hybrid_shard_degree=shard)
    legal = world % tp == 0 and (shard == 0 or (world // tp) % shard == 0)
    if not legal:
        with pytest.raises(DegreesError):
            degrees.mesh_shape(world)
        return
    replicas, shards, group = degrees.mesh_shape(world)
    assert replicas * shards * group == world
    assert group == tp
    assert shards == (shard or world // tp)
    if shard == 0:
        assert replicas == 1


@pytest.mark.parametrize(
    ("config", "world", "text"),
    [
        ({"tensor_parallel_degree": 3}, 8, "=3 does not divide the 8 ranks; it may be one of 1, 2, 4, 8"),
        ({"tensor_parallel_degree": 16}, 8, "does not divide the 8 ranks"),
        (
            {"tensor_parallel_degree": 2, "hybrid_shard_degree": 3},
            8,
            "=3 does not divide the 4 data-parallel ranks (8 ranks / tensor_parallel_degree=2); it may be 0 (",
        ),
        ({"tensor_parallel_degree": 0}, 8, "tensor_parallel_degree=0: a whole number of at least 1 is needed"),
        ({"tensor_parallel_degree": True}, 8, "tensor_parallel_degree=True: a whole number"),
        ({"tensor_parallel_degree": "2"}, 8, "tensor_parallel_degree='2': a whole number"),
        ({"hybrid_shard_degree": -1}, 8, "hybrid_shard_degree=-1: a whole number of at least 0 is needed"),
        ({"random_seed": 1.5}, 8, "random_seed=1.5: a whole number"),
        ({"tensor_paralel_degree": 2}, 8, "unknown key 'tensor_paralel_degree' in the configuration; did you mean"),
        ({"context_parallel_degree": 2}, 8, "context parallelism is not part of dtplan yet"),
        ({"expert_parallel_degree": 2}, 8, "expert parallelism is not part of dtplan yet"),
        ({"sm_activation_offloading": True}, 8, "sm_activation_offloading has no counterpart here"),
        ([1], 8, "the configuration is a list"),
    ],
)
def test_every_illegal_combination_is_one_clear_valueerror(config: Any, world: int, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is checked below
        read_degrees(config).mesh_shape(world)
    assert isinstance(caught.value, DegreesError)
    assert text in str(caught.value)


def test_a_dict_a_file_and_keywords_say_the_same(tmp_path: Path) -> None:
    given_ = {"tensor_parallel_degree": 8, "hybrid_shard_degree": 2, "random_seed": 0, "context_parallel_degree": 1}
    file = tmp_path / "smp_config.json"
    file.write_text(json.dumps(given_))
    wanted = Degrees(tensor_parallel_degree=8, hybrid_shard_degree=2, random_seed=0)
    assert read_degrees(given_) == read_degrees(file) == read_degrees(str(file)) == wanted
    assert read_degrees(tensor_parallel_degree=8, hybrid_shard_degree=2, random_seed=0) == wanted
    assert read_degrees(file, tensor_parallel_degree=4).tensor_parallel_degree == 4


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot read the configuration"),
        (b"{", "is not JSON"),
        (b"[]", "holds a list"),
        (b"\xff\xfe", "is not JSON"),
    ],
)
def test_a_bad_configuration_file_is_told(tmp_path: Path, content: bytes | None, text: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DegreesError, match=text):
        read_degrees(file)


def _front_door_on_rank(rank: int, meta: bool) -> tuple[float, float, str]:
    """init, transform, a step: the two lines that users of SageMaker's library write."""
    state = dtplan.init({"tensor_parallel_degree": 2, "random_seed": 0})
    assert dtplan.is_initialized()
    assert dtplan.get_state() is state
    assert (state.tp_size, state.dp_size, state.world_size) == (2, 2, 4)
    assert state.hybrid_shard_degree == 2
    assert dist.get_world_size(state.tp_process_group) == 2
    drawn = torch.rand(1).item()
    model = dtplan.transform(on_meta(llama()) if meta else build(llama(), dtype=torch.float32))
    kinds = {p.device.type for p in model.parameters()}
    loss = 0.0 if meta else model(**batch(llama())).loss.item()
    dtplan.reset()
    with pytest.raises(ApplyError, match=r"call dtplan\.init"):
        dtplan.get_state()
    return drawn, loss, kinds.pop()


@pytest.mark.parametrize("meta", [False, True], ids=["live", "meta"])
def test_init_then_transform(pool: GlooPool, meta: bool) -> None:
    found = pool.run(_front_door_on_rank, meta)
    assert len(set(found)) == 1
    assert found[0][2] == ("meta" if meta else "cpu")


def _failing_init_on_rank(rank: int, config: Any) -> None:
    # one rank has another configuration than the others: all must hear of it
    dtplan.init(config if rank == 1 else {"tensor_parallel_degree": 2})


def test_a_bad_configuration_on_one_rank_is_told_on_all(pool: GlooPool) -> None:
    outcomes = pool.run_outcomes(_failing_init_on_rank, {"tensor_parallel_degree": "two"})
    texts = {(type(one.error), str(one.error)) for one in outcomes}
    assert texts == {(DegreesError, "tensor_parallel_degree='two': a whole number of at least 1 is needed")}


def _unknown_model_on_rank(rank: int) -> None:
    dtplan.init(tensor_parallel_degree=2)
    model = on_meta(llama())
    model.__class__ = type("StrangeForCausalLM", (type(model),), {})
    dtplan.transform(model)


def test_a_model_without_a_plan_is_refused_alike_on_all_ranks(pool: GlooPool) -> None:
    outcomes = pool.run_outcomes(_unknown_model_on_rank)
    assert {type(one.error) for one in outcomes} == {BindError}
    (text,) = {str(one.error) for one in outcomes}
    assert "no built-in plan serves StrangeForCausalLM" in text


def _bad_plan_on_one_rank(rank: int, folder: str) -> None:
    dtplan.init(tensor_parallel_degree=4)
    dtplan.transform(on_meta(llama()), plan=f"{folder}/plan{rank}.yaml")


def test_a_plan_that_is_broken_on_one_host_is_told_on_all(pool: GlooPool, tmp_path: Path) -> None:
    for rank in range(4):
        text = "dtplan: 1\nextends: llama\n" if rank != 2 else "dtplan: 1\nextends: lama\n"
        (tmp_path / f"plan{rank}.yaml").write_text(text)
    outcomes = pool.run_outcomes(_bad_plan_on_one_rank, str(tmp_path))
    (text,) = {str(one.error) for one in outcomes}
    assert "plan2.yaml:2:10: DTP303" in text


def test_init_without_torchrun_is_a_world_of_one(pool: GlooPool) -> None:
    assert pool.run(_alone, ranks=1) == [(1, 1)]


def _alone(rank: int) -> tuple[int, int]:
    dist.destroy_process_group()
    state = dtplan.init()
    return state.world_size, state.dp_size


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(DegreesError, match="lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start with torchrun"):
        dtplan.init()
