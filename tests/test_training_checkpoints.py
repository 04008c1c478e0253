"""Training checkpoints: whole at any degrees, free of pickle, and never half there."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch
from transformers import Phi3Config

import dtplan
from dtplan import WeightsError
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.te import engine
from dtplan.training import storage
from dtplan.training.plain import decode, encode
from dtplan.training.spread import Place, spread
from dtplan.weights.checkpoint import read_header
from dtplan.weights.writer import ShardWriter
from tests.models import build, llama, neox
from tests.resuming import Run, Shape, adamw, equal, momentum, resumed, trained_and_saved
from tests.te_standin import ENGINE

PHI3 = Phi3Config(  # type: ignore[call-arg]
    vocab_size=33,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    attn_implementation="eager",
    use_cache=False,
)
PHI3_PLAN = str(Path(__file__).parent / "plans" / "phi3.yaml")
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


def _resume_error(rank: int, config: Any, folder: str, options: dict[str, Any]) -> str:
    run = Run(config, (1, 1, 1))
    try:
        run.checkpoints(folder).resume(**options)
    except WeightsError as error:
        return str(error)
    return "resumed"


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


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def of_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    simulated_ranks(1, trained_and_saved, build(llama()), (1, 1, 1), str(folder))
    return folder


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (neox(), ["is of a LlamaForCausalLM, and this model is a GPTNeoXForCausalLM"]),
        (llama(num_hidden_layers=3), ["9 of the model are not in the checkpoint: model.layers.2.self_attn.q_proj"]),
        (llama(num_hidden_layers=1), ["9 of the checkpoint are not in the model: model.model.layers.1."]),
        (llama(vocab_size=36), ["lm_head.weight is torch.float64 [32, 32], the model's is torch.float64 [36, 32]"]),
    ],
    ids=["architecture", "more-layers", "fewer-layers", "vocabulary"],
)
def test_a_checkpoint_of_another_model_is_refused_with_names(of_llama: Path, config: Any, says: list[str]) -> None:
    (text,) = simulated_ranks(1, _resume_error, config, str(of_llama), {})
    for part in says:
        assert part in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step": 7}, "has no checkpoint of step 7; it has 2"),
        ({"leave_out": ["optimiser"]}, "has no 'optimiser' to leave out or reshard; did you mean 'optimizer'?"),
        ({"leave_out": ["optimizer", "scheduler", "rng"]}, "resumed"),
    ],
    ids=["step", "word", "leave-out"],
)
def test_what_resume_is_asked_for_must_be_there(of_llama: Path, options: dict[str, Any], says: str) -> None:
    (text,) = simulated_ranks(1, _resume_error, llama(), str(of_llama), options)
    assert says in text


def _break(folder: Path, how: str) -> None:
    shard = folder / "shard-00000-0.safetensors"
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif how == "missing":
        shard.unlink()
    elif how == "index":
        index = json.loads((folder / "tensors.json").read_text())
        index["model.lm_head.weight"]["blocks"] = []
        _rewritten(folder, "tensors.json", json.dumps(index))
    elif how == "hole":
        index = json.loads((folder / "tensors.json").read_text())
        index["model.lm_head.weight"]["blocks"][0][0] = [16, 0]
        _rewritten(folder, "tensors.json", json.dumps(index))
    elif how == "outside":
        text = (folder / "tensors.json").read_text().replace("shard-00000-0", "../shard-00000-0")
        _rewritten(folder, "tensors.json", text)
    elif how == "state":
        _rewritten(folder, "state.json", "{")
    elif how == "manifest":
        (folder / "manifest.json").write_text("[]")


def _rewritten(folder: Path, name: str, text: str) -> None:
    """A file with another content, and a manifest that knows its length."""
    (folder / name).write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = len(text)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "not whole: shard-00000-0.safetensors ("),
        ("missing", "not whole: shard-00000-0.safetensors (0 of "),
        ("index", "tensors.json: is broken (the blocks do not make up the tensor)"),
        ("hole", "model.lm_head.weight: the checkpoint has 512 of 1024 elements of a block at [0, 0]; it is not whole"),
        ("outside", "is not inside the folder"),
        ("state", "state.json: broken JSON"),
        ("manifest", "manifest.json: is broken"),
    ],
)
def test_a_broken_checkpoint_is_told_with_its_file(of_llama: Path, tmp_path: Path, how: str, says: str) -> None:
    shutil.copytree(of_llama, tmp_path / "copy")
    _break(tmp_path / "copy" / "step-00000002", how)
    (text,) = simulated_ranks(1, _resume_error, llama(), str(tmp_path / "copy"), {})
    assert says in text


def _other_optimizers(rank: int, folder: str) -> list[str]:
    config = llama()

    def norms_alone(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1])

    def one_group(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    texts = []
    for make in (momentum, norms_alone, one_group):
        run = Run(config, (1, 1, 1), make=make)
        try:
            run.checkpoints(folder).resume()
        except WeightsError as error:
            texts.append(str(error))
    try:
        dtplan.TrainingCheckpoints(folder, Run(config, (1, 1, 1)).model).resume()
    except WeightsError as error:
        texts.append(str(error))
    return texts


def test_another_optimizer_is_refused_with_names(of_llama: Path) -> None:
    ((kind, fewer, groups, none),) = simulated_ranks(1, _other_optimizers, str(of_llama))
    assert "the checkpoint's optimizer is AdamW, this one SGD" in kind
    assert "16 of the checkpoint are not in this optimizer: model.embed_tokens.weight" in fewer
    assert "param_groups[0] of the optimizer" in groups
    assert "resume(leave_out=['optimizer'])" in none


def _frozen_then_trained(rank: int, model: nn.Module, folder: str) -> str:
    def head_alone(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for n, p in model.named_parameters() if "lm_head" in n])

    def all_but_head(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for n, p in model.named_parameters() if "lm_head" in n or ".1." in n])

    run = Run(model, (1, 1, 2), make=head_alone)
    run.train(0, 1)
    run.checkpoints(folder).save(1)
    with pytest.raises(WeightsError) as caught:
        Run(model, (1, 1, 2), make=all_but_head).checkpoints(folder).resume()
    return str(caught.value)


def test_missing_optimizer_state_is_named(tmp_path: Path) -> None:
    (text,) = set(simulated_ranks(2, _frozen_then_trained, build(llama()), str(tmp_path)))
    assert "9 have no optimizer state in the checkpoint: model.layers.1.self_attn.q_proj.weight, " in text
    assert "resume(leave_out=['optimizer', 'scheduler'])" in text


def test_values_of_ranks_that_happen_to_be_equal_are_still_one_for_each() -> None:
    places = [Place(data=rank // 2, data_size=2, tp=rank % 2, tp_size=2) for rank in range(4)]
    assert spread("loader", [7] * 4, places, over_data=True)["axes"] == ["data"]
    assert spread("rng.torch", [7] * 4, places) == {"axes": [], "sizes": {"data": 2, "tp": 2}, "values": [7]}


def _different(rank: int, model: nn.Module, folder: str) -> list[str]:
    texts = []
    run = Run(model, (1, 1, 2))
    checkpoints = run.checkpoints(folder)
    saves: list[dict[str, Any]] = [
        {"extra": {"position": [1, rank]}},
        {"extra": {"loader": object()} if rank == 1 else {"loader": 1}},
        {"per_rank": {"loader": rank}},
        {"per_rank": {"loader": 1} if rank == 0 else {}},
    ]
    for options in saves:
        with pytest.raises(WeightsError) as caught:
            checkpoints.save(1, **options)
        texts.append(str(caught.value))
    with pytest.raises(WeightsError) as caught:
        checkpoints.save(True)
    assert checkpoints.steps() == []
    return [*texts, str(caught.value)]


def test_ranks_that_say_different_things_all_hear_of_it(tmp_path: Path) -> None:
    first, second = simulated_ranks(2, _different, build(llama()), str(tmp_path))
    assert first == second
    assert "extra.position differs between ranks 0 and 1: it must be the same on every rank" in first[0]
    assert "extra.loader: a builtins.object cannot be written without pickle" in first[1]
    assert "[on rank 1 of 2]" in first[1]
    assert "per_rank.loader differs between the ranks of a tp group" in first[2]
    assert "loader" in first[3]
    assert "step=True" in first[4]


# --------------------------------------------------------------------------------------------------------- faults


def _failing_write(rank: int, model: nn.Module, folder: str, asynchronous: bool) -> tuple[str, list[int], bool]:
    run = Run(model, (1, 1, 2))
    run.train(0, 1)
    checkpoints = run.checkpoints(folder)
    checkpoints.save(1)
    held = run.holds()
    run.train(1, 2)
    if rank == 1:
        storage.PIECE_BYTES = 0  # what torch's split refuses
    if asynchronous:
        checkpoints.save(2, asynchronous=True)
    with pytest.raises(WeightsError) as caught:
        checkpoints.wait() if asynchronous else checkpoints.save(2)
    run.train(2, 3)
    assert checkpoints.resume() is not None
    return str(caught.value), checkpoints.steps(), equal(run.holds(), held)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks(
    pool: GlooPool, tmp_path: Path, asynchronous: bool
) -> None:
    first, second = pool.run(_failing_write, build(llama()), str(tmp_path), asynchronous, ranks=2)
    assert first == second
    assert "[on rank 1]" in first[0]
    assert first[1:] == ([1], True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def _asynchronous(rank: int, model: nn.Module, folder: str) -> bool:
    run = Run(model, (1, 2, 1))
    run.train(0, 2)
    trained, write = threading.Event(), storage.SafetensorsWriter.write_data

    def late(*arguments: Any) -> Any:
        assert trained.wait(60)
        return write(*arguments)

    mock.patch.object(storage.SafetensorsWriter, "write_data", late).start()
    with run.checkpoints(folder) as checkpoints:
        checkpoints.save(2, asynchronous=True)
        held = run.holds()
        run.train(2, 4)  # in place
        trained.set()
    assert checkpoints.resume() is not None
    return equal(run.holds(), held)


def test_an_asynchronous_save_has_the_values_of_its_call(pool: GlooPool, tmp_path: Path) -> None:
    assert pool.run(_asynchronous, build(llama()), str(tmp_path), ranks=2) == [True, True]


def _killed(rank: int, model: nn.Module, folder: str, when: str) -> None:
    """A second save of step 1, in which a rank dies: before it writes, half-way through, or between two renames."""
    run = Run(model, (1, 1, 2))
    checkpoints = run.checkpoints(folder)
    checkpoints.save(1)
    run.train(0, 1)

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "writing" and rank == 1:
        mock.patch.object(ShardWriter, "finish", die).start()
    elif when == "committing" and rank == 0:
        mock.patch.object(ShardWriter, "finish", _finish_then_die_at_the_second_rename).start()
    elif when == "index" and rank == 0:
        mock.patch.object(storage.SafetensorsWriter, "finish", die).start()
    checkpoints.save(1 if when == "committing" else 2)


def _finish_then_die_at_the_second_rename(writer: Any) -> None:
    real, count = Path.rename, iter(range(9))

    def rename(path: Path, target: Any) -> Any:
        if next(count) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, target)

    mock.patch.object(Path, "rename", rename).start()


def _goes_on(rank: int, config: Any, folder: str) -> Any:
    run = Run(config, (1, 1, 1))
    found = run.checkpoints(folder).resume()
    if found is None:  # the folder was between two names: the next save puts it back
        run = Run(build(config), (1, 1, 1))
    else:
        held = run.holds()
    checkpoints = run.checkpoints(folder, keep=5)
    checkpoints.save(7)
    if found is None:
        assert checkpoints.resume(1) is not None
        held = run.holds()
    return checkpoints.steps(), held


@pytest.mark.parametrize("when", ["writing", "index", "committing"])
def test_a_kill_in_a_save_leaves_the_checkpoint_before(pool: GlooPool, tmp_path: Path, when: str) -> None:
    model = build(llama())
    outcomes = pool.run_outcomes(_killed, model, str(tmp_path), when, ranks=2)
    assert any("SIGKILL" in str(one.error) for one in outcomes)
    if when != "writing":  # there the other rank lives to clean up
        assert [path.name[:15] for path in tmp_path.iterdir() if path.name.startswith(".")], "the kill left something"
    ((steps, held),) = simulated_ranks(1, _goes_on, llama(), str(tmp_path))
    assert steps == [1, 7]
    assert equal(held, {f"{name} ": p.detach() for name, p in model.named_parameters()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000007"]
