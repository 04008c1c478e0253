"""What can go wrong with a checkpoint, made to happen: killed ranks, full disks, broken files, two jobs at once."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dtplan
from dtplan import WeightsError
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights import gather, load, materialise
from dtplan.weights.checkpoint import BlockReader, open_checkpoint
from dtplan.weights.load import load_checkpoint
from dtplan.weights.save import save_checkpoint
from dtplan.weights.writer import ShardWriter
from tests.cases import model_of, t0
from tests.checkpoints import beside, contents, refusal, stored

SHARD_BYTES = 9000  # several files of T0


def mesh(tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))


def model_with(seed: int) -> Any:
    """T0 with tensors of other values for each seed."""
    return model_of(t0(), seed=seed)


def saved(folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint in several files, and its tensors."""
    save_checkpoint(model_with(seed), folder, max_shard_bytes=SHARD_BYTES)
    return stored(folder)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in found.items()
    )


def loaded(folder: Path) -> dict[str, Tensor]:
    """What dtplan loads from a folder."""
    model = model_of(t0(), meta=True)
    load_checkpoint(model, folder)
    return {name: param.detach() for name, param in model.named_parameters()}


def together(fn: Any, ranks: int = 2) -> str:
    """The one text that all simulated ranks are refused with."""
    (text,) = set(simulated_ranks(ranks, lambda rank: refusal(fn, rank)))
    return text


# ----------------------------------------------------------------------------------------------- kill -9 of a rank


def save_and_be_killed(rank: int, folder: Path, victim: int, moment: float) -> None:
    """Saves once to see how long it takes, and again to be killed from outside at that part of it."""
    gather.PIECE_BYTES = 700
    model = dtplan.parallelize(model_with(2), mesh(2))
    dist.barrier()
    start = time.perf_counter()
    dtplan.save(model, folder.with_name("trial"), max_shard_bytes=SHARD_BYTES)
    delay = moment * (time.perf_counter() - start)
    dist.barrier()
    if rank == victim:
        subprocess.Popen(["sh", "-c", f"sleep {delay:.4f}; kill -9 {os.getpid()}"])  # noqa: S607
    dtplan.save(model, folder, max_shard_bytes=SHARD_BYTES)
    if rank == victim:
        time.sleep(60)


MOMENTS = 20


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    victim: int, pool: GlooPool, tmp_path: Path
) -> None:
    """20 moments in all, at random within as many parts of the save; each rank is the victim of every other one."""
    draw = random.Random(victim)  # noqa: S311
    folder = tmp_path / "checkpoint"
    new = dict(model_with(2).named_parameters())
    old = saved(folder, 1)
    outcomes = []
    for part in range(victim, MOMENTS, 2):
        ended = pool.run_outcomes(save_and_be_killed, folder, victim, (part + draw.random()) / MOMENTS, ranks=2)
        assert "SIGKILL" in str(ended[victim].error)
        outcomes.append("new" if same(loaded(folder), new) else "old" if same(loaded(folder), old) else "neither")
        assert same(stored(folder), new if outcomes[-1] == "new" else old)  # no file of the other one beside them
        saved(folder, 1)
        shutil.rmtree(folder.with_name("trial"))
        assert beside(folder) == ["checkpoint"], "the next save removes what is left"
    assert set(outcomes) <= {"old", "new"}
    assert "old" in outcomes, "no moment was within the save"


# ------------------------------------------------------------------------------------------------------ full disks


@contextmanager
def small_disk(at: Path) -> Iterator[bool]:
    """A file system of 400 KiB at ``at``; False where this process may not mount one."""
    at.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(at)],  # noqa: S607
        check=False,
        stderr=subprocess.DEVNULL,
    ).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(at)], check=True)  # noqa: S607


@contextmanager
def room_for(pages: int, disk: Path) -> Iterator[None]:
    """Only so many pages of the disk are free."""
    filler, free = disk / "filler", os.statvfs(disk)
    filler.write_bytes(bytes((free.f_bavail - pages) * free.f_bsize))
    assert os.statvfs(disk).f_bavail == pages
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def full_from_file(number: int) -> Iterator[None]:
    """The files of a save from ``number`` on are the device that is always full."""
    start, opened = ShardWriter.__init__, 0

    def opening(self: ShardWriter, file: Path) -> None:
        nonlocal opened
        opened += 1
        start(self, file)
        if opened > number:
            self._stream.close()
            self._stream = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115

    with mock.patch.object(ShardWriter, "__init__", opening):
        yield


