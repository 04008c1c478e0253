"""A save replaces a folder in one step or leaves it as it was, and all ranks fail alike."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtplan.prove.simulated import simulated_ranks
from dtplan.weights import gather, staging
from dtplan.weights.load import load_checkpoint
from dtplan.weights.save import save_checkpoint
from dtplan.weights.shards import pack
from dtplan.weights.writer import FileTensor, ShardWriter
from tests.checkpoints import (
    Row,
    assert_same_bits,
    beside,
    contents,
    expected,
    llama,
    on_meta,
    on_ranks,
    other_llama,
    ready,
    refusal,
    shard,
    stored,
)


def test_a_save_replaces_the_weights_and_keeps_a_users_files(tmp_path):
    folder = tmp_path / "checkpoint"
    save_checkpoint(llama(), folder, max_shard_bytes=9000)
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "notes.md").write_text("mine")
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "runs" / "one" / "model.safetensors").write_text("not ours")
    (folder / "runs" / "nowhere").symlink_to("gone")
    save_checkpoint(other_llama(), folder)
    names = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.md",
        "runs/one/model.safetensors",
    }
    assert contents(folder).keys() == names
    assert (folder / "runs" / "nowhere").is_symlink()
    assert (folder / "notes.md").read_text() == "mine"
    assert_same_bits(stored(folder), expected(other_llama()))
    assert beside(folder) == ["checkpoint"]


def test_a_save_through_a_link_replaces_the_folder_and_not_the_link(tmp_path):
    (tmp_path / "disk").mkdir()
    save_checkpoint(llama(), tmp_path / "disk" / "real")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    save_checkpoint(other_llama(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same_bits(stored(tmp_path / "disk" / "real"), expected(other_llama()))


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_a_tokenizer_is_saved_with_the_model_and_kept_by_a_later_save(tmp_path):
    save_checkpoint(llama(), tmp_path / "checkpoint", tokenizer=Tokenizer())
    save_checkpoint(llama(), tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("file", "is a file; give a folder"),
        ("file/below", "cannot be written"),
        ("/proc/dtplan/x", "cannot be written"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_on_all_ranks(at, words, tmp_path):
    (tmp_path / "file").write_text("")
    model = Row()
    texts = simulated_ranks(2, lambda _: refusal(save_checkpoint, model, tmp_path / at))
    assert len(set(texts)) == 1
    assert words in texts[0]


def test_a_rank_that_cannot_write_fails_all_and_leaves_the_old_folder(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    before = ready(llama(), folder)
    write_piece = ShardWriter.write
    failures = []

    def fail(self: ShardWriter, data: memoryview) -> None:
        if dist.get_rank() == 1 and len(data) > 1000:  # not the header
            failures.append(len(data))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_piece(self, data)

    monkeypatch.setattr(ShardWriter, "write", fail)
    empty = on_meta(llama())

    def run(mesh: DeviceMesh) -> str:
        model = shard(copy.deepcopy(empty), mesh)
        load_checkpoint(model, folder)
        return refusal(save_checkpoint, model, folder, max_shard_bytes=9000)

    texts = on_ranks({"shard": 2, "tp": 2}, run)
    assert len(set(texts)) == 1
    assert "No space left on device" in texts[0]
    assert texts[0].endswith("[on rank 1 of 4]")
    assert len(failures) == 1, "a file is given up at its first failure"
    assert contents(folder) == before
    assert beside(folder) == ["checkpoint"]


def test_a_rank_that_cannot_send_fails_all(tmp_path, monkeypatch):
    fill = gather.Exchange.fill

    def fail(self: gather.Exchange, step: gather.Step) -> None:
        if dist.get_rank() == 2:
            raise MemoryError
        fill(self, step)

    monkeypatch.setattr(gather.Exchange, "fill", fail)
    reference = llama()

    def run(mesh: DeviceMesh) -> str:
        return refusal(save_checkpoint, shard(copy.deepcopy(reference), mesh), tmp_path / "checkpoint")

    assert set(on_ranks({"tp": 4}, run)) == {"MemoryError [on rank 2 of 4]"}
    assert beside(tmp_path / "checkpoint") == []


def test_files_are_filled_in_order_and_none_is_empty():
    sizes = [100, 6, 10, 1, 100]
    tensors = [FileTensor(name=str(k), dtype=torch.uint8, shape=(size,)) for k, size in enumerate(sizes)]
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert pack(tensors, 16) == dict(zip(names, [[0], [1, 2], [3], [4]], strict=True))
    assert pack(tensors, 217) == {"model.safetensors": [0, 1, 2, 3, 4]}


def test_a_block_is_sent_once_from_the_nearest_rank():
    tensor = FileTensor(name="weight", dtype=torch.float32, shape=(4, 2))
    upper, lower = ((0, 2), (0, 2)), ((2, 4), (0, 2))
    (whole,) = gather.whole_tensors([tensor], [[[upper]], [[lower]], [[upper]], [[lower]]])
    (piece,) = gather.pieces(0, tensor)
    steps = [gather.plan_step([whole], dict.fromkeys(range(4), piece), rank) for rank in range(4)]
    sent = {(rank, segment.peer, segment.box) for rank in range(4) for segment in steps[rank].sends}
    own = {(0, 0, upper), (2, 2, upper), (1, 1, lower), (3, 3, lower)}
    assert sent == own | {(0, 1, upper), (2, 3, upper), (1, 0, lower), (1, 2, lower)}


def test_only_ranks_that_see_the_folder_write(tmp_path, monkeypatch):
    see = Path.is_dir
    monkeypatch.setattr(
        Path, "is_dir", lambda path: see(path) and (".tmp-" not in path.name or dist.get_rank() % 2 == 0)
    )
    begin = ShardWriter.__init__
    wrote: dict[str, int] = {}

    def noted(self: ShardWriter, file: Path) -> None:
        wrote[file.name] = dist.get_rank()
        begin(self, file)

    monkeypatch.setattr(ShardWriter, "__init__", noted)
    model = llama()
    reports = simulated_ranks(
        4, lambda _: save_checkpoint(copy.deepcopy(model), tmp_path / "checkpoint", max_shard_bytes=9000)
    )
    assert len(reports[0].files) > 2
    assert wrote == {name: number % 2 * 2 for number, name in enumerate(reports[0].files)}
    assert_same_bits(stored(tmp_path / "checkpoint"), expected(model))


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_folder_that_cannot_be_renamed_is_refused(inside, tmp_path, monkeypatch):
    (tmp_path / "here" / inside).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / inside)
    assert "holds the working directory" in refusal(save_checkpoint, Row(), tmp_path / "here")
    assert "is a mount point" in refusal(save_checkpoint, Row(), "/proc")
    save_checkpoint(Row(), "checkpoint")


def test_a_failed_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    before = ready(llama(), folder)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(self, target)

    monkeypatch.setattr(staging, "_exchange", lambda *_: False)  # as on NFS
    monkeypatch.setattr(Path, "rename", fail)
    assert "Device or resource busy" in refusal(save_checkpoint, other_llama(), folder)
    assert contents(folder) == before
    assert beside(folder) == ["checkpoint"]


def test_meta_tensors_and_foreign_dtypes_are_refused(tmp_path):
    assert "model.embed_tokens.weight is on the meta device" in refusal(
        save_checkpoint, on_meta(llama()), tmp_path / "x"
    )
    text = refusal(save_checkpoint, llama(), tmp_path / "x", dtype=torch.complex128)
    assert "safetensors has no torch.complex128; pass a dtype out of torch.float64, " in text
    assert beside(tmp_path / "x") == []


def test_ranks_with_other_calls_or_models_are_refused(tmp_path):
    def calls(rank: int) -> str:
        return refusal(save_checkpoint, Row(), tmp_path / ("a" if rank < 2 else "b"))

    def models(rank: int) -> str:
        return refusal(save_checkpoint, Row() if rank else nn.Linear(3, 3), tmp_path / "a")

    assert {text.partition("differ")[0] for text in simulated_ranks(3, calls)} == {
        "save_checkpoint: on ranks [2] the folder, dtype or max_shard_bytes "
    }
    assert all("on ranks [1, 2]" in text for text in simulated_ranks(3, models))


def test_ranks_that_hold_too_little_are_refused():
    weight = FileTensor(name="weight", dtype=torch.float32, shape=(4, 4))
    upper, lower = ((0, 2), (0, 4)), ((2, 4), (0, 4))
    assert gather.whole_tensors([weight], [[[upper]], [[lower]], [[upper]]])[0].holders == {
        upper: (0, 2),
        lower: (1,),
    }
    assert "weight: the ranks hold 8 different" in refusal(gather.whole_tensors, [weight], [[[upper]], [[upper]]])
