"""Training checkpoints: whole at any degrees, free of pickle, and never half there."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

import dtplan
from dtplan import WeightsError
from dtplan.prove.simulated import simulated_ranks
from dtplan.te import engine
from dtplan.training.plain import decode, encode
from dtplan.weights.checkpoint import read_header
from tests.models import build, llama, neox
from tests.resuming import PHI3, PHI3_PLAN, Run, Shape, adamw, equal, momentum, resumed, trained_and_saved
from tests.te_standin import ENGINE

FAMILIES: dict[str, tuple[Any, str, Any]] = {
    "llama-uneven-vocab": (llama(vocab_size=33), "auto", adamw),
    "neox-tied": (neox(tie_word_embeddings=True), "auto", momentum),
    "phi3-fused": (PHI3, PHI3_PLAN, adamw),
}


def ranks(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 2, 2), [(1, 1, 1), (2, 1, 2), (1, 3, 1)]), ((1, 1, 1), [(1, 2, 2), (1, 1, 4)])],
    ids=["from-2x2", "from-1"],
)
def test_parameters_and_optimizer_are_bit_equal_at_any_degrees(
    family: str, before: Shape, after: list[Shape], tmp_path: Path
) -> None:
    config, plan, make = FAMILIES[family]
    after = [shape for shape in after if family != "phi3-fused" or shape[2] <= 2]  # of its 2 kv heads
    model = build(config)
    truth, *_ = simulated_ranks(ranks(before), trained_and_saved, model, before, str(tmp_path), plan, make)
    assert any(name.endswith(("exp_avg", "momentum_buffer")) for name in truth)
    for shape in after:
        for found, rates in simulated_ranks(ranks(shape), resumed, config, shape, str(tmp_path), plan, make):
            assert equal(found, truth)
            assert set(rates) == {(1e-2 if make is adamw else 0.1) * (1 / 3)}  # the schedule's, after two steps


def test_kv_heads_that_ranks_share_are_saved_once_and_resumed_at_any_degrees(tmp_path: Path) -> None:
    plan = dtplan.parse_plan(
        "dtplan: 1\nextends: llama\nunits: {kv_head: {field: num_key_value_heads, indivisible: replicate_kv}}\n"
    )
    config, shared = llama(num_key_value_heads=2, num_hidden_layers=1), (1, 2, 4)
    truth, *_ = simulated_ranks(8, trained_and_saved, build(config), shared, str(tmp_path), plan)
    for shape in ((1, 1, 1), (1, 1, 2), (1, 1, 4)):
        for found, _ in simulated_ranks(ranks(shape), resumed, config, shape, str(tmp_path), plan):
            assert equal(found, truth)


@pytest.mark.parametrize("fused", ["saved", "resumed"])
def test_fused_layers_and_plain_ones_resume_each_other(
    fused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = neox()
    with monkeypatch.context() as patch:
        if fused == "saved":
            patch.setattr(engine, "find", lambda: ENGINE)
        truth, *_ = simulated_ranks(2, trained_and_saved, build(config), (1, 1, 2), str(tmp_path))
    with monkeypatch.context() as patch:
        if fused == "resumed":
            patch.setattr(engine, "find", lambda: ENGINE)
        found = simulated_ranks(2, resumed, config, (1, 2, 1), str(tmp_path))
    moments = {name: tensor for name, tensor in truth.items() if not name.endswith(" step")}
    assert any("query_key_value.weight exp_avg" in name for name in moments)
    for held, _ in found:
        assert equal({name: tensor for name, tensor in held.items() if not name.endswith(" step")}, moments)


def _wide_moments(rank: int, model: nn.Module, folder: str) -> set[tuple[torch.dtype, float]]:
    run = Run(model, (1, 2, 1), make=momentum)
    for parameter in run.model.parameters():
        run.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    run.checkpoints(folder).save(1)
    again = Run(model, (1, 2, 1), make=momentum)
    assert again.checkpoints(folder).resume() is not None
    states = [state["momentum_buffer"].to_local() for state in again.optimizer.state.values()]
    return {(state.dtype, value) for state in states for value in state.unique().tolist()}


def test_moments_that_are_wider_than_their_parameters_stay_so(tmp_path: Path) -> None:
    (found, _) = simulated_ranks(2, _wide_moments, build(llama(), dtype=torch.bfloat16), str(tmp_path))
    assert found == {(torch.float32, torch.tensor(1 / 3).item())}


# ------------------------------------------------------------------------------------------- what is in the files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of one checkpoint of the fused model at tp 2 x shard 2, and what it must hold."""
    folder = tmp_path_factory.mktemp("saved")
    truth, *_ = simulated_ranks(4, trained_and_saved, build(PHI3), (1, 2, 2), str(folder), PHI3_PLAN)
    return folder, truth


