"""A folder that appears whole: written beside its target, then renamed into place."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtplan._errors import WeightsError

__all__ = ["Staging", "writing"]

REPLACED = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
)
"""Files of the previous folder that must not outlive it; others, a tokenizer or notes, are carried over."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a WeightsError that names ``path`` and what to do."""
    try:
        yield
    except OSError as error:
        raise WeightsError(
            f"{path}: cannot be written ({error.strerror or error}); check the permissions and the free "
            "space, or choose another folder"
        ) from error


class Staging:
    """The next content of ``target``, in ``path``, a sibling folder that only ``commit`` makes visible.

    One rank calls ``open``; then any rank that sees ``path`` writes into it; then the first calls ``commit``
    or ``discard``. With ``carries``, files of the target that a save does not write are in the next content, too.
    Two jobs must not save to one target at the same time.

    What a crash leaves: before ``commit``, the target untouched and ``.NAME.tmp-TOKEN``, which the next save
    removes. Between the two renames of ``commit``, no target, but the old folder whole as
    ``.NAME.old-TOKEN``, which the next save renames back (``open_checkpoint`` says so to a reader). After
    them, the new target, and the old folder, which the next save removes.
    """

    def __init__(self, target: str | os.PathLike[str], token: str, *, carries: bool = True) -> None:
        # Of a link to a folder, the folder is replaced, and the link goes on pointing at it.
        self.target = Path(os.path.realpath(target))
        self.path = self.target.with_name(f".{self.target.name}.tmp-{token}")
        self._old = self.target.with_name(f".{self.target.name}.old-{token}")
        self._carries = carries

    def open(self) -> None:
        """Puts right what earlier crashes left, and makes the empty folder ``path``. Raises WeightsError."""
        if self.target.exists() and not self.target.is_dir():
            raise WeightsError(f"{self.target}: is a file; give a folder to save to")
        if Path.cwd().is_relative_to(self.target) or self.target.is_mount():
            raise WeightsError(
                f"{self.target}: is a mount point or holds the working directory, so it cannot be replaced as a "
                "whole; give a folder inside it"
            )
        with writing(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            for old in sorted(self._leftovers("old")):
                if not self.target.exists():
                    old.rename(self.target)
            for leftover in self._leftovers("old") + self._leftovers("tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            self.path.mkdir()

    def _leftovers(self, kind: str) -> list[Path]:
        prefix = f".{self.target.name}.{kind}-"
        return [path for path in self.target.parent.iterdir() if path.name.startswith(prefix) and path.is_dir()]

    def commit(self) -> None:
        """Puts ``path`` in the target's place, once all of it is on the disk. Raises WeightsError."""
        with writing(self.target):
            replaces = self.target.exists()
            for folder, _, files in os.walk(self.path):
                for name in files:
                    _sync(Path(folder, name))
            if replaces and self._carries:
                self._carry_over()
            for folder, _, _ in os.walk(self.path):
                _sync(Path(folder))
            if replaces:
                self.target.rename(self._old)
            try:
                self.path.rename(self.target)
            except OSError:
                if replaces:
                    self._old.rename(self.target)
                raise
            _sync(self.target.parent)
        # What a reader keeps open may not go now, on a network file system; the next save removes it.
        shutil.rmtree(self._old, ignore_errors=True)

    def discard(self) -> None:
        """Removes ``path``; what cannot be removed now, the next save removes."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _carry_over(self) -> None:
        """Links what this save does not replace into ``path``: a save never deletes a user's own files."""

        def replaced(folder: str, names: list[str]) -> set[str]:
            if Path(folder) != self.target:
                return set()
            weights = {name for name in names if any(fnmatch.fnmatch(name, glob) for glob in REPLACED)}
            return weights | {name for name in names if (self.path / name).exists()}

        shutil.copytree(self.target, self.path, symlinks=True, ignore=replaced, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # no hard links on this file system
        shutil.copy2(source, destination)


def _sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
