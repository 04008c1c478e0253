"""Many ranks as processes that talk over gloo: the real world on a CPU, for what threads cannot show."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from linecache import getline
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

import torch

from dtplan._errors import ApplyError
from dtplan.prove.serve import UNWIND_S, RemoteTraceback, Seat, rebuilt, serve
from dtplan.prove.serve import __file__ as serve_file

_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
    "dtplan.prove.pool",
    "dtplan.prove.ranks",
)

_SETTLE_S = 2.0
"""Seconds, after a rank failed, in which the others may come to an end; it keeps its connections so long."""
_UNWIND_S = UNWIND_S

_STACK_LINE = r'File "(.+)", line (\d+) in (.+)'
_LIBRARY = (str(Path(torch.__file__).parent), str(Path(multiprocessing.__file__).parent), __file__, serve_file, "<")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """What one rank came to: a value, or an error whose cause shows the remote traceback.

    ``secondary`` marks an error that came after another rank was lost, and may only tell of that loss.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    secondary: bool = False


class GlooPool:
    """Up to ``size`` gloo ranks on this machine, each a process forked from a warm server.

    Every call gets processes and a process group of its own: in a process that is kept, DTensor's caches
    outlive the group, and resolve a mesh of the next call to groups of the last one. A fork costs little, for
    the server (one per Python process, started by the first call) has imported torch, transformers and the
    modules of ``preload`` before; what costs is that each process warms up torch anew. Within :meth:`kept`,
    calls share processes and the group. Functions and arguments travel by pickle, hence functions by module
    and name; as always with multiprocessing, a script makes its calls under ``if __name__ == "__main__"``.
    """

    def __init__(self, size: int, *, timeout_s: float = 60, preload: Sequence[str] = ()) -> None:
        if size < 1:
            raise ApplyError(f"GlooPool needs at least one rank, but size is {size}.")
        self.size = size
        self.timeout_s = timeout_s
        self._closed = False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOAD, *preload])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuse further calls; no process outlives the call that it was made for."""
        self._closed = True

    def run(
        self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Call ``fn(rank, *args)`` on ``ranks`` ranks (default: all); return the values in rank order.

        Raises the error of the lowest rank that failed by itself, of its own class if that can be rebuilt
        here, with the remote traceback as its cause. Raises :class:`ApplyError` when a rank died, when ranks
        were not done after ``timeout_s`` seconds (default: the pool's) and when something does not pickle.
        """
        return values_of(self.run_outcomes(fn, *args, ranks=ranks, timeout_s=timeout_s))

    def run_outcomes(
        self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, timeout_s: float | None = None
    ) -> list[RankOutcome]:
        """Like :meth:`run`, but return what each rank came to and raise no error of a rank."""
        with self._seated(ranks, timeout_s) as ranks_:
            return ranks_.outcomes(fn, args)

    @contextmanager
    def kept(self, *, ranks: int | None = None, timeout_s: float | None = None) -> Iterator[Kept]:
        """Inside, calls of the given object share processes, warm from the second call on.

        For many short calls, as the examples of a property. The process group is one for all of them, so the
        groups that DTensor's caches know stay alive; those that calls make for their meshes add up. After a
        call that failed the next one gets new processes.
        """
        with self._seated(ranks, timeout_s) as ranks_:
            yield ranks_

    @contextmanager
    def _seated(self, ranks: int | None, timeout_s: float | None) -> Iterator[Kept]:
        n = self.size if ranks is None else ranks
        if self._closed:
            raise ApplyError("This GlooPool is closed: make another one.")
        if not 1 <= n <= self.size:
            raise ApplyError(f"This GlooPool runs 1 to {self.size} ranks, but {n} were asked for.")
        kept = Kept(n, self.timeout_s if timeout_s is None else timeout_s, self._context)
        try:
            yield kept
        finally:
            kept.end()


