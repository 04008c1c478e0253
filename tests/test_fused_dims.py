"""Fused dims: how a stored parameter is put together from parts of checkpoint tensors, and applied plans with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dtplan
from dtplan.planner.apply import applied
from dtplan.planner.stored import Part, Stored
from dtplan.prove.oracle import BOUND, errors, outcome
from dtplan.prove.simulated import simulated_ranks
from tests.families import batch, build, plan_file


@st.composite
def stored_and_sources(draw):
    """Parts of one to three tensors, each tensor covered by its parts, in any order, on one rank or more."""
    tp = draw(st.integers(1, 4))
    numbers = [n for n in range(1, tp + 1) if tp % n == 0]
    dim = draw(st.integers(0, 1))
    parts, sources = [], {}
    for number in range(draw(st.integers(1, 3))):
        start = 0
        for units in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
            copies = draw(st.sampled_from(numbers))
            parts.append(Part(source=f"w{number}", start=start, size=units * tp, copies=copies))
            start += units * tp
        shape = [3, 3]
        shape[dim] = start
        sources[f"w{number}"] = torch.rand(shape)
    return Stored(dim=dim, tp=tp, parts=tuple(draw(st.permutations(parts)))), sources


@given(stored_and_sources())
def test_split_undoes_join(case):
    stored, sources = case
    back = stored.split(stored.join(sources))
    assert back.keys() == sources.keys()
    assert all(torch.equal(back[name], sources[name]) for name in sources)


@given(stored_and_sources(), st.data())
def test_runs_of_an_interval_are_those_of_the_whole(case, data):
    stored, sources = case
    whole = stored.join(sources)
    length = whole.shape[stored.dim]
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    rows = [sources[run.source].narrow(stored.dim, run.start, run.size) for run in stored.runs(start, stop)]
    found = torch.cat(rows, stored.dim) if rows else whole.narrow(stored.dim, 0, 0)
    assert torch.equal(found, whole.narrow(stored.dim, start, stop - start))


def test_each_rank_keeps_its_rows_of_each_part():
    """Case B22: parts [32, 16, 16] over two ranks."""
    stored = Stored.of("qkv", (32, 16, 16), dim=0, tp=2)
    rows = torch.arange(64)
    first, second = stored.join({"qkv": rows}).chunk(2)
    assert first.tolist() == [*range(16), *range(32, 40), *range(48, 56)]
    assert second.tolist() == [*range(16, 32), *range(40, 48), *range(56, 64)]


def test_ranks_that_share_rows_keep_copies_and_split_takes_those_that_it_is_told():
    """Two kv heads [4 rows] over four ranks, and one row for all."""
    stored = Stored.of("kv", (4, 1), dim=0, tp=4, copies=(2, 4))
    whole = stored.join({"kv": torch.arange(5)})
    assert [part.tolist() for part in whole.chunk(4)] == [[0, 1, 4], [0, 1, 4], [2, 3, 4], [2, 3, 4]]
    assert stored.own(torch.arange(5), 2).tolist() == [2, 3, 4]
    whole[5] = 7  # rank 1's copy of the row for all
    assert stored.split(whole, 0)["kv"].tolist() == [0, 1, 2, 3, 4]
    assert stored.split(whole, 1)["kv"].tolist() == [0, 1, 2, 3, 7]


@pytest.mark.parametrize("name", ["phi3", "gpt2", "mixtral", "gpt_bigcode"])
def test_fused_weights_are_exact_on_a_2d_mesh(name):
    """FSDP2 cuts the rank's rows once more; optimizer steps are the unsharded ones."""
    model, data = build(name), batch(name, images=False)
    truth = outcome(copy.deepcopy(model), data)
    copies = [copy.deepcopy(model) for _ in range(4)]

    def on_rank(rank: int) -> dict[str, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        sharded = dtplan.parallelize(copies[rank], mesh, plan_file(name))
        assert applied(sharded).stored
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
        return errors(outcome(sharded, data), truth)

    for found in simulated_ranks(4, on_rank):
        assert max(found.values()) <= BOUND


def test_a_degree_that_does_not_divide_a_section_is_refused():
    from tests.families import on_meta

    with pytest.raises(dtplan.BindError, match="does not divide"):
        dtplan.bind(on_meta("phi3"), plan_file("phi3"), tp=4)


def test_localize_divides_a_number_of_the_modules_own_config():
    model = build("phi3")

    def on_rank(rank: int) -> tuple[int, ...]:
        sharded = copy.deepcopy(model)
        dtplan.parallelize(sharded, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan_file("phi3"))
        attention: Any = sharded.get_submodule("model.layers.0.self_attn")
        config: Any = sharded.config
        return attention.config.num_attention_heads, config.num_attention_heads

    assert simulated_ranks(2, on_rank) == [(2, 4), (2, 4)]
