"""A folder that appears whole: written beside its target, then renamed into place."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import fnmatch
import os
import shutil
import socket
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
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2, which Python has no name for."""


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
    or ``discard``. With ``carries``, files of the target that a save does not write are in the next content, too. The
    first rank holds a lock from ``open`` on, the file ``.NAME.lock``, so that a second job that saves to the target
    meanwhile is refused; the system drops the lock of a process that dies.

    What a crash leaves: before ``commit``, the target untouched and ``.NAME.tmp-TOKEN``, which the next save
    removes. ``commit`` swaps the two in one step, where the file system can (Linux, not NFS), so that there is a
    whole target at every moment. Elsewhere it renames twice: between the two there is no target, but the old folder
    whole as ``.NAME.old-TOKEN``, which the next save renames back (``open_checkpoint`` says so to a reader).
    Afterwards, the new target, and the old folder, which the next save removes.
    """

    def __init__(self, target: str | os.PathLike[str], token: str, *, carries: bool = True) -> None:
        # Of a link to a folder, the folder is replaced, and the link goes on pointing at it.
        self.target = Path(os.path.realpath(target))
        self.path = self.target.with_name(f".{self.target.name}.tmp-{token}")
        self._old = self.target.with_name(f".{self.target.name}.old-{token}")
        self._carries = carries
        self._lock = _Lock(self.target.with_name(f".{self.target.name}.lock"), self.target)

    def open(self) -> None:
        """Takes the lock, puts right what earlier crashes left, and makes the empty folder ``path``.

        Raises WeightsError.
        """
        with writing(self.target):
            if self.target.exists() and not self.target.is_dir():
                raise WeightsError(f"{self.target}: is a file; give a folder to save to")
            if Path.cwd().is_relative_to(self.target) or self.target.is_mount():
                raise WeightsError(
                    f"{self.target}: is a mount point or holds the working directory, so it cannot be replaced as a "
                    "whole; give a folder inside it"
                )
            self.target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.take()
                self._put_right()
                self.path.mkdir()
            except BaseException:
                self._lock.drop()
                raise

    def _put_right(self) -> None:
        for old in sorted(self._leftovers("old")):
            if not self.target.exists():
                old.rename(self.target)
        for leftover in self._leftovers("old") + self._leftovers("tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

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
            if not (replaces and _exchange(self.path, self.target)):
                self._replace(replaces=replaces)
            _sync(self.target.parent)
        # What a reader keeps open may not go now, on a network file system; the next save removes it.
        for old in (self.path, self._old):
            shutil.rmtree(old, ignore_errors=True)
        self._lock.drop()

    def _replace(self, *, replaces: bool) -> None:
        if replaces:
            self.target.rename(self._old)
        try:
            self.path.rename(self.target)
        except OSError:
            if replaces:
                self._old.rename(self.target)
            raise

    def discard(self) -> None:
        """Removes ``path``; what cannot be removed now, the next save removes."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.drop()

    def _carry_over(self) -> None:
        """Links what this save does not replace into ``path``: a save never deletes a user's own files."""

        def replaced(folder: str, names: list[str]) -> set[str]:
            if Path(folder) != self.target:
                return set()
            weights = {name for name in names if any(fnmatch.fnmatch(name, glob) for glob in REPLACED)}
            return weights | {name for name in names if (self.path / name).exists()}

        shutil.copytree(self.target, self.path, symlinks=True, ignore=replaced, copy_function=_link, dirs_exist_ok=True)


class _Lock:
    """A lock on saves to ``target``: an flock on ``file``, which lives as long as the process holds it open."""

    def __init__(self, file: Path, target: Path) -> None:
        self._file, self._target = file, target
        self._held: int | None = None

    def take(self) -> None:
        """Takes the lock. Raises WeightsError when another save holds it, OSError when the file cannot be made."""
        while True:
            held = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(held, 200, 0).decode(errors="replace")
                os.close(held)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return  # a file system without locks: saves to one folder at once are the user's care
                raise WeightsError(
                    f"{self._target}: another save to this folder is under way ({holder or 'its lock is held'}); wait "
                    "for it, or give each job a folder of its own"
                ) from error
            # The last holder may have removed the file between our two calls: then the lock is on nothing.
            if _same_file(held, self._file):
                break
            os.close(held)
        self._held = held
        os.ftruncate(held, 0)
        os.pwrite(held, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def drop(self) -> None:
        """Gives the lock back, and removes its file, if it is held."""
        if self._held is not None:
            self._file.unlink(missing_ok=True)
            os.close(self._held)
            self._held = None


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step; False, and nothing is done, where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    return renameat2 is not None and not renameat2(
        AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE
    )


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


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
