"""A model small enough to prove a plan on in seconds, and like the real one where a plan can go wrong.

Kept: ratios of heads to kv heads, which of the asked degrees divide what, ties, biases, activation, residual kind,
every kind of layer. Shrunk: widths, counts, depth. Random: the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtplan._errors import DtplanError

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
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_OTHER_NAMES = {"num_key_value_heads": ("num_kv_heads", "n_kv_heads")}
"""Names that some classes have instead, without saying so in their attribute map."""
_AS_WIDE = ("word_embed_proj_dim",)
"""Widths that are the residual stream's where the real model has them so."""
_NO_SIZES = ("dtype", "use_cache", "transformers_version")
_WIDE = 64
"""A dim of a parameter that is larger, once all sizes with known names are shrunken, has one of another name."""
_WINDOW = 4
"""Shorter than the batch's sequences, so that a sliding window hides something."""


def shrink(config: Any, degrees: Iterable[int], cls: type[nn.Module] | None = None) -> tuple[Any, tuple[Choice, ...]]:
    """A small config of ``config``'s class, and every field that differs.

    A count (heads, kv heads, vocabulary, ffn columns, experts) is divided by exactly those of ``degrees`` that
    divide the real one, so that a plan binds, or is refused, as on the real model. With ``cls``, the model's class,
    sizes of any name are shrunken that its parameters have.

    Raises:
        CannotProveError: the config lacks a size that every decoder has, or its class refuses the small ones.
    """
    text = config.get_text_config(decoder=True)
    subs = {key: getattr(config, key) for key in config.sub_configs if getattr(config, key, None) is not None}
    changed: dict[str, Any]
    if any(sub is text for sub in subs.values()):
        changed = {key: _within(sub, degrees, is_text=sub is text) for key, sub in subs.items()}
    else:
        changed = _changes(config, sorted(set(degrees)))
    built = rebuilt(config, changed)
    fields = set(changed)
    if cls is not None and (more := _other_widths(cls, config, built, sorted(set(degrees)))):
        built = rebuilt(built, more)
        fields |= {field.split(".")[0] for field in more}
    return built, tuple(differences(config, built, fields))


