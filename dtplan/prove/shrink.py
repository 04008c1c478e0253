"""A model small enough to prove a plan on in seconds, and like the real one where a plan can go wrong.

Kept: ratios of heads to kv heads, which of the asked degrees divide what, ties, biases, activation, residual kind,
every kind of layer. Shrunk: widths, counts, depth. Random: the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dtplan._errors import DtplanError

M = TypeVar("M", bound=nn.Module)
OLDEST_TORCH = (2, 11)


class CannotProveError(DtplanError, RuntimeError):
    """A proof cannot be run; nothing is said about the plan."""


def refuse_old_torch() -> None:
    """Ranks are simulated by parts of torch that older versions lack, or have otherwise.

    Raises:
        CannotProveError: torch is too old.
    """
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise CannotProveError(f"a proof needs torch {oldest} or newer, this is {torch.__version__}: nothing was run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A config field whose value in the shrunken model is not the real one."""

    field: str
    real: Any
    used: Any


LEAST_VOCABULARY = 64
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts")
_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "n_inner")
_WINDOW = 4
"""Shorter than the batch's sequences, so that a sliding window hides something."""


def shrink(config: Any, degrees: Iterable[int]) -> tuple[Any, tuple[Choice, ...]]:
    """A small config of ``config``'s class, and every field that differs.

    A count (heads, kv heads, vocabulary, ffn columns, experts) is divided by exactly those of ``degrees`` that
    divide the real one, so that a plan binds, or is refused, as on the real model.

    Raises:
        CannotProveError: the config lacks a size that every decoder has, or its class refuses the small ones.
    """
    given = config.to_dict()
    read = _Reader(config, given)
    small = _sizes(read, sorted(set(degrees)))
    small |= _layers(read)
    small |= {key: 0.0 for key, value in given.items() if _is_dropout(key) and value}
    changed = {read.key(field): value for field, value in small.items()}
    fixed: dict[str, Any] = {"dtype": "float64", "use_cache": False, "attn_implementation": "eager"}
    if any(read.get(field) for field in _COUNTS):
        fixed["experts_implementation"] = "eager"  # the grouped kernel has no float64
    try:
        built = type(config).from_dict({**given, **changed, **fixed})
    except Exception as error:
        raise CannotProveError(f"{type(config).__name__} refuses its shrunken form {changed}: {error}") from error
    found = built.to_dict()
    choices = [Choice(field=k, real=given[k], used=found[k]) for k in changed if k in given and given[k] != found[k]]
    return built, tuple(sorted(choices, key=lambda choice: choice.field))


class _Reader:
    """Config fields by their usual name, whatever the class calls them."""

    def __init__(self, config: Any, given: Mapping[str, Any]) -> None:
        self._config, self._given = config, given

    def key(self, field: str) -> str:
        return str((getattr(self._config, "attribute_map", None) or {}).get(field, field))

    def get(self, field: str) -> Any:
        return self._given.get(self.key(field))

    def need(self, field: str) -> int:
        value = self.get(field)
        if not isinstance(value, int) or value < 1:
            kind = type(self._config).__name__
            raise CannotProveError(f"{kind} has no `{field}`: only a decoder with one such config can be shrunken")
        return value

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._given.items()


