"""Folders that are broken or whose files fail: refused before the model is touched, by all ranks alike."""

from __future__ import annotations

import copy
import errno
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtplan._errors import WeightsError
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights.agree import agree
from dtplan.weights.checkpoint import BlockReader, open_checkpoint, read_header
from dtplan.weights.load import load_checkpoint
from dtplan.weights.save import save_checkpoint
from tests.checkpoints import llama, on_meta, on_ranks, refusal, shard


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A checkpoint of ``llama()`` in two files."""
    folder = tmp_path_factory.mktemp("good") / "checkpoint"
    save_checkpoint(llama(), folder, max_shard_bytes=40_000)
    assert len(list(folder.glob("*.safetensors"))) == 2
    return folder


SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def edit_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda folder: (folder / SECOND).write_bytes(change((folder / SECOND).read_bytes()))


def with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def only(name: str) -> Callable[[Path], None]:
    def strip(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()
        if name:
            (folder / name).write_bytes(b"")

    return strip


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "empty": (only(""), ["holds nothing"]),
    "other files": (only("notes.txt"), ["notes.txt", "give the folder with the weights"]),
    "pickled weights": (only("pytorch_model.bin"), ["pytorch_model.bin", "save_pretrained"]),
    "no index": (remove(INDEX), [SECOND, "copy the index"]),
    "missing file": (remove(SECOND), [INDEX, SECOND, "download that file"]),
    "index is no JSON": (lambda folder: (folder / INDEX).write_text("{"), [INDEX, "broken JSON"]),
    "index is nested": (lambda folder: (folder / INDEX).write_text("[" * 100_000), [INDEX, "broken JSON"]),
    "index is a list": (lambda folder: (folder / INDEX).write_text("[]"), [INDEX, "weight_map"]),
    "index maps to numbers": (edit_index(lambda names: names.update(x=1)), [INDEX, "weight_map"]),
    "index leaves, absolute": (
        edit_index(lambda names: names.update(x="/etc/passwd")),
        ["/etc/passwd", "not inside"],
    ),
    "index leaves, upwards": (
        edit_index(lambda names: names.update(x="../x.safetensors")),
        ["../x", "not inside"],
    ),
    "index lists too much": (
        edit_index(lambda names: names.update(x=SECOND)),
        [f"x ({SECOND})", "different saves"],
    ),
    "file is empty": (edit_bytes(lambda data: b""), [SECOND, "not a safetensors file"]),
    "file is a pointer": (edit_bytes(lambda data: b"version https://git-lfs"), [SECOND, "git lfs pull"]),
    "header length": (
        edit_bytes(lambda data: b"\xff" * 8 + data[8:]),
        [SECOND, "header length 18446744073709551615"],
    ),
    "header cut off": (edit_bytes(lambda data: data[:100]), [SECOND, "truncated in its header (100 of"]),
    "header is no JSON": (edit_bytes(lambda data: data[:8] + b"!" + data[9:]), [SECOND, "broken JSON"]),
    "header is a list": (edit_bytes(lambda data: with_header(b"[]")), [SECOND, "not a JSON object"]),
    "entry is broken": (
        edit_bytes(lambda data: data.replace(b'"shape":[32,64]', b'"shape":[32,65]')),
        [SECOND, "entry of model.layers.0.mlp.down_proj.weight is broken"],
    ),
    "file cut off": (edit_bytes(lambda data: data[:-5]), [SECOND, "truncated ("]),
    "file too long": (edit_bytes(lambda data: data + b"x"), [SECOND, "longer than its header says"]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_refused_before_the_model_is_touched(kind, good, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    load_checkpoint(on_meta(llama()), folder)
    damage, words = BROKEN[kind]
    damage(folder)
    model = on_meta(llama())
    text = refusal(load_checkpoint, model, folder)
    assert text.startswith(str(folder))
    assert [word for word in words if word not in text] == []
    assert all(param.is_meta for param in model.parameters())


def test_a_path_that_is_no_folder_is_refused(good, tmp_path):
    assert "no such folder; download" in refusal(open_checkpoint, tmp_path / "absent")
    assert "is a file; give the folder" in refusal(open_checkpoint, good / SECOND)


@pytest.fixture(scope="module")
def scratch(good, tmp_path_factory) -> tuple[Path, bytes]:
    return tmp_path_factory.mktemp("scratch") / "x.safetensors", (good / SECOND).read_bytes()


@given(at=st.integers(0, 1500), junk=st.binary(max_size=12), cut=st.integers(0, 20))
@settings(deadline=None)
def test_no_damage_escapes_as_another_error(scratch, at, junk, cut):
    file, whole = scratch
    file.write_bytes(whole[:at] + junk + whole[at + cut :])
    try:
        tensors = read_header(file)
    except WeightsError as error:
        assert str(file) in str(error)  # noqa: PT017 - both ways are right
    else:
        assert sum(math.prod(entry.shape) for entry in tensors.values()) > 0


def test_every_rank_raises_what_one_rank_met():
    def run(errors: list[Exception | None]) -> list[str]:
        return simulated_ranks(len(errors), lambda rank: refusal(agree, errors[rank]))

    broken, other = WeightsError("broken"), OSError("no space")
    assert set(run([broken, broken])) == {"broken"}
    assert set(run([None, None, broken])) == {"broken [on rank 2 of 3]"}
    assert set(run([broken, other, broken])) == {"broken [on ranks 0, 2 of 3]\nOSError: no space [on rank 1 of 3]"}
    assert simulated_ranks(2, lambda _: agree(None)) == [None, None]
    assert refusal(agree, broken) == "broken"


def test_one_ranks_truncated_file_is_refused_on_all(good, tmp_path):
    bad = tmp_path / "checkpoint"
    shutil.copytree(good, bad)
    with (bad / SECOND).open("rb+") as stream:
        stream.truncate(200)
    empty = on_meta(llama())

    def run(mesh: DeviceMesh) -> str:
        model = shard(copy.deepcopy(empty), mesh)
        text = refusal(load_checkpoint, model, bad if mesh.get_rank() == 1 else good)
        assert all(param.is_meta for param in model.parameters())
        return text

    texts = on_ranks({"shard": 2, "tp": 2}, run)
    assert len(set(texts)) == 1
    assert "truncated" in texts[0]
    assert texts[0].endswith("[on rank 1 of 4]")


def test_a_file_that_fails_on_one_rank_in_the_midst_of_a_load_is_refused_on_all(good, monkeypatch):
    read = BlockReader.read
    empty = on_meta(llama())

    def fail(self: BlockReader, name: str, block: tuple[slice, ...]) -> Tensor:
        if name.endswith("o_proj.weight") and dist.get_rank() == 2:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, name, block)

    monkeypatch.setattr(BlockReader, "read", fail)
    texts = on_ranks({"tp": 3}, lambda mesh: refusal(load_checkpoint, shard(copy.deepcopy(empty), mesh), good))
    assert len(set(texts)) == 1
    assert "Input/output error [on rank 2 of 3]" in texts[0]
