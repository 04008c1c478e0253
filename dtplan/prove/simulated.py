"""Many ranks as threads of this process: the cheap world, for proofs and tests on a CPU.

The only importer of torch's threaded process group, which is private:
torch.testing._internal.distributed.multi_threaded_pg, tried on torch 2.11 to 2.14.1.
Private as well, and tried on the same versions: _set_thread_isolation_mode, and DTensor's two caches in
torch.distributed.tensor._redistribute; FakeTensorMode on 2.11, which alone needs it here.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Store
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _redistribute
from torch.testing._internal.distributed import multi_threaded_pg

from dtplan._errors import ApplyError

T = TypeVar("T")

# Untyped, or absent from torch's stubs.
_install: Any = multi_threaded_pg._install_threaded_pg
_uninstall: Any = multi_threaded_pg._uninstall_threaded_pg
_World: Any = multi_threaded_pg.ThreadLocalWorld
_Collectives: Any = multi_threaded_pg.ProcessLocalGroup
_isolate_threads: Any = _distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]

if not hasattr(_World, "comms"):  # torch 2.11 asks for it when a group ends, and has forgotten it here
    _World.comms = property(lambda world: vars(world._get_world()).setdefault("comms", []))

_UNWIND_S = 5.0
"""Seconds that released ranks get to unwind before they are given up."""

_one_at_a_time = threading.Lock()
_given_up: list[threading.Thread] = []


def simulated_ranks(n: int, fn: Callable[..., T], *args: Any, timeout_s: float = 60) -> list[T]:
    """Run ``fn(rank, *args)`` on ``n`` ranks, threads of this process; return their results in rank order.

    Inside ``fn`` the default process group exists (backend "threaded", CPU); ``init_device_mesh``, DTensor,
    functional collectives and FSDP2 work as on ``n`` processes, and backward stays in the rank's thread.
    What threads share, ``fn`` must leave alone: the global random generator serves all ranks in no fixed
    order (build models and inputs before, give each rank a deep copy), and the default dtype is one for all.
    What belongs to a thread starts afresh in each rank: gradients are on, and the caller's modes are off.

    When a rank raises, the others are released from their collectives, and the error of the lowest rank
    that failed by itself is raised here: the same object, with its traceback. :class:`ApplyError` is raised
    when ranks are not done within ``timeout_s`` seconds, saying where each of them stands, and when this
    process has a process group already. A rank that never comes to a collective (an endless loop) cannot be
    ended: its daemon thread goes on, the error says so, and later calls are refused while it runs.
    """
    _refuse_unfit_caller(n)
    if torch.__version__ < "2.12":  # compared as versions
        _outlive_the_ranks()
    with _one_at_a_time, _threaded_world() as store:
        ranks = [_Rank(rank, n, fn, args, store, timeout_s) for rank in range(n)]
        for rank in ranks:
            rank.start()
        try:
            _join(ranks, timeout_s)
            late = [rank for rank in ranks if rank.is_alive()]
            places = [rank.place() for rank in ranks] if late else []
        finally:  # also when the caller is interrupted
            if any(rank.is_alive() for rank in ranks):
                store.release()
                _join(ranks, _UNWIND_S)
            _given_up[:] = [rank for rank in ranks if rank.is_alive()]
    if failed := next((rank.error for rank in ranks if rank.error and not _was_released(rank.error)), None):
        raise failed
    if late:
        raise ApplyError(_too_late(timeout_s, places))
    return [rank.result for rank in ranks]


def _refuse_unfit_caller(n: int) -> None:
    if n < 1:
        raise ApplyError(f"simulated_ranks needs at least one rank, but n is {n}.")
    if dist.is_initialized():
        raise ApplyError(
            f"simulated_ranks cannot run in a process that has a process group ({dist.get_backend()}): "
            "call it from a process without one, not from within a rank, or destroy that group first."
        )
    if running := [thread.name for thread in _given_up if thread.is_alive()]:
        raise ApplyError(
            f"simulated_ranks cannot run while {', '.join(running)} of an earlier call, which was given up, "
            "still runs: mend what it waits for, and start a new process."
        )


@functools.cache
def _outlive_the_ranks() -> None:
    """Enter a fake mode, as DTensor does in every rank, in a thread that lasts as long as the process.

    Torch 2.11, built for CUDA but without a device: the first thread to enter one makes the device guard of all
    threads, and takes it along when it ends. A rank must not be that thread, or the ranks of the next call crash.
    """
    entered = threading.Event()

    def enter() -> None:
        with FakeTensorMode():
            entered.set()

    def enter_and_stay() -> None:
        enter()
        threading.Event().wait()

    if threading.current_thread() is threading.main_thread():
        enter()
    else:
        threading.Thread(target=enter_and_stay, name="device guard", daemon=True).start()
        entered.wait()


@contextmanager
def _threaded_world() -> Iterator[_Store]:
    """Torch's process-wide state as the ranks need it, put back afterwards whatever happens."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the ranks are the parallelism
    _isolate_threads(True)
    _install()
    _Collectives.reset()
    try:
        yield _Store()
    finally:
        _uninstall()
        _isolate_threads(False)
        torch.set_num_threads(num_threads)
        # These two know a mesh by its thread's number, and the system gives the numbers out again: the next
        # call would find another rank's plan in them, with wrong rows wherever shards are uneven.
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()