class Kept:
    """Ranks that serve one call after another; made by a pool."""

    def __init__(self, n: int, timeout_s: float, context: ForkServerContext) -> None:
        self.n, self.timeout_s = n, timeout_s
        self._context = context
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """As :meth:`GlooPool.run`; what ``fn`` leaves behind in its process, the next call finds."""
        return values_of(self.outcomes(fn, args))

    def outcomes(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[RankOutcome]:
        """What each rank came to; after an error of any the processes are ended."""
        job = _pickled_job(fn, args)
        try:
            for worker in self._ready():
                worker.ask(job)
            _listen(self._workers, self.timeout_s)
            outcomes = [worker.outcome for worker in self._workers if worker.outcome is not None]
        except BaseException:
            self.end()
            raise
        if any(worker.failed for worker in self._workers):
            self.end()
        return outcomes

    def _ready(self) -> list[_Worker]:
        if not self._workers:
            self._folder = tempfile.TemporaryDirectory(prefix="dtplan-")
            for rank in range(self.n):
                seat = Seat(rank, self.n, Path(self._folder.name), self.timeout_s)
                self._workers.append(_Worker(seat, self._context))
        return self._workers

    def end(self) -> None:
        """End the processes, whatever they do."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def values_of(outcomes: Sequence[RankOutcome]) -> list[Any]:
    """The values in rank order; raises the error of the lowest rank that failed by itself."""
    for outcome in sorted(outcomes, key=lambda outcome: outcome.secondary):
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def _pickled_job(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise ApplyError(
            f"GlooPool cannot send {fn!r} and its arguments to other processes ({error}): give it a function "
            "from the top level of a module, and arguments that pickle takes."
        ) from error


# ------------------------------------------------------------------------------------- in the calling process


class _Worker:
    """The calling process's end of one rank."""

    def __init__(self, seat: Seat, context: ForkServerContext) -> None:
        self.seat = seat
        self.outcome: RankOutcome | None = None
        self.died = False
        seat.places.touch()
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(seat, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, job: bytes) -> None:
        """Give the rank something to do."""
        self.outcome = None
        with suppress(OSError):  # it died: whoever hears from it will tell
            self.connection.send_bytes(job)

    def hear(self, *, secondary: bool) -> None:
        """Take what the rank sends, or note that it died instead."""
        rank, n = self.seat.rank, self.seat.n
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError):  # before its message, or within
            self._process.join()
            code = self._process.exitcode or 0
            how = f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            self.died = True
            self.fail(f"rank {rank} of {n} died {how}, and sent no result.", secondary=secondary)
            return
        try:
            self.outcome = replace(_opened(rank, message), secondary=secondary)
        except Exception as error:  # noqa: BLE001 - what a foreign class raises while it is rebuilt
            text = f"rank {rank} sent what cannot be rebuilt here ({error!r}): return plain tensors."
            self.fail(text, secondary=secondary)

    def fail(self, text: str, *, secondary: bool) -> None:
        """Give the rank an outcome that it could not send itself."""
        self.outcome = RankOutcome(rank=self.seat.rank, error=ApplyError(text), secondary=secondary)

    @property
    def failed(self) -> bool:
        """Whether the rank has come to an error."""
        return self.outcome is not None and self.outcome.error is not None

    def place(self) -> str:
        """Where the rank stands now: its innermost line outside torch."""
        if self.outcome is not None:
            return f"rank {self.seat.rank} has {'failed' if self.failed else 'ended'}"
        assert self._process.pid is not None
        with suppress(ProcessLookupError):  # it may have died this moment
            os.kill(self._process.pid, signal.SIGUSR1)
        for _ in range(20):  # faulthandler writes the stack, innermost line first, and tells nobody when
            time.sleep(0.1)
            for file, line, function in re.findall(_STACK_LINE, self.seat.places.read_text()):
                if not file.startswith(_LIBRARY):
                    text = getline(file, int(line)).strip()
                    return f"rank {self.seat.rank} is in {function}, {file}:{line}: {text}"
        return f"rank {self.seat.rank} is starting"

    def end(self) -> None:
        """End the process, whatever it does, and see it gone."""
        self.connection.close()
        self._process.kill()
        self._process.join()


def _listen(workers: Sequence[_Worker], timeout_s: float) -> None:
    """Hear from every rank; after a failure, see that no rank waits for the one that failed."""
    start = time.monotonic()
    deadline = until = start + timeout_s
    released = False
    while waiting := [worker for worker in workers if worker.outcome is None]:
        ready = wait([worker.connection for worker in waiting], max(0.0, until - time.monotonic()))
        heard = [worker for worker in waiting if worker.connection in ready]
        for worker in heard:
            worker.hear(secondary=released)
        failed = [worker for worker in workers if worker.failed]
        if not released and (any(worker.died for worker in heard) or (failed and not ready)):
            released = True
            until = min(deadline, time.monotonic() + _UNWIND_S)
        elif not ready:
            _give_up(workers, time.monotonic() - start)
        elif failed and until == deadline:
            until = min(deadline, time.monotonic() + _SETTLE_S)
        if released:
            for worker in failed:
                worker.end()  # this closes its connections, and so wakes the ranks that wait for it
    if any(worker.died for worker in workers):  # others may have told of the loss before it was seen here
        for worker in workers:
            if worker.outcome and worker.failed and not worker.died:
                worker.outcome = replace(worker.outcome, secondary=True)


def _give_up(workers: Sequence[_Worker], seconds: float) -> None:
    secondary = any(worker.failed for worker in workers)
    text = "\n  ".join(
        [
            f"{len(workers)} gloo ranks were not all done after {round(seconds, 1):g} s:",
            *(worker.place() for worker in workers),
            "Ranks wait for each other in collectives: every rank of a group must make the same calls.",
        ]
    )
    for worker in workers:
        if worker.outcome is None:
            worker.fail(text, secondary=secondary)


def _opened(rank: int, message: bytes) -> RankOutcome:
    parts = pickle.loads(message)  # noqa: S301 - our own child sent it
    if len(parts) == 1:
        return RankOutcome(rank=rank, value=parts[0])
    *made_of, text = parts
    error = rebuilt(*made_of)
    error.__cause__ = RemoteTraceback(text)
    return RankOutcome(rank=rank, error=error)