def _sizes(read: _Reader, degrees: Sequence[int]) -> dict[str, Any]:
    heads, hidden, vocab = (read.need(f) for f in ("num_attention_heads", "hidden_size", "vocab_size"))
    kv_heads = read.get("num_key_value_heads") or heads
    head_dim = read.get("head_dim") or hidden // heads
    small_kv = _least_kv_heads(heads, kv_heads, degrees)
    small_heads = heads * small_kv // kv_heads
    small_dim = _least_head_dim(head_dim, read)
    rotated = read.get("rotary_dim")
    # Where the residual stream is not as wide as all heads together, it stays so.
    small_hidden = math.ceil(small_heads * small_dim * hidden / (heads * head_dim))
    if hidden != heads * head_dim:
        small_hidden = _like(hidden, small_hidden + small_dim, degrees)
    sizes: dict[str, Any] = {
        "num_attention_heads": small_heads,
        "hidden_size": small_hidden,
        "vocab_size": _like(vocab, LEAST_VOCABULARY, degrees),
    }
    if read.get("num_key_value_heads"):
        sizes["num_key_value_heads"] = small_kv
    if read.get("head_dim") and not read.get("qk_rope_head_dim"):  # MLA's heads have widths of their own, which stay
        sizes["head_dim"] = small_dim
    if isinstance(rotated, int):
        sizes["rotary_dim"] = small_dim * rotated // head_dim
    for field in ("intermediate_size", *_WIDTHS):
        if isinstance(read.get(field), int):
            sizes[field] = _like(read.need(field), small_hidden + small_hidden // 2, degrees)
    top = read.get("num_experts_per_tok") or 1
    for field in _COUNTS:
        if isinstance(count := read.get(field), int) and count > 2 * top:
            sizes[field] = _like(count, 2 * top, degrees)
    for key, value in read.items():
        if key.endswith("_token_id") and isinstance(value, int) and value >= sizes["vocab_size"]:
            sizes[key] = sizes["vocab_size"] - 1
    if isinstance(window := read.get("sliding_window"), int) and window > _WINDOW:
        sizes["sliding_window"] = _WINDOW
    return sizes


def _least_kv_heads(heads: int, kv_heads: int, degrees: Sequence[int]) -> int:
    """The fewest kv heads with the same ratio and divisors; two a rank where the real model has two."""

    def fits(count: int) -> bool:
        small = heads * count
        return small % kv_heads == 0 and all(
            (count % d == 0) == (kv_heads % d == 0) and (small // kv_heads % d == 0) == (heads % d == 0)
            for d in degrees
        )

    enough = min(kv_heads, 2 * max(degrees, default=1))
    return next(count for count in range(enough, kv_heads + 1) if fits(count))


def _least_head_dim(head_dim: int, read: _Reader) -> int:
    """The least width with whole pairs for the part of a head that is rotated."""
    rope = read.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor") or read.get("partial_rotary_factor") or 1.0
    if isinstance(width := read.get("rotary_dim"), int):
        part = width / head_dim
    return next((dim for dim in range(4, head_dim, 2) if (dim * part) % 2 == 0), head_dim)


def _like(real: int, least: int, degrees: Sequence[int]) -> int:
    """The smallest number from ``least`` on that the same degrees divide; never more than ``real``."""
    same: Callable[[int], bool] = lambda n: all((n % d == 0) == (real % d == 0) for d in degrees)  # noqa: E731
    return next((n for n in range(min(least, real), real) if same(n)), real)


def _layers(read: _Reader) -> dict[str, Any]:
    """Two layers, or one of each kind where lists of the config tell kinds apart."""
    depth = read.need("num_hidden_layers")
    lists = {key: value for key, value in read.items() if isinstance(value, list) and len(value) == depth > 1}
    dense = read.get("first_k_dense_replace")
    kinds = [(*(str(value[i]) for value in lists.values()), isinstance(dense, int) and i < dense) for i in range(depth)]
    kept = sorted({kinds.index(kind) for kind in kinds})
    kept = kept if len(kept) > 1 else list(range(min(2, depth)))
    changed: dict[str, Any] = {"num_hidden_layers": len(kept)}
    changed |= {key: [value[i] for i in kept] for key, value in lists.items()}
    if isinstance(dense, int):
        changed["first_k_dense_replace"] = sum(i < dense for i in kept)
    return changed


def _is_dropout(key: str) -> bool:
    return key.endswith(("dropout", "_pdrop"))


# ---------------------------------------------------------------------------------------------------- live models


def live_model(cls: type[nn.Module], config: Any, seed: int) -> nn.Module:
    """``cls(config)`` in float64 with random parameters."""
    return randomized(cls(config).double().train(), seed)


def randomized(model: M, seed: int) -> M:
    """``model`` with parameters drawn anew: none has a gradient that is small by symmetry."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Wide matrices would push attention into one-hot weights, whose gradients vanish.
            std = 0.3 if parameter.dim() < 2 else 1.0 / math.sqrt(parameter.shape[-1])
            parameter.normal_(0.0, std, generator=generator)
    return model


def token_batch(config: Any, *, rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """Random tokens [rows, length] and their labels; each row ignores as many, so that means of parts agree."""
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}