def outcome_on_a_full_disk(folder: Path) -> str:
    before = contents(folder)
    try:
        saved(folder, 2)
    except WeightsError as error:
        assert "No space left on device" in str(error)  # noqa: PT017 - a save may also succeed
        assert contents(folder) == before
        assert [name for name in beside(folder) if "checkpoint" in name] == ["checkpoint"]
        assert same(loaded(folder), dict(model_with(1).named_parameters()))
        return "full"
    assert same(loaded(folder), dict(model_with(2).named_parameters()))
    return "saved"


def test_a_disk_that_is_full_at_any_point_of_a_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as mounted:
        folder = tmp_path / "disk" / "checkpoint"
        outcomes = []
        for room in range(0, 48, 2) if mounted else range(8):
            saved(folder, 1)
            with room_for(room, folder.parent) if mounted else full_from_file(room):
                outcomes.append(outcome_on_a_full_disk(folder))
    assert outcomes == sorted(outcomes), "with less room it went, and with more it did not"
    assert {"full", "saved"} == set(outcomes)
    assert outcomes.count("full") > 4


def test_a_full_disk_of_one_rank_fails_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    old = saved(folder, 1)
    with full_from_file(1):  # two ranks write a file each at a time: the second one's is full
        text = together(lambda _: save_checkpoint(model_with(2), folder, max_shard_bytes=SHARD_BYTES))
    assert "No space left on device" in text
    assert " of 2]" in text
    assert same(loaded(folder), old)
    assert beside(folder) == ["checkpoint"]


# ------------------------------------------------------------------------------------------------- no right to write


@contextmanager
def as_nobody() -> Iterator[None]:
    """As a user who owns nothing; root may do all, and so must not be the one who is refused."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder whom others, and its owner, may read and not write, with a checkpoint in it."""
    with tempfile.TemporaryDirectory() as name:
        saved(Path(name) / "checkpoint")
        for path in (Path(name), Path(name) / "checkpoint"):
            path.chmod(0o555)
        yield Path(name)
        for path in (Path(name), Path(name) / "checkpoint"):
            path.chmod(0o755)


def test_a_read_only_folder_loads_and_is_refused_for_saving(read_only: Path) -> None:
    old, new = contents(read_only), model_with(2)
    with as_nobody():
        assert same(loaded(read_only / "checkpoint"), dict(model_with(0).named_parameters()))
        for folder in ("checkpoint", "another"):
            text = together(lambda _, to=folder: save_checkpoint(copy.deepcopy(new), read_only / to))
            assert text.startswith(
                f"{read_only / folder}: cannot be written (Permission denied); check the permissions"
            )
    assert contents(read_only) == old


