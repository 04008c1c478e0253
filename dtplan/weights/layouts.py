"""How transformers lays a model out in files: other names for some tensors, and experts one by one.

Private transformers API used here and nowhere else in this package, tried on 5.17 and 5.24: its ``conversion_mapping``
and ``core_model_loading``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtplan._errors import WeightsError
from dtplan.weights.blocks import Block

__all__ = ["FileLayout", "Piece", "class_name", "file_layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor of a file that is part of one of the model's: of entry ``index``, the rows ``[start, start + size)``."""

    name: str
    index: int
    start: int
    size: int

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Its shape, when the model's tensor has the shape ``whole``: [entries, rows, ...]."""
        return (self.size, *whole[2:])

    def of(self, block: Block) -> Block | None:
        """What of it lies in a ``block`` of the model's tensor."""
        entries, rows, *others = block.slices
        first, last = max(rows.start, self.start), min(rows.stop, self.start + self.size)
        if not entries.start <= self.index < entries.stop or first >= last:
            return None
        return Block(
            source=self.name,
            shape=self.shape(block.shape),
            slices=(slice(first - self.start, last - self.start), *others),
            local=block.local[self.index - entries.start, first - rows.start : last - rows.start],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """The names of a model's tensors in files, and those that are taken apart there."""

    renamed: Callable[[str], str] = str
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The end of a name, and the ends of the names of its parts, with ``*`` for the number of the entry."""
    reordered: tuple[str, ...] = ()
    """Ends of names that are the same in files and in the model, where the values are in another order."""

    def checked(self) -> FileLayout:
        """Itself. Raises WeightsError when names do not tell in which order a file's values are."""
        if self.reordered:
            raise WeightsError(
                f"transformers changes the values of {', '.join(self.reordered)} on the way from and to files, under "
                "the same name, so that a file does not tell which order it has: load with from_pretrained and give "
                "dtplan.load the state_dict(); keep what is trained with dtplan.TrainingCheckpoints"
            )
        return self

    def pieces(self, name: str, shape: Sequence[int]) -> list[Piece]:
        """What the model's tensor ``name`` of ``shape`` is in files; nothing when it is one tensor there."""
        for end, parts in self.joined:
            if name.endswith(end) and len(shape) >= 2 and shape[1] % len(parts) == 0:
                stem, size = name.removesuffix(end), shape[1] // len(parts)
                return [
                    Piece(
                        name=self.renamed(stem + part.replace("*", str(index))),
                        index=index,
                        start=number * size,
                        size=size,
                    )
                    for index in range(shape[0])
                    for number, part in enumerate(parts)
                ]
        return []


def class_name(model: nn.Module) -> str:
    """The name of the model's class; FSDP2 puts a class of its own in front of it."""
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def file_layout(model: nn.Module) -> FileLayout:
    """What transformers does to the model's tensors on the way to files.

    Known are new names, such as ``embed_out`` for the head of GPT-NeoX, and stacked experts. A model to whose tensors
    it does other things keeps its own names and tensors: those load as well.
    """
    if "transformers" not in sys.modules:
        return FileLayout()
    from transformers import PreTrainedModel, conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    if not isinstance(model, PreTrainedModel):
        return FileLayout()
    with _classes_as_built(model):
        found = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    # transformers, too, writes no prefix back that it may have dropped.
    found = [one for one in found if not isinstance(one, PrefixChange)]
    if reordered := [name for one in found if isinstance(one, WeightConverter) for name in _reordered(one)]:
        return FileLayout(reordered=tuple(reordered))
    names = [one for one in found if type(one) is WeightRenaming]
    stacks = [one for one in found if type(one) is WeightConverter and _stacks(one)]
    if len(names) + len(stacks) < len(found):
        return FileLayout()
    back: Any = [one.reverse_transform() for one in reversed(names)]
    return FileLayout(
        renamed=lambda name: _renamed(name, back),
        joined=tuple((one.target_patterns[0], tuple(one.source_patterns)) for one in stacks),
    )


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for one in renamings:
        name, _ = one.rename_source_key(name)
    return name


@contextmanager
def _classes_as_built(model: nn.Module) -> Iterator[None]:
    """Transformers finds a model's conversions by the name of its class, and FSDP2 puts its own in front of that."""
    wrapped: dict[nn.Module, Any] = {m: type(m) for m in model.modules() if isinstance(m, FSDPModule)}
    for module, kind in wrapped.items():
        module.__class__ = next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))
    try:
        yield
    finally:
        for module, kind in wrapped.items():
            module.__class__ = kind


def _reordered(converter: Any) -> set[str]:
    """The names that it reads and writes, unless shapes tell whether it has done its work."""
    if all(getattr(step, "check_dims", False) for step in converter.operations):
        return set()
    read, written = (
        {one.replace("\\", "") for one in side} for side in (converter.source_patterns, converter.target_patterns)
    )
    return read & written


def _stacks(converter: Any) -> bool:
    """Whether entries become one tensor, each put together from the parts along its rows."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    parts = converter.source_patterns
    return (
        steps == [("MergeModulelist", 0)] + [("Concatenate", 1)] * (len(parts) > 1)
        and len(converter.target_patterns) == 1
        and all(part.count("*") == 1 and part.replace(".", "").replace("*", "").isidentifier() for part in parts)
    )
