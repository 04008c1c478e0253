"""Degrees as SageMaker's library names them, and the mesh that they ask for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dtplan._errors import DegreesError, did_you_mean

AXES = ("replicate", "shard", "tp")

_LATER = {
    "context_parallel_degree": "context parallelism",
    "expert_parallel_degree": "expert parallelism",
}
_NO_EFFECT = {
    "sm_activation_offloading",
    "activation_loading_horizon",
    "fsdp_cache_flush_warnings",
    "allow_empty_shards",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How many ranks share each piece of work.

    ``tensor_parallel_degree``: ranks that share every layer. ``hybrid_shard_degree``: ranks that share
    parameters, gradients and optimizer state; 0 is as many as possible, 1 is none. The remaining ranks hold
    replicas. ``random_seed``: seeds every rank alike, None leaves the generators as they are.
    """

    tensor_parallel_degree: int = 1
    hybrid_shard_degree: int = 0
    random_seed: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("tensor_parallel_degree", 1), ("hybrid_shard_degree", 0)):
            _check_int(name, getattr(self, name), least)
        if self.random_seed is not None:
            _check_int("random_seed", self.random_seed, 0)

    def mesh_shape(self, world_size: int) -> tuple[int, int, int]:
        """Sizes of the axes ``replicate``, ``shard``, ``tp`` for ``world_size`` ranks.

        Raises:
            DegreesError: the degrees do not divide the number of ranks; the text lists those that do.
        """
        tp, shard = self.tensor_parallel_degree, self.hybrid_shard_degree
        if world_size % tp:
            raise DegreesError(
                f"tensor_parallel_degree={tp} does not divide the {world_size} ranks; it may be one of "
                f"{_divisors(world_size)}"
            )
        data = world_size // tp
        shard = shard or data
        if data % shard:
            raise DegreesError(
                f"hybrid_shard_degree={shard} does not divide the {data} data-parallel ranks ({world_size} ranks / "
                f"tensor_parallel_degree={tp}); it may be 0 (the largest: {data}) or one of {_divisors(data)}"
            )
        return data // shard, shard, tp


def read_degrees(config: Mapping[str, Any] | str | Path | None = None, **overrides: Any) -> Degrees:
    """Degrees from a dict or the path of a JSON file, with keywords on top.

    Raises:
        DegreesError: the file is missing or not JSON, a key is unknown or asks for what is not there yet, a
            value is not a whole number in range.
    """
    given = dict(_read(config)) | {key: value for key, value in overrides.items() if value is not None}
    known = {field.name for field in fields(Degrees)}
    for key in sorted(given):
        if key in _LATER:
            _check_int(key, given[key], 1)
            if given[key] != 1:
                raise DegreesError(f"{key}={given[key]}: {_LATER[key]} is not part of dtplan yet; leave it at 1")
        elif key in _NO_EFFECT:
            raise DegreesError(f"{key} has no counterpart here: remove it from the configuration")
        elif key not in known:
            hint = did_you_mean(str(key), known) or f"known keys: {', '.join(sorted(known))}"
            raise DegreesError(f"unknown key {key!r} in the configuration; {hint}")
    return Degrees(**{key: value for key, value in given.items() if key in known})


def _read(config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | Path):
        raise DegreesError(
            f"the configuration is a {type(config).__name__}; give a dict, the path of a JSON file, or keywords"
        )
    try:
        given = json.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise DegreesError(f"cannot read the configuration {config}: {error.strerror}") from None
    except ValueError as error:  # JSON and UTF-8 errors alike
        raise DegreesError(f"the configuration {config} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise DegreesError(f"the configuration {config} holds a {type(given).__name__}; it must be an object of keys")
    return given


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DegreesError(f"{name}={value!r}: a whole number of at least {least} is needed")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
