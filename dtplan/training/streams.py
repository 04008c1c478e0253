"""The states of random number generators: those that every process has, and those that a user names."""

from __future__ import annotations

import random
import sys
from collections.abc import Container, Mapping
from typing import Any

import torch

from dtplan._errors import WeightsError

__all__ = ["UNSHARED", "check_streams", "read_streams", "set_stream"]

UNSHARED = ("rng.python", "rng.numpy")
"""Streams that begin differently in every process unless a user seeds them, so that ranks owe nothing to each other's:
where they cannot be given back, it is told and not refused."""


def read_streams(device: torch.device, generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """The state of each stream by name: torch's on the host and on ``device``, Python's, numpy's if it is loaded."""
    streams: dict[str, Any] = {"rng.torch": torch.get_rng_state(), "rng.python": random.getstate()}
    if device.type != "cpu":
        streams[f"rng.{device.type}"] = torch.get_device_module(device.type).get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        streams["rng.numpy"] = (kind, keys.tolist(), *rest)
    return streams | {f"rng.{name}": generator.get_state() for name, generator in generators.items()}


def check_streams(
    streams: Mapping[str, Any],
    saved: Mapping[str, Any],
    out: Container[str],
    device: torch.device,
    generators: Mapping[str, torch.Generator],
) -> None:
    """Every stream has a place here, and every named one here is in the checkpoint.

    Raises:
        WeightsError: it names the first that is not.
    """
    there = read_streams(device, generators)
    for name in streams:
        if name not in there:
            raise WeightsError(
                f"the checkpoint has the random stream {name}, and here is none: give its generator to "
                f"TrainingCheckpoints, or resume(leave_out=[{name!r}])"
            )
    for name in (f"rng.{short}" for short in generators):
        if name not in saved and "rng" not in out:
            raise WeightsError(
                f"the checkpoint has no random stream {name}; give no such generator, or leave out 'rng'"
            )


def set_stream(name: str, state: Any, device: torch.device, generators: Mapping[str, torch.Generator]) -> None:
    """Puts one stream where it was."""
    short = name.removeprefix("rng.")
    if short in generators:
        generators[short].set_state(state)
    elif short == "torch":
        torch.set_rng_state(state)
    elif short == "python":
        random.setstate(state)
    elif short == "numpy":
        sys.modules["numpy"].random.set_state(state)
    else:
        torch.get_device_module(short).set_rng_state(state, device)
