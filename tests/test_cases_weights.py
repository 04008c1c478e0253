"""Cases under *Tied embeddings* and *Uneven sizes* that load and save: through `parallelize`, `load` and `save`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PretrainedConfig, conversion_mapping
from transformers.core_model_loading import PermuteForRope, WeightConverter

import dtplan
from dtplan import WeightsError
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights.load import load_checkpoint
from tests.cases import gap, ids_of, model_of, t0
from tests.models import neox


def _mesh(shard: int, tp: int) -> Any:
    return init_device_mesh("cpu", (shard, tp), mesh_dim_names=("shard", "tp"))


def _loaded(config: PretrainedConfig, folder: str, shard: int = 2, tp: int = 2) -> Any:
    """A model that was built on meta, sharded and loaded."""
    model = dtplan.parallelize(model_of(config, meta=True), _mesh(shard, tp))
    dtplan.load(model, folder)
    return model


def _source(config: PretrainedConfig, folder: Path) -> Any:
    model = model_of(config)
    model.save_pretrained(folder)
    return model


def _tied_on_rank(rank: int, folder: str) -> tuple[bool, bool, float]:
    config = t0(tie_word_embeddings=True)
    model, ids = _loaded(config, folder), ids_of(config)
    before = model.lm_head.weight is model.model.embed_tokens.weight
    distance = gap(model.lm_head.weight, model_of(config).lm_head.weight)
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return before, model.lm_head.weight is model.model.embed_tokens.weight, distance


def test_b28_a_tie_made_on_meta_is_one_parameter_after_loading_and_a_step(tmp_path: Path) -> None:
    _source(t0(tie_word_embeddings=True), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no dict
    assert simulated_ranks(4, _tied_on_rank, str(tmp_path)) == [(True, True, 0.0)] * 4


def _both_keys_on_rank(rank: int, folder: str) -> str:
    try:
        _loaded(t0(tie_word_embeddings=True), folder)
    except WeightsError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
def test_b31_a_file_that_holds_both_ends_of_a_tie(tmp_path: Path, equal: bool) -> None:
    _source(t0(tie_word_embeddings=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if not equal:
        head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    (text,) = set(simulated_ranks(4, _both_keys_on_rank, str(tmp_path)))
    if equal:
        assert text == "loaded"
    else:
        assert "model.embed_tokens.weight" in text
        assert "lm_head.weight" in text


def _round_trip_on_rank(rank: int, config: PretrainedConfig, source: str, target: str, shard: int, tp: int) -> None:
    dtplan.save(_loaded(config, source, shard, tp), target, max_shard_bytes=20_000)


@pytest.mark.parametrize(("shard", "tp"), [(2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("family", ["llama", "neox"])
def test_b33_an_uneven_vocabulary_is_saved_without_padding(tmp_path: Path, family: str, shard: int, tp: int) -> None:
    config = t0(vocab_size=33, num_key_value_heads=4) if family == "llama" else neox(vocab_size=33)
    source = _source(config, tmp_path / "source")
    simulated_ranks(4, _round_trip_on_rank, config, str(tmp_path / "source"), str(tmp_path / "saved"), shard, tp)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.vocab_size == 33
    assert again.lm_head.weight.shape[0] == 33
    assert all(torch.equal(p, source.get_parameter(n)) for n, p in again.named_parameters())
    saved = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(saved.values())) > 1


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_b34_the_parts_of_all_ranks_are_the_file_whatever_the_size(tmp_path: Path, tp: int) -> None:
    """Slice-on-read drops rows where a stride is a floor division; of 33 rows tp 4 reads 9, 9, 9 and 6."""
    sizes = [*range(1, 2 * tp + 2), 33]
    file = {f"{dim}.{size}": torch.rand((size, 3) if dim == 0 else (3, size)) for size in sizes for dim in (0, 1)}
    save_file(file, tmp_path / "model.safetensors", {"format": "pt"})

    def on_rank(rank: int) -> dict[str, torch.Tensor]:
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        model = nn.Module()
        for dim in (0, 1):
            held = {name[2:]: distribute_tensor(value, mesh, [Shard(dim)]) for name, value in _blank(file, dim)}
            model.add_module(str(dim), nn.ParameterDict(held))
        load_checkpoint(model, tmp_path)
        return {name: parameter.detach().to_local() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]

    parts = simulated_ranks(tp, on_rank)
    for name, value in file.items():
        assert torch.equal(torch.cat([held[name] for held in parts], int(name[0])), value), name
    if tp == 4:
        assert [len(held["0.33"]) for held in parts] == [9, 9, 9, 6]


def _blank(file: dict[str, torch.Tensor], dim: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros_like(value)) for name, value in file.items() if name.startswith(str(dim))]


def _steps_on_rank(rank: int, folder: str, resumed: str | None) -> list[float]:
    """SGD has no state of its own, so weights are all that a resume needs."""
    config = t0(vocab_size=33)
    model = _loaded(config, resumed or folder)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2 if resumed else 0, 3):
        ids = ids_of(config, seed=step)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1 and not resumed:
            dtplan.save(model, f"{folder}-step2")
    return losses


def test_b35_the_loss_after_a_resume_is_bit_equal_at_an_uneven_vocabulary(pool: GlooPool, tmp_path: Path) -> None:
    """The part of B35 that needs no optimizer state."""
    folder = str(tmp_path / "start")
    _source(t0(vocab_size=33), tmp_path / "start")
    straight = pool.run(_steps_on_rank, folder, None)
    resumed = pool.run(_steps_on_rank, folder, f"{folder}-step2")
    assert [losses[2] for losses in straight] == [losses[0] for losses in resumed]


class OneRow(nn.Module):
    """A layer of which some ranks hold no row (B36)."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(17, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(x)


