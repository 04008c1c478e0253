"""Cases under *Loading and initialisation*: buffers that no file holds, what a rank reads and holds, lists that differ.

B74 is in test_rank0_weights.py; B76 and B77 are with initialisation.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dtplan
from dtplan import DtplanError, WeightsError
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights.rank0 import take_from_rank0
from tests.cases import gap, ids_of, model_of, t0


def _on_tp(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return dtplan.parallelize(model, mesh)


def _buffers_on_rank(rank: int, folder: str) -> tuple[float, float, tuple[str, ...]]:
    config = t0()
    model, source = _on_tp(model_of(config, meta=True)), model_of(config)
    with torch.no_grad():
        model.model.rotary_emb.to_empty(device="cpu").inv_freq.fill_(float("nan"))  # what to_empty may leave there
    model.model.rotary_emb.to("meta")
    report = dtplan.load(model, folder)
    ids = ids_of(config)
    return (
        gap(model.model.rotary_emb.inv_freq, source.model.rotary_emb.inv_freq),
        gap(model(ids).logits, source(ids).logits),
        (*report.missing, *report.unexpected),
    )


def test_b72_rotary_frequencies_that_no_file_holds_are_computed_again(tmp_path: Path) -> None:
    model_of(t0()).save_pretrained(tmp_path)
    for frequencies, logits, left in simulated_ranks(2, _buffers_on_rank, str(tmp_path)):
        assert frequencies == 0
        assert logits < 1e-5
        assert left == ()


class Tables(nn.Module):
    """Holds nothing but buffers, ones, of given names and sizes."""

    def __init__(self, sizes: dict[str, int], *, persistent: bool = False) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_buffer(name, torch.ones(size), persistent=persistent)


class Model(nn.Module):
    """A layer, and buffers that nothing computes again."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.tables = tables


PLAN = "dtplan: 1\nrules: {up: colwise, tables: replicate}\n"


def _left_over_on_rank(rank: int, folder: str) -> str:
    with torch.device("meta"):
        model = Model(Tables({"scale": 8}))
    model = dtplan.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), dtplan.parse_plan(PLAN))
    with pytest.raises(WeightsError) as caught:
        dtplan.load(model, folder)
    return str(caught.value)


def test_b72_a_buffer_that_is_neither_loaded_nor_computed_is_named(tmp_path: Path) -> None:
    save_file(dict(Model(Tables({})).state_dict()), tmp_path / "model.safetensors")
    (text,) = set(simulated_ranks(2, _left_over_on_rank, str(tmp_path)))
    assert "1 tensors of the model would be left without a value: tables.scale;" in text


def _memory() -> dict[str, int]:
    """Resident memory in bytes: now, and the highest since it was last reset."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0]: int(words[1]) << 10 for words in lines if words[0] in {"VmRSS:", "VmHWM:"}}


def _peak_on_rank(rank: int, small: str, large: str) -> dict[str, int]:
    dtplan.load(_on_tp(model_of(t0(num_key_value_heads=4), meta=True)), small)  # code is paged in now
    model = _on_tp(model_of(_wide(), meta=True))
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory()["VmRSS:"]
    report = dtplan.load(model, large)
    peak = _memory()["VmHWM:"] - before
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "peak": peak,
        "own": sum(p.nbytes for p in own),
        "read": report.bytes_read,
        "largest": max(p.numel() * p.element_size() for p in model.parameters()),
    }


def _wide() -> Any:
    return t0(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_key_value_heads=4)


def test_b73_a_rank_reads_and_holds_its_own_shards_and_little_more(pool: GlooPool, tmp_path: Path) -> None:
    model_of(t0(num_key_value_heads=4)).save_pretrained(tmp_path / "small")
    model = model_of(_wide())
    model.save_pretrained(tmp_path / "large", max_shard_size="30MB")
    whole = sum(p.nbytes for p in model.parameters())
    for found in pool.run(_peak_on_rank, str(tmp_path / "small"), str(tmp_path / "large"), ranks=4):
        assert found["own"] < 0.26 * whole
        assert found["read"] == found["own"]
        assert found["peak"] <= found["own"] + 2 * found["largest"]
        assert found["peak"] > 0.9 * found["own"], "nothing was measured"


def _other_order(rank: int, *, persistent: bool) -> Any:
    """A model with two buffers of 8 and 4, whose order is another one on rank 1."""
    sizes = {"first": 8, "second": 4}
    return Model(Tables(sizes if rank == 0 else dict(reversed(sizes.items())), persistent=persistent))


def _load_on_rank(rank: int, persistent: bool, from_rank0: bool) -> tuple[str, float]:
    model, start = _other_order(rank, persistent=persistent), time.perf_counter()
    source = model.state_dict() if rank == 0 or not from_rank0 else None
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
    try:
        model = dtplan.parallelize(model.to("meta"), mesh, dtplan.parse_plan(PLAN))
        dtplan.load(model, source, from_rank0=from_rank0)
    except DtplanError as error:
        return str(error), time.perf_counter() - start
    return "loaded", time.perf_counter() - start


@pytest.mark.parametrize("from_rank0", [False, True], ids=["each reads", "from rank 0"])
@pytest.mark.parametrize("persistent", [True, False])
def test_b75_buffers_in_another_order_on_a_rank_are_refused_and_do_not_hang(
    pool: GlooPool, persistent: bool, from_rank0: bool
) -> None:
    found = pool.run(_load_on_rank, persistent, from_rank0, ranks=2)
    (text,) = {said for said, _ in found}
    assert "ranks 0 and 1 differ: the model or the plan is not the same" in text
    assert max(seconds for _, seconds in found) < 30


def _take_on_rank(rank: int) -> list[tuple[str, list[float]]]:
    model = _other_order(rank, persistent=False)
    with torch.no_grad():
        model.tables.first.fill_(1.0 - rank)
        model.tables.second.fill_(2.0 - rank)
    take_from_rank0(model)
    return sorted((name, buffer.tolist()) for name, buffer in model.named_buffers())


def test_b75_rank_0_sends_buffers_by_name_whatever_their_order(pool: GlooPool) -> None:
    assert pool.run(_take_on_rank, ranks=2) == [[("tables.first", [1.0] * 8), ("tables.second", [2.0] * 4)]] * 2
