"""A rank of the gloo pool, in its own process: it joins the others, and does what the caller asks."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from dtplan._errors import ApplyError

UNWIND_S = 10.0
"""Seconds, after a failed rank's connections were closed, in which ranks that waited for it may come to an error."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank has to know before it can meet the others."""

    rank: int
    n: int
    folder: Path
    timeout_s: float

    @property
    def places(self) -> Path:
        """The file in which the rank writes its stack when asked."""
        return self.folder / f"places{self.rank}"


def serve(seat: Seat, connection: Connection) -> None:
    """Do what the caller asks, one call after another, and keep connections open until it ends the process."""
    torch.set_num_threads(1)
    with seat.places.open("w") as places:
        faulthandler.register(signal.SIGUSR1, file=places, all_threads=False)
        with suppress(EOFError):  # the caller has gone
            while True:
                job = connection.recv_bytes()
                try:
                    _join_others(seat)
                    message = _called(seat.rank, job)
                except BaseException as error:  # noqa: BLE001 - the caller raises it
                    message = _packed(error)
                sys.stdout.flush()
                sys.stderr.flush()
                connection.send_bytes(message)


def _join_others(seat: Seat) -> None:
    if dist.is_initialized():
        return
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        "gloo",
        store=FileStore(str(seat.folder / "store"), seat.n),  # joining a TCPStore stalls for 5 s now and then
        rank=seat.rank,
        world_size=seat.n,
        timeout=timedelta(seconds=seat.timeout_s + UNWIND_S),  # the caller is first, unless it has gone
    )


def _called(rank: int, job: bytes) -> bytes:
    fn, args = pickle.loads(job)  # noqa: S301 - our own parent wrote it
    value = fn(rank, *args)
    try:
        return pickle.dumps((value,))
    except Exception as error:
        raise ApplyError(
            f"A result of type {type(value)} cannot be pickled ({error}): return plain tensors."
        ) from error


def _packed(error: BaseException) -> bytes:
    """What ``rebuilt`` needs, and the traceback; an error that cannot be rebuilt becomes an ApplyError."""
    text = "".join(traceback.format_exception(error))
    made_of = (type(error), error.args, error.__dict__)
    try:
        same = str(rebuilt(*pickle.loads(pickle.dumps(made_of)))) == str(error)  # noqa: S301 - made a moment ago
    except Exception:  # noqa: BLE001 - whatever the class or its attributes raise
        same = False
    if not same:
        made_of = (ApplyError, (f"{type(error).__qualname__}: {error}",), {})
    return pickle.dumps((*made_of, text))


def rebuilt(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """The error as it was, without its constructor, whose parameters need not be ``args``."""
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class RemoteTraceback(Exception):
    """The text of a traceback in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
