"""Training checkpoints that do not fit, are broken, or whose save fails: told with names, on all ranks, in time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dtplan
from dtplan import WeightsError
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.training import storage
from dtplan.training.spread import Place, spread
from dtplan.weights import staging
from dtplan.weights.writer import ShardWriter
from tests.models import build, llama, neox
from tests.resuming import Run, equal, momentum, trained_and_saved

# ------------------------------------------------------------------------------------------------------- refusals


def _resume_error(rank: int, config: Any, folder: str, options: dict[str, Any]) -> str:
    run = Run(config, (1, 1, 1))
    try:
        run.checkpoints(folder).resume(**options)
    except WeightsError as error:
        return str(error)
    return "resumed"


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
        mock.patch.object(staging, "_exchange", return_value=False).start()  # as on a file system that cannot
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