def test_names_and_layouts_are_those_of_hugging_face_checkpoints(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    index = json.loads((saved[0] / "step-00000002" / "tensors.json").read_text())
    names = {f"model.{name}": list(tensor.shape) for name, tensor in build(PHI3).state_dict().items()}
    assert {name: said["shape"] for name, said in index.items() if name.startswith("model.")} == names
    moments = {name for name in index if name not in names}
    assert moments == {f"optim.state.{name[6:]}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq")}
    fused = index["model.model.layers.0.self_attn.qkv_proj.weight"]["blocks"]
    assert len({file[:11] for *_, file in fused}) == 4, "every rank writes its part"
    assert len(fused) == 6  # q, k and v of each tp rank; a shard's rows begin and end inside them
    assert all(sizes[0] <= 16 for _, sizes, _ in fused)


def test_torch_reads_the_files_by_itself(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, truth = saved
    wanted = {f"model.{name[:-1]}": tensor for name, tensor in truth.items() if name.endswith(" ")}
    wanted |= {f"optim.state.{n}.exp_avg": truth[f"{n} exp_avg"] for n in [name[6:] for name in wanted]}
    found: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    reader = HuggingFaceStorageReader(str(folder / "step-00000002"))
    with pytest.warns(UserWarning, match="single process"):
        load_with_torch(found, storage_reader=reader)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_no_file_is_a_pickle_and_a_planted_one_is_not_read(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    shutil.copytree(saved[0], tmp_path / "copy")
    folder = tmp_path / "copy" / "step-00000002"
    for file in folder.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            read_header(file)
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "went-off")))
    ((found, _),) = simulated_ranks(1, resumed, PHI3, (1, 1, 1), str(tmp_path / "copy"), PHI3_PLAN)
    assert equal(found, saved[1])
    assert not (tmp_path / "went-off").exists()
    with pytest.warns(UserWarning, match="single process"), pytest.raises(CheckpointException):
        load_with_torch({}, checkpoint_id=folder)
    assert (tmp_path / "went-off").exists(), "torch's own reader would have run it"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_torchs_default_format_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    with pytest.warns(UserWarning, match="single process"):
        save_with_torch({"a": torch.ones(2)}, checkpoint_id=folder)
    with pytest.raises(WeightsError, match="which holds pickles"):
        dtplan.training.manifest.Manifest.read(folder, sizes=False)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(torch.arange(6).view(2, 3)),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("__tuple__"), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_small_state_comes_back_as_it_was(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value, "value"))))
    assert type(found) is type(value)
    assert repr(found) == repr(value)  # nan is nan, 1 is not 1.0, and no list is a tuple


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_small_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.rand(shape, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    found = decode(json.loads(json.dumps(encode(value, "value"))))
    assert (found.dtype, found.shape) == (dtype, shape)
    assert torch.equal(found, value)


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.zeros(3 * 2**20, dtype=torch.float64)])
def test_what_would_need_pickle_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(WeightsError, match=re.escape("extra.a[1].b")):
        encode({"a": [1, {"b": value}]}, "extra")


# ------------------------------------------------------------------------------------- which checkpoints there are


def _several(rank: int, model: nn.Module, folder: str) -> Any:
    run = Run(model, (1, 2, 1))
    checkpoints = run.checkpoints(folder, keep=2)
    assert checkpoints.resume() is None
    seen = []
    for step in (1, 2, 3):
        run.train(step - 1, step)
        checkpoints.save(step, extra={"position": step * 10})
        seen.append(checkpoints.steps())
    early = checkpoints.resume(2)
    assert early is not None
    seen.append([early.step, early.extra["position"], run.scheduler.last_epoch])
    checkpoints.save(2)  # again, in the place of the first
    seen.append(checkpoints.steps())
    latest = checkpoints.resume()
    assert latest is not None
    seen.append([latest.step, latest.extra])
    return seen, latest.differences


def test_the_last_are_kept_and_the_latest_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".step-00000009.tmp-dead").mkdir()
    for seen, differences in simulated_ranks(2, _several, build(llama()), str(tmp_path)):
        assert seen == [[1], [1, 2], [2, 3], [2, 20, 2], [3, 2], [2, None]]
        assert differences == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000002", "step-00000003"]


def _saved_in_turn(rank: int, model: nn.Module, shape: Shape, folder: str) -> None:
    Run(model, shape).checkpoints(folder).save(2)


def test_a_step_saved_again_on_fewer_ranks_leaves_no_old_file(tmp_path: Path) -> None:
    model = build(llama())
    simulated_ranks(2, _saved_in_turn, model, (1, 2, 1), str(tmp_path))
    simulated_ranks(1, _saved_in_turn, model, (1, 1, 1), str(tmp_path))
    shards = [file.name for file in (tmp_path / "step-00000002").glob("*.safetensors")]
    assert shards == ["shard-00000-0.safetensors"]
