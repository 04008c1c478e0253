"""Which names of a checkpoint hold which tensors of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import nn

__all__ = ["ignored_names", "may_be_absent", "sources", "spellings"]

LEGACY_BUFFERS = (
    r"(^|\.)rotary_emb\.inv_freq$",
    r"(^|\.)position_ids$",
    r"\.(attn|attention|self_attn)\.(masked_)?bias$",
)
"""Buffers that old checkpoints hold and today's models compute."""


def spellings(
    name: str, aliases: Mapping[str, Sequence[str]], base: str, in_files: Callable[[str], str] = str
) -> Iterator[str]:
    """The names under which a checkpoint may hold the model's tensor ``name``, the likeliest first.

    ``in_files`` is how transformers spells a name in files. ``aliases`` maps a module path to other names of it.
    ``base`` is ``model.base_model_prefix``: a checkpoint of the base model lacks it, and so do a base model's own
    names when the checkpoint is of a model with a head.
    """
    forms = [*dict.fromkeys((name, in_files(name)))]
    for path, others in aliases.items():
        if name == path or name.startswith(path + "."):
            forms += [other + name[len(path) :] for other in others]
    yield from forms
    if base:
        for form in forms:
            yield form.removeprefix(base + ".") if form.startswith(base + ".") else f"{base}.{form}"


def sources(
    names: Sequence[str],
    keys: Collection[str],
    taken: Collection[str],
    aliases: Mapping[str, Sequence[str]],
    base: str,
    in_files: Callable[[str], str] = str,
) -> list[str]:
    """Every one of ``keys`` that holds the tensor with these ``names``; several when a tie was stored twice.

    ``taken`` are the names of all tensors of the model: no respelling takes another tensor's own name.
    """
    forms = dict.fromkeys(form for name in names for form in spellings(name, aliases, base, in_files))
    return [form for form in forms if form in keys and (form in names or form not in taken)]


def ignored_names(model: nn.Module, keys: Collection[str]) -> set[str]:
    """Those of ``keys``, which fit nothing in the model, that transformers drops too: computed buffers."""
    listed = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [re.compile(pattern) for pattern in (*LEGACY_BUFFERS, *listed)]
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {key for key in keys if key in buffers or any(pattern.search(key) for pattern in patterns)}


def may_be_absent(model: nn.Module, name: str) -> bool:
    """Whether the model's class says that checkpoints need not hold the tensor ``name``."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