def test_a_folder_that_may_not_even_be_looked_at(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    saved(closed / "checkpoint")
    closed.chmod(0)
    try:
        with as_nobody():
            words = {save_checkpoint: "written", load_checkpoint: "read"}
            for call, what in words.items():
                text = together(lambda _, call=call: call(model_with(2), closed / "checkpoint"))
                assert text.startswith(f"{closed / 'checkpoint'}: cannot be {what} (Permission denied); check")
    finally:
        closed.chmod(0o755)


# ---------------------------------------------------------------------------------------------------- two jobs at once


def test_a_save_to_a_folder_that_is_being_saved_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    saved(folder, 1)
    begun, go_on = threading.Event(), threading.Event()
    write_header = ShardWriter.write_header

    def waiting(self: ShardWriter, tensors: Any) -> None:
        begun.set()
        go_on.wait(30)
        write_header(self, tensors)

    with mock.patch.object(ShardWriter, "write_header", waiting):
        first = threading.Thread(target=saved, args=(folder, 2))
        first.start()
        try:
            assert begun.wait(30)
            text = refusal(saved, folder, 3)
        finally:
            go_on.set()
            first.join()
        assert "another save to this folder is under way" in text
        assert f"process {os.getpid()} on " in text
    assert same(loaded(folder), dict(model_with(2).named_parameters()))
    saved(folder, 3)  # the lock is free again, also after the refusal
    assert beside(folder) == ["checkpoint"]


def save_until_it_went(rank: int, folder: Path, times: int) -> int:
    """A job of its own, whose saves take long enough to meet another's; returns how many were refused."""
    write = ShardWriter.write

    def slowly(self: ShardWriter, data: memoryview) -> None:
        time.sleep(0.01)
        write(self, data)

    mock.patch.object(ShardWriter, "write", slowly).start()
    model, refused = model_with(rank), 0
    dist.barrier()
    dist.destroy_process_group()
    for _ in range(times):
        while True:
            try:
                save_checkpoint(model, folder, max_shard_bytes=SHARD_BYTES)
                break
            except WeightsError as error:
                assert "another save to this folder is under way" in str(error)  # noqa: PT017 - either is right
                refused += 1
                time.sleep(0.01)
    return refused


def test_jobs_that_race_for_a_folder_leave_a_checkpoint_of_one_of_them(pool: GlooPool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    refused = pool.run(save_until_it_went, folder, 2, ranks=3)
    assert sum(refused) > 0, "the jobs did not meet"
    assert any(same(loaded(folder), dict(model_with(job).named_parameters())) for job in range(3))
    assert same(stored(folder), loaded(folder))
    assert beside(folder) == ["checkpoint"]


# ------------------------------------------------------------------------------------------------------- broken files


def test_a_file_that_shrinks_while_it_is_read_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Headers and sizes were right when the load began."""
    saved(tmp_path / "checkpoint")
    last = max((tmp_path / "checkpoint").glob("*.safetensors"))
    fill = materialise.materialise
    cut = threading.Lock()

    def cutting(*args: Any) -> set[str]:
        with cut:
            os.truncate(last, 200)
        return fill(*args)

    def run(rank: int) -> None:
        model = dtplan.parallelize(model_of(t0(), meta=True), mesh(2))
        dtplan.load(model, tmp_path / "checkpoint")

    with mock.patch.object(load, "materialise", cutting):
        text = together(run)
    assert str(last) in text
    assert "download the file again" in text


def test_rows_and_columns_of_a_file_that_is_cut_off_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(4096.0).view(64, 64)}, file)
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(file, file.stat().st_size - 4)
    with BlockReader(checkpoint) as reader:
        for columns in (slice(0, 64), slice(0, 32)):
            assert f"{file}: tensor weight: " in refusal(reader.read, "weight", (slice(0, 64), columns))
    file.unlink()
    with BlockReader(checkpoint) as reader:
        assert "No such file" in refusal(reader.read, "weight", (slice(0, 64), slice(0, 64)))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("pad", range(0, 9, 3))
def test_tensors_are_read_wherever_a_file_puts_them(dtype: torch.dtype, pad: int, tmp_path: Path) -> None:
    """Old files align nothing: a header may have any length."""
    weight = torch.arange(60.0).view(6, 10).to(dtype)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" " * pad
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    checkpoint = open_checkpoint(tmp_path)
    with BlockReader(checkpoint) as reader:
        for block in ((slice(0, 6), slice(0, 10)), (slice(2, 5), slice(0, 10)), (slice(1, 6), slice(3, 7))):
            assert torch.equal(reader.read("weight", block), weight[block])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_tensor_of_another_dtype_is_converted_or_refused_by_name(dtype: torch.dtype, tp: int, tmp_path: Path) -> None:
    tensors = saved(tmp_path / "checkpoint")
    name = "model.layers.0.self_attn.o_proj.weight"  # cut along its columns
    (tmp_path / "other").mkdir()
    other = tensors[name].to(dtype)
    save_file({**tensors, name: other}, tmp_path / "other" / "model.safetensors")
    converts = dtype in {torch.float64, torch.float16}

    def run(rank: int) -> str | bool:
        model = dtplan.parallelize(model_of(t0(), meta=True), mesh(tp))
        try:
            dtplan.load(model, tmp_path / "other")
        except WeightsError as error:
            return str(error)
        return torch.equal(model.get_parameter(name).full_tensor(), other.float())

    (found,) = set(simulated_ranks(tp, run))
    assert found is True if converts else f"{name} is stored as " in str(found)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (32, 33), (1024,), (32, 32, 1), ()])
def test_a_tensor_of_another_shape_is_refused_by_name(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = saved(tmp_path / "checkpoint")
    name = "model.layers.0.self_attn.o_proj.weight"
    (tmp_path / "other").mkdir()
    save_file({**tensors, name: torch.zeros(shape)}, tmp_path / "other" / "model.safetensors")

    def run(rank: int) -> None:
        dtplan.load(dtplan.parallelize(model_of(t0(), meta=True), mesh(2)), tmp_path / "other")

    assert f"{name} has shape {shape}, the model's has (32, 32)" in together(run)


# ------------------------------------------------------------------------------------------------ links and odd files


def test_a_download_cache_of_links_loads(tmp_path: Path) -> None:
    """As the Hub's cache lays a snapshot out: links to files that lie outside the folder, which its user made."""
    old = saved(tmp_path / "checkpoint")
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted((tmp_path / "checkpoint").iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    assert same(loaded(tmp_path / "checkpoint"), old)
    saved(tmp_path / "checkpoint", 2)
    saved(tmp_path / "again")
    blobs = {file.read_bytes() for file in (tmp_path / "blobs").iterdir()}
    assert set(contents(tmp_path / "again").values()) <= blobs, "a save replaces links, and not what they point at"


@pytest.mark.parametrize("name", ["/model.safetensors", "../x.safetensors", "a/../../x.safetensors", "", "..", "/"])
def test_an_index_does_not_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint")
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    index = tmp_path / "checkpoint" / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["x"] = name
    index.write_text(json.dumps(found))
    text = together(lambda _: load_checkpoint(model_of(t0(), meta=True), tmp_path / "checkpoint"))
    assert f"file {name!r} is not inside the folder" in text


@pytest.mark.parametrize("kind", ["dangling", "loop", "pipe", "folder"])
def test_a_shard_that_is_no_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint")
    shard = sorted((tmp_path / "checkpoint").glob("*.safetensors"))[1]
    shard.unlink()
    if kind == "pipe":
        os.mkfifo(shard)
    elif kind == "folder":
        shard.mkdir()
    else:
        shard.symlink_to(shard if kind == "loop" else "gone")
    assert f"names {shard.name}, which is not in the folder" in refusal(loaded, tmp_path / "checkpoint")


# --------------------------------------------------------------------------------------- one rank fails, others wait


def fail_alone(rank: int, folder: Path, how: str) -> float:
    """Rank 1 fails in its own way; returns after how many seconds the others had an error."""
    model = dtplan.parallelize(model_of(t0(), meta=how == "load"), mesh(2))
    dist.barrier()
    start = time.perf_counter()
    if rank == 1 and how == "absent":
        time.sleep(4)
        return 0.0
    if rank == 1:

        def die(*_: Any) -> None:
            os._exit(3)

        patched = (BlockReader, "fill") if how == "load" else (ShardWriter, "write")
        mock.patch.object(*patched, new=die).start()
    if how == "load":
        step: Callable[[], object] = partial(dtplan.load, model, folder)
    else:
        step = partial(save_checkpoint, model, folder, max_shard_bytes=SHARD_BYTES, meet_seconds=1)
    with pytest.raises((WeightsError, RuntimeError)):
        step()
    return time.perf_counter() - start


@pytest.mark.parametrize("how", ["load", "save", "absent"])
def test_no_rank_waits_for_one_that_ended_or_did_not_come(how: str, pool: GlooPool, tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint")
    outcomes = pool.run_outcomes(fail_alone, tmp_path / "checkpoint", how, ranks=2, timeout_s=30)
    assert outcomes[0].error is None
    assert outcomes[0].value < 10
    assert (outcomes[1].error is None) == (how == "absent")
    saved(tmp_path / "checkpoint", 2)
    assert beside(tmp_path / "checkpoint") == ["checkpoint"]
