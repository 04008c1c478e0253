"""Which rules fall on which modules, with modules that are built alike taken together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from dtplan.plan.paths import Segments
from dtplan.plan.spec import Rule

Live = tuple[tuple[Rule, int], ...]
"""Rules that agree with a path so far, each with the number of its segments that are used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Modules of the same build under the same rules; ``module`` is the first of them."""

    pattern: str
    names: tuple[str, ...]
    module: nn.Module
    rules: tuple[Rule, ...]
    tensor_rules: Mapping[str, tuple[Rule, ...]]


def alike_modules(model: nn.Module, rules: Iterable[Rule]) -> list[Alike]:
    """Every module of ``model`` once, in the model's order, alike ones in one entry with their rules."""
    signatures = _Signatures()
    return list(_walk([("", model)], "", tuple((rule, 0) for rule in rules), signatures))


def renamed(
    rules: Iterable[Rule], model: nn.Module, names: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[Rule, ...], dict[str, str]]:
    """``rules`` with the plan's alternative names put in where the model has those, and what was renamed."""
    changed: dict[str, str] = {}
    for canonical, others in names.items():
        if not _has(model, canonical):
            found = next((other for other in others if _has(model, other)), None)
            if found is not None:
                changed[canonical] = found
    return tuple(replace(rule, path=_rename(rule.path, changed)) for rule in rules), changed


def rename_text(name: str, changed: Mapping[str, str]) -> str:
    """A dotted name with the same renaming as ``renamed`` gives to paths."""
    return ".".join(_rename(tuple(name.split(".")), changed))


def _rename(path: Segments, changed: Mapping[str, str]) -> Segments:
    for canonical, found in changed.items():
        head = tuple(canonical.split("."))
        if path[: len(head)] == head:
            return (() if found == "." else tuple(found.split("."))) + path[len(head) :]
    return path


def _has(model: nn.Module, name: str) -> bool:
    if name == ".":
        return True
    for segment in name.split("."):
        child = model._modules.get(segment)
        if child is None:
            return False
        model = child
    return True


class _Signatures:
    """A number for each build of module: equal numbers mean equal classes, tensors and children, all the way down."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._of: dict[int, int] = {}

    def __call__(self, module: nn.Module) -> int:
        if id(module) not in self._of:
            tensors = [*module._parameters.items(), *module._buffers.items()]
            build = (
                type(module),
                tuple((n, t.shape, t.dtype, t.requires_grad) if t is not None else (n, None) for n, t in tensors),
                tuple((n, self(child)) for n, child in module._modules.items() if child is not None),
            )
            self._of[id(module)] = self._numbers.setdefault(build, len(self._numbers))
        return self._of[id(module)]


def _walk(instances: list[tuple[str, nn.Module]], pattern: str, live: Live, signatures: _Signatures) -> Iterator[Alike]:
    module = instances[0][1]
    tensors = [n for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None]
    yield Alike(
        pattern=pattern,
        names=tuple(name for name, _ in instances),
        module=module,
        rules=tuple(rule for rule, used in live if used == len(rule.path)),
        tensor_rules={name: tuple(rule for rule, used in live if rule.path[used:] == (name,)) for name in tensors},
    )
    buckets: dict[object, list[str]] = {}
    lives: dict[str, Live] = {}
    for name, child in module._modules.items():
        if child is not None:
            lives[name] = _advance(live, name)
            together = (signatures(child), lives[name]) if name.isdecimal() else name
            buckets.setdefault(together, []).append(name)
    digits = [name for name in lives if name.isdecimal()]
    for names in buckets.values():
        children = [
            (f"{prefix}.{name}" if prefix else name, parent._modules[name])
            for prefix, parent in instances
            for name in names
        ]
        segment = names[0] if not names[0].isdecimal() else _spell(names, digits)
        below = f"{pattern}.{segment}" if pattern else segment
        yield from _walk(children, below, lives[names[0]], signatures)  # type: ignore[arg-type]


def _advance(live: Live, name: str) -> Live:
    ahead = [(rule, used + 1) for rule, used in live if used < len(rule.path) and rule.path[used] in ("*", name)]
    return (*ahead, *((rule, used) for rule, used in live if rule.below and used == len(rule.path)))


def _spell(names: list[str], all_names: list[str]) -> str:
    """``*`` for all items of a list, ranges for some: ``{0,2..5}``."""
    if names == all_names and len(names) > 1:
        return "*"
    numbers = [int(name) for name in names]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spelled = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return spelled[0] if len(numbers) == 1 else "{" + ",".join(spelled) + "}"