def _one_row_on_rank(rank: int, source: str, target: str) -> tuple[list[int], float, float]:
    with torch.device("meta"):
        model = OneRow()
    plan = dtplan.parse_plan("dtplan: 1\nrules: {score: {style: replicate}, other: {style: colwise, optional: true}}\n")
    # nothing is cut on tp here, which parallelize refuses at tp 2: the rows are cut by FSDP2 alone
    model = dtplan.parallelize(model, init_device_mesh("cpu", (4, 1), mesh_dim_names=("shard", "tp")), plan)
    dtplan.load(model, source)
    rows = [p.to_local().shape[0] for p in model.parameters() if isinstance(p, DTensor)]
    model(torch.ones(2, 17)).sum().backward()
    norm = dtplan.clip_grad_norm_(model, 1.0)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    dtplan.save(model, target)
    weight: Any = model.score.weight
    return rows, norm.item(), float(weight.detach().full_tensor().sum())


def test_b36_ranks_without_a_row_load_clip_step_and_save(pool: GlooPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = OneRow()
    (tmp_path / "source").mkdir()
    save_file(dict(source.state_dict()), tmp_path / "source" / "model.safetensors", {"format": "pt"})
    found = pool.run(_one_row_on_rank, str(tmp_path / "source"), str(tmp_path / "saved"))
    source(torch.ones(2, 17)).sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_(source.parameters(), 1.0)
    torch.optim.AdamW(source.parameters(), lr=0.1).step()
    assert [rows for rows, _, _ in found] == [[1, 1], [0, 0], [0, 0], [0, 0]]
    for _, norm, total in found:
        assert norm == pytest.approx(wanted.item(), rel=1e-6)
        assert total == pytest.approx(float(source.score.weight.detach().sum()), rel=1e-5)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    torch.testing.assert_close(saved["score.weight"], source.score.weight.detach())


def _mismatch_on_rank(rank: int, folder: str) -> None:
    _loaded(t0(vocab_size=40), folder)


def test_b38_another_vocabulary_in_the_checkpoint_names_both_sizes(pool: GlooPool, tmp_path: Path) -> None:
    _source(t0(vocab_size=36), tmp_path)
    outcomes = pool.run_outcomes(_mismatch_on_rank, str(tmp_path))
    assert {type(one.error) for one in outcomes} == {WeightsError}
    (text,) = {str(one.error) for one in outcomes}
    assert "36" in text
    assert "40" in text
    assert "resize the embeddings before parallelize" in text


Q = "self_attn.q_proj.weight"


@pytest.mark.parametrize(("shard", "tp"), [(1, 2), (2, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("permuted", [False, True], ids=["", "permuted"])
def test_b84_q_proj_is_the_same_at_every_mesh_shape_and_no_shard_is_permuted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: int, tp: int, permuted: bool
) -> None:
    """A permutation at load, done on shards, scrambles the rows: files that need one go through a whole model."""
    config = t0(num_key_value_heads=4)
    source: Any = _source(config, tmp_path)
    if permuted:
        conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes the table
        table: Any = conversion_mapping._checkpoint_conversion_mapping_cache
        monkeypatch.setitem(
            table, "llama", [WeightConverter([Q], [Q], [PermuteForRope(permute_layer_names=["q_proj"])])]
        )
        source, file = LlamaForCausalLM.from_pretrained(tmp_path), source
        assert gap(source.model.layers[0].self_attn.q_proj.weight, file.model.layers[0].self_attn.q_proj.weight) > 0.01

    def on_rank(rank: int) -> tuple[float, float]:
        model = dtplan.parallelize(model_of(config, meta=True), _mesh(shard, tp))
        if permuted:
            with pytest.raises(WeightsError, match=f"changes the values of {Q} .* under the same name"):
                dtplan.load(model, tmp_path)
        dtplan.load(model, source.state_dict() if permuted else tmp_path)
        if permuted:
            with pytest.raises(WeightsError, match=f"changes the values of {Q}"):
                dtplan.save(model, tmp_path / "saved")
        weights = [one.model.layers[0].self_attn.q_proj.weight for one in (model, source)]
        return gap(*weights), gap(model(ids_of(config)).logits, source(ids_of(config)).logits)

    for rows, logits in simulated_ranks(shard * tp, on_rank):
        assert rows == 0
        assert logits < 1e-5