class _Rank(threading.Thread):
    """One rank: a thread, with the result or the error that it ended with."""

    result: Any = None
    error: BaseException | None = None

    def __init__(
        self, rank: int, n: int, fn: Callable[..., Any], args: Sequence[Any], store: _Store, timeout_s: float
    ) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self._rank, self._n, self._fn, self._args, self._store = rank, n, fn, args, store
        self._timeout = timedelta(seconds=timeout_s)

    def run(self) -> None:
        world: Any = distributed_c10d._world
        try:
            dist.init_process_group(
                "threaded", rank=self._rank, world_size=self._n, store=self._store, timeout=self._timeout
            )
            self.result = self._fn(self._rank, *self._args)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self.error = error
            self._store.release()
        finally:
            if distributed_c10d._world is world and world.default_pg is not None:  # not given up meanwhile
                dist.destroy_process_group()

    def place(self) -> str:
        """Where the rank stands now: its innermost line outside torch and threading."""
        frame = sys._current_frames().get(self.ident or 0) if self.is_alive() else None
        if frame is None:
            return f"{self.name} has ended"
        library = (str(Path(torch.__file__).parent), threading.__file__, __file__)
        stack = traceback.extract_stack(frame)
        at = next((call for call in reversed(stack) if not call.filename.startswith(library)), stack[-1])
        return f"{self.name} is in {at.name}, {at.filename}:{at.lineno}: {at.line}"


class _Store(Store):
    """A store whose waits end when a rank has failed; those of torch's own stores last until their timeout.

    Ranks wait here for each other while groups and meshes are made.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def release(self) -> None:
        """Unwind every rank that waits for others, here or in a collective, now or later."""
        with _Collectives._coll_lock:
            _Collectives.exception_handle(None)
        with self._changed:
            self._changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self.set(key, str(total))
        return total

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            released = _Collectives._terminate.is_set
            self._changed.wait_for(lambda: released() or self._values.keys() >= set(keys))
            if not self._values.keys() >= set(keys):
                raise SystemExit(_RELEASED)


_RELEASED = "Test termination event occurs."
"""What torch's threaded collectives exit with when they are released."""


def _was_released(error: BaseException | None) -> bool:
    """Whether an error only tells that some other rank failed or was late."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, SystemExit) and error.code == _RELEASED:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _join(ranks: Sequence[threading.Thread], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))


def _too_late(timeout_s: float, places: Sequence[str]) -> str:
    lines = [f"{len(places)} simulated ranks were not all done after {timeout_s:g} s:", *places]
    if _given_up:
        lines.append(f"{', '.join(rank.name for rank in _given_up)} cannot be ended and still runs.")
    lines.append("Ranks wait for each other in collectives: every rank of a group must make the same calls.")
    return "\n  ".join(lines)
