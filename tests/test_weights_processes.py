"""Ranks that are processes: bits, ranks that do not meet, full disks, and death at any step of a save."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from dtplan.weights import gather, staging
from dtplan.weights.checkpoint import open_checkpoint
from dtplan.weights.load import load_checkpoint
from dtplan.weights.save import save_checkpoint
from dtplan.weights.writer import ShardWriter
from tests.checkpoints import (
    Row,
    assert_same_bits,
    beside,
    contents,
    expected,
    llama,
    mesh_of,
    other_llama,
    ready,
    refusal,
    shard,
    stored,
)


def ranks_load_and_save(rank: int, source: Path, target: Path) -> list[str]:
    gather.PIECE_BYTES = 700
    mesh = mesh_of({"shard": 2, "tp": 2})
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(source))
    load_checkpoint(shard(model, mesh), source)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return list(save_checkpoint(model, target, max_shard_bytes=9000).files)


def test_processes_load_and_save_bit_exactly(pool, tmp_path):
    source = tmp_path / "source"
    save_checkpoint(llama(), source)
    files = pool.run(ranks_load_and_save, source, tmp_path / "target")
    assert len(files[0]) > 4  # more files than ranks: two rounds
    assert_same_bits(stored(tmp_path / "target"), stored(source))


def one_rank_saves(rank: int, folder: Path) -> str | None:
    model = Row()
    text = refusal(save_checkpoint, model, folder, meet_seconds=0.5) if rank == 0 else None
    dist.barrier()
    save_checkpoint(model, folder)  # the ranks can still meet
    return text


def test_a_save_on_one_rank_only_is_found(pool, tmp_path):
    texts = pool.run(one_rank_saves, tmp_path / "checkpoint", ranks=3)
    assert texts[0].startswith(
        "save_checkpoint is collective: all 3 ranks must call it, and ranks 1, 2 did not within 0.5 s; "
    )
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def save_on_a_full_disk(rank: int, folder: Path) -> str:
    if rank == 1:  # what it writes past this size fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    return refusal(save_checkpoint, llama(), folder, max_shard_bytes=1)


def test_a_full_disk_fails_all_ranks_and_leaves_the_old_folder(pool, tmp_path):
    folder = tmp_path / "checkpoint"
    before = ready(other_llama(), folder)
    texts = pool.run(save_on_a_full_disk, folder, ranks=2)
    assert texts[0] == texts[1]
    assert "File too large" in texts[0]
    assert texts[0].endswith("[on rank 1 of 2]")
    assert contents(folder) == before
    assert beside(folder) == ["checkpoint"]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die_writing(rank: int, folder: Path, victim: int) -> None:
    gather.PIECE_BYTES = 700
    write_piece = ShardWriter.write
    left = 5

    def write_some(self: ShardWriter, data: memoryview) -> None:
        nonlocal left
        left -= 1
        if rank == victim and not left:
            die()
        write_piece(self, data)

    mock.patch.object(ShardWriter, "write", write_some).start()
    save_checkpoint(llama(), folder, max_shard_bytes=40_000)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_writing_leaves_the_old_folder(victim, pool, tmp_path):
    folder = tmp_path / "checkpoint"
    before = ready(other_llama(), folder)
    killed = pool.run_outcomes(save_and_die_writing, folder, victim, ranks=2)
    assert "SIGKILL" in str(killed[victim].error)
    assert contents(folder) == before
    assert len(beside(folder)) == (1 if victim else 3), "rank 0 removes what it began, unless it died itself"
    save_checkpoint(llama(), folder)
    assert_same_bits(stored(folder), expected(llama()))
    assert beside(folder) == ["checkpoint"]


def save_and_die_renaming(_: int, folder: Path, step: str) -> None:
    mock.patch.object(staging, "_exchange", return_value=False).start()  # as on NFS
    if step == "remove old":
        mock.patch.object(shutil, "rmtree", die).start()
    rename = Path.rename

    def rename_some(self: Path, target: Path) -> Path:
        if step == ("move new" if ".tmp-" in self.name else "move old"):
            die()
        return rename(self, target)

    mock.patch.object(Path, "rename", rename_some).start()
    save_checkpoint(llama(), folder)


@pytest.mark.parametrize("step", ["move old", "move new", "remove old"])
def test_a_process_that_dies_replacing_leaves_a_whole_folder(step, pool, tmp_path):
    folder = tmp_path / "checkpoint"
    before = ready(other_llama(), folder)
    (killed,) = pool.run_outcomes(save_and_die_renaming, folder, step, ranks=1)
    assert "SIGKILL" in str(killed.error)
    if step == "move new":
        assert "an interrupted save left it as .checkpoint.old-" in refusal(open_checkpoint, folder)
    elif step == "move old":
        assert contents(folder) == before
    else:
        assert_same_bits(stored(folder), expected(llama()))
    whole = contents(folder) or before
    staging.Staging(folder, "next").open()
    assert contents(folder) == whole
    assert beside(folder) == [".checkpoint.lock", ".checkpoint.tmp-next", "checkpoint"]