def _other_widths(cls: type[nn.Module], real: Any, config: Any, degrees: Sequence[int]) -> dict[str, int]:
    """Numbers of the decoder's config, as yet the real ones, that are large dims of parameters: small and all apart."""
    try:
        with torch.device("meta"):
            dims = {n for parameter in cls(config).parameters() for n in parameter.shape if n > _WIDE}
    except Exception:  # noqa: BLE001 - `refuse_unfit` tells why
        return {}
    text, before = config.get_text_config(decoder=True), real.get_text_config(decoder=True).to_dict()
    prefix = text_prefix(config)
    found: dict[str, int] = {}
    for field, value in text.to_dict().items():
        is_size = type(value) is int and value in dims and value == before.get(field)
        if is_size and not any(word in field for word in ("vocab", "position")):
            found[prefix + field] = like(value, 3 * _WIDE // 8 + 4 * len(found), degrees)
    return found


def text_prefix(config: Any) -> str:
    """``text_config.`` where the decoder's config lies within another."""
    text = config.get_text_config(decoder=True)
    return next((f"{name}." for name in config.sub_configs if getattr(config, name, None) is text), "")


def rebuilt(config: Any, changed: Mapping[str, Any]) -> Any:
    """A config with some fields changed, such as ``text_config.num_hidden_layers``, and what float64 needs.

    Raises:
        CannotProveError: its class refuses the values.
    """
    given: dict[str, Any] = config.to_dict()
    for field, value in changed.items():
        *owners, name = field.split(".")
        owner = given
        for each in owners:
            owner = owner.setdefault(each, {})
        owner[name] = value
    fixed: dict[str, Any] = {"dtype": "float64", "use_cache": False, "attn_implementation": "eager"}
    for name in config.sub_configs:
        if isinstance(given.get(name), dict) and "use_cache" in given[name]:
            given[name]["use_cache"] = False
    if any(getattr(config.get_text_config(decoder=True), field, None) for field in COUNTS):
        fixed["experts_implementation"] = "eager"  # the grouped kernel has no float64
    try:
        return type(config).from_dict({**given, **fixed})
    except Exception as error:
        told = {name: value for name, value in changed.items() if not isinstance(value, dict)}
        raise CannotProveError(f"{type(config).__name__} refuses its shrunken form {told}: {error}") from error


def _changes(config: Any, degrees: Sequence[int], *, is_text: bool = True) -> dict[str, Any]:
    """The fields of one config that are not nested, and their values once shrunken."""
    given = config.to_dict()
    read = Reader(config, given)
    small = _sizes(read, degrees, is_text=is_text)
    small |= _layers(read, {read.key(field): value for field, value in small.items()})
    small |= {key: 0.0 for key, value in given.items() if _is_dropout(key) and value}
    return {read.key(field): value for field, value in small.items()}


def _within(config: Any, degrees: Iterable[int], *, is_text: bool) -> dict[str, Any]:
    """A config within another, shrunken; one that is not the text model's stays as it is if its sizes are unknown."""
    try:
        changed = _changes(config, sorted(set(degrees)), is_text=is_text)
    except CannotProveError:
        if is_text:
            raise
        changed = {}
    return {**config.to_dict(), **changed}


def differences(real: Any, used: Any, fields: Iterable[str], under: str = "") -> Iterator[Choice]:
    """Those of ``fields`` in which two configs differ, and theirs within them, sorted by name."""
    a, b = real.to_dict(), used.to_dict()
    for field in sorted(fields):
        mine, theirs = a.get(field), b.get(field)
        if field in real.sub_configs and isinstance(mine, dict) and isinstance(theirs, dict):
            yield from differences(getattr(real, field), getattr(used, field), mine, f"{under}{field}.")
        elif mine != theirs and field not in _NO_SIZES:
            yield Choice(field=under + field, real=mine, used=theirs)


class Reader:
    """Config fields by their usual name, whatever the class calls them."""

    def __init__(self, config: Any, given: Mapping[str, Any]) -> None:
        self._config, self._given = config, given

    def key(self, field: str) -> str:
        """The class's own name of a field."""
        own = str((getattr(self._config, "attribute_map", None) or {}).get(field, field))
        return next((n for n in (own, *_OTHER_NAMES.get(field, ())) if n in self._given), own)

    def get(self, field: str) -> Any:
        """A field, or None."""
        return self._given.get(self.key(field))

    def need(self, field: str) -> int:
        """A positive number.

        Raises:
            CannotProveError: the config has none there.
        """
        value = self.get(field)
        if not isinstance(value, int) or value < 1:
            kind = type(self._config).__name__
            raise CannotProveError(f"{kind} has no `{field}`: only a decoder with one such config can be shrunken")
        return value

    def items(self) -> Iterable[tuple[str, Any]]:
        """All fields, by the class's own names."""
        return self._given.items()


def _sizes(read: Reader, degrees: Sequence[int], *, is_text: bool) -> dict[str, Any]:
    heads, hidden = read.need("num_attention_heads"), read.need("hidden_size")
    kv_heads = read.get("num_key_value_heads") or heads
    head_dim = read.get("head_dim") or hidden // heads
    small_kv = _least_kv_heads(heads, kv_heads, degrees)
    small_heads = heads * small_kv // kv_heads
    small_dim = _least_head_dim(head_dim, read)
    rotated = read.get("rotary_dim")
    # Where the residual stream is not as wide as all heads together, it stays so.
    small_hidden = math.ceil(small_heads * small_dim * hidden / (heads * head_dim))
    if hidden != heads * head_dim:
        small_hidden = like(hidden, small_hidden + small_dim, degrees)
    sizes: dict[str, Any] = {
        "num_attention_heads": small_heads,
        "hidden_size": small_hidden,
    }
    if read.get("num_key_value_heads"):
        sizes["num_key_value_heads"] = small_kv
    if read.get("head_dim") and not read.get("qk_rope_head_dim"):  # MLA's heads have widths of their own, which stay
        sizes["head_dim"] = small_dim
    if isinstance(rotated, int):
        sizes["rotary_dim"] = small_dim * rotated // head_dim
    sizes |= {field: small_hidden for field in _AS_WIDE if read.get(field) == hidden}
    sizes |= _mamba(read, small_hidden, degrees)
    return sizes | _widths(read, small_hidden, degrees) | (_vocabulary(read, degrees) if is_text else _image(read))


def _widths(read: Reader, small_hidden: int, degrees: Sequence[int]) -> dict[str, Any]:
    """Columns of the MLPs, experts, and the window of attention."""
    sizes: dict[str, Any] = {}
    for field in ("intermediate_size", *WIDTHS):
        if isinstance(read.get(field), int):
            sizes[field] = like(read.need(field), small_hidden + small_hidden // 2, degrees)
    top = read.get("num_experts_per_tok") or 1
    for field in COUNTS:
        if isinstance(count := read.get(field), int) and count > 2 * top:
            sizes[field] = like(count, 2 * top, degrees)
    if isinstance(window := read.get("sliding_window"), int) and window > _WINDOW:
        sizes["sliding_window"] = _WINDOW
    return sizes


def _mamba(read: Reader, small_hidden: int, degrees: Sequence[int]) -> dict[str, Any]:
    """Heads, and what goes with them, of a Mamba mixer; together they are as wide as the config says."""
    heads, expand = read.get("mamba_n_heads"), read.get("mamba_expand")
    if not isinstance(heads, int) or not isinstance(expand, int):
        return {}
    inner = expand * small_hidden
    small = next(n for n in range(like(heads, 8, degrees), inner + 1) if inner % n == 0)
    sizes = {"mamba_n_heads": small, "mamba_d_head": inner // small, "mamba_d_ssm": inner, "mamba_d_state": 8}
    sizes |= {"mamba_n_groups": min(2, read.get("mamba_n_groups") or 1), "mamba_chunk_size": 8}
    return {field: value for field, value in sizes.items() if read.get(field) is not None}


def _vocabulary(read: Reader, degrees: Sequence[int]) -> dict[str, Any]:
    real = read.need("vocab_size")
    size = like(real, LEAST_VOCABULARY, degrees)
    more = {key: size for key, value in read.items() if key.startswith("vocab_size_") and value == real}
    ids = {key: value for key, value in read.items() if key.endswith("_token_id") and isinstance(value, int)}
    return {"vocab_size": size, **more, **{key: size - 1 for key, value in ids.items() if value >= size}}


def _image(read: Reader) -> dict[str, Any]:
    """Two patches each way."""
    patch, image = read.get("patch_size"), read.get("image_size")
    return {"image_size": 2 * patch} if isinstance(patch, int) and isinstance(image, int) else {}


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


def _least_head_dim(head_dim: int, read: Reader) -> int:
    """The least width with whole pairs for the part of a head that is rotated."""
    rope = read.get("rope_parameters") or {}
    part = rope.get("partial_rotary_factor") or read.get("partial_rotary_factor") or 1.0
    if isinstance(width := read.get("rotary_dim"), int):
        part = width / head_dim
    return next((dim for dim in range(4, head_dim, 2) if (dim * part) % 2 == 0), head_dim)


def like(real: int, least: int, degrees: Sequence[int]) -> int:
    """The smallest number from ``least`` on that the same degrees divide; never more than ``real``."""
    same: Callable[[int], bool] = lambda n: all((n % d == 0) == (real % d == 0) for d in degrees)  # noqa: E731
    return next((n for n in range(min(least, real), real) if same(n)), real)


def _layers(read: Reader, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers, or one of each kind where lists of the config tell kinds apart."""
    kept = one_of_each_kind(read)
    return layers(read, kept if len(kept) > 1 else list(range(min(2, read.need("num_hidden_layers")))), sizes)


def one_of_each_kind(read: Reader) -> list[int]:
    """The first layer of each kind."""
    lists, own, dense = _lists(read), _own(read), read.get("first_k_dense_replace")
    kinds = [
        (
            *(str(value[i]) for value in lists.values()),
            *(str(value.get(i)) for value in own.values()),
            isinstance(dense, int) and i < dense,
        )
        for i in range(read.need("num_hidden_layers"))
    ]
    return sorted({kinds.index(kind) for kind in kinds})


def layers(read: Reader, kept: Sequence[int], sizes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The changes of a config that leave the layers ``kept``; what single layers have of ``sizes`` shrinks as these."""
    changed: dict[str, Any] = {"num_hidden_layers": len(kept)}
    changed |= {key: [value[i] for i in kept] for key, value in _lists(read).items()}
    for key, of_layers in _own(read).items():
        changed[key] = {
            place: {field: _in_proportion(read, field, value, sizes or {}) for field, value in of_layers[i].items()}
            for place, i in enumerate(kept)
            if i in of_layers
        }
    if isinstance(dense := read.get("first_k_dense_replace"), int):
        changed["first_k_dense_replace"] = sum(i < dense for i in kept)
    return changed


def _in_proportion(read: Reader, field: str, value: Any, sizes: Mapping[str, Any]) -> Any:
    """What a layer has in place of the config's own size, as large beside it as in the real model."""
    base, small = read.get(field), sizes.get(field)
    return value * small // base if isinstance(value, int) and base and isinstance(small, int) else value


def _lists(read: Reader) -> dict[str, Any]:
    """Fields with an entry for each layer."""
    depth = read.need("num_hidden_layers")
    return {key: value for key, value in read.items() if isinstance(value, list) and len(value) == depth > 1}


def _own(read: Reader) -> dict[str, dict[int, Any]]:
    """Fields with entries for some layers, by their numbers: what is otherwise there."""
    found = {}
    for key, value in read.items():
        if key.startswith("per_layer") and isinstance(value, dict) and all(str(n).isdecimal() for n in value):
            found[key] = {int(n): of_layer for n, of_layer in value.items()}
    return found


def _is_dropout(key: str) -> bool:
    return key.endswith(("dropout", "_pdrop"))
