"""Mutants of plans: every way in which one rule goes wrong by a word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from dtplan.plan.read import holds
from dtplan.plan.spec import LOGITS, RESIDUAL, Move, P, Plan, R, Rule, Section

KEEP = Move()
Mutant = tuple[str, tuple[Rule, ...]]
"""What is wrong, and the rules that stand for the one that was changed."""


def mutants_of(rule: Rule, units: dict[str, int]) -> Iterator[Mutant]:
    """The mutants of one rule; ``units`` are the plan's, with their counts."""
    yield "dropped", ()
    yield from _styles(rule)
    yield from _fused(rule, units)
    yield from _gradients(rule)
    yield from _inputs(rule)
    yield from _outputs(rule)
    yield from _parameters(rule)


def _changed(rule: Rule, **fields: Any) -> tuple[Rule, ...]:
    return (dataclasses.replace(rule, **fields),)


def _styles(rule: Rule) -> Iterator[Mutant]:
    whole = {"style": "replicate", "unit": None, "sections": (), "inputs": (), "outputs": (), "localize": ()}
    if rule.style == "colwise":
        yield "rowwise", _changed(rule, style="rowwise", inputs=(), outputs=())
        yield "input kept", _changed(rule, inputs=((0, KEEP),))
    if rule.style == "rowwise":
        yield "colwise", _changed(rule, style="colwise", inputs=(), outputs=())
        yield "bias on every rank", _bias_on_every_rank(rule)
    if rule.style in ("colwise", "rowwise", "vocab"):
        yield "whole", _changed(rule, **whole, grad="complete")
        yield "whole, gradient summed", _changed(rule, **whole, grad="sum")
    if rule.style in ("rowwise", "vocab"):
        yield "sum left undone", _changed(rule, outputs=((None, Move(dst=P)),))
    if rule.style == "sharded_norm":
        at: dict[str, Any] = {"at": rule.at, "unit": rule.unit}
        yield "norm of the rank's part", (Rule(path=(*rule.path, "weight"), shard=0, **at),)
        yield "whole, gradient summed", _changed(rule, **whole, grad="sum")
    if rule.localize:
        yield "sizes of the whole", _changed(rule, localize=())
    if rule.reads:
        yield "what is read not local", _changed(rule, reads=())
    if rule.like:
        yield "taken for its base", _changed(rule, like=None)


def _bias_on_every_rank(rule: Rule) -> tuple[Rule, ...]:
    """The cut spelled out for the weight; the bias is added before the sum."""
    output = rule.outputs or ((None, Move(dst=RESIDUAL)),)
    at = {"at": rule.at}
    return (
        Rule(path=rule.path, outputs=output, grad="complete", **at),  # type: ignore[arg-type]
        Rule(path=(*rule.path, "weight"), shard=1, unit=rule.unit, **at),  # type: ignore[arg-type]
        Rule(path=(*rule.path, "bias"), grad="complete", **at),  # type: ignore[arg-type]
    )


def _fused(rule: Rule, units: dict[str, int]) -> Iterator[Mutant]:
    """Parts in another order, or taken for one; and one taken for parts, where it is attention's q, k and v."""
    names = [section.unit for section in rule.sections]
    if names:
        least = min((name for name in names if name), key=lambda name: units[name])
        yield "parts in one piece", _changed(rule, sections=(), unit=least)
        yield "a part forgotten", _changed(rule, sections=rule.sections[:-1])
        if len(set(names)) > 1:
            yield "parts in another order", _changed(rule, sections=rule.sections[::-1])
        if any(section.whole for section in rule.sections):
            parts = (dataclasses.replace(s, grad="complete" if s.whole else None) for s in rule.sections)
            yield "a part's gradient complete", _changed(rule, sections=tuple(parts))
    elif rule.unit == "head" and any(word in rule.path[-1] for word in ("qkv", "query_key_value", "c_attn")):
        yield "one piece in three parts", _changed(rule, unit=None, sections=(Section(unit="head"),) * 3)


def _gradients(rule: Rule) -> Iterator[Mutant]:
    if rule.style == "norm" or rule.grad == "sum":
        yield "gradient complete", _changed(rule, grad="complete")
    if rule.style == "norm" and rule.grad != "sum":
        yield "gradient summed", _changed(rule, grad="sum")


def _inputs(rule: Rule) -> Iterator[Mutant]:
    if rule.parallel_residual:
        yield "residual on every rank", _changed(rule, parallel_residual=None)
    for i, (value, move) in enumerate(rule.inputs):

        def other(new: Move, i: int = i, value: str | int = value) -> tuple[Rule, ...]:
            return _changed(rule, inputs=(*rule.inputs[:i], (value, new), *rule.inputs[i + 1 :]))

        which = f" {value}" if len(rule.inputs) > 1 else ""
        if move.dst == R:
            yield f"input{which} kept", other(KEEP)
        if move.dst == RESIDUAL:
            yield f"input{which} whole", other(dataclasses.replace(move, dst=R))
        if move.unit:
            yield f"input{which} in one piece", other(dataclasses.replace(move, unit=None))


def _outputs(rule: Rule) -> Iterator[Mutant]:
    for position, move in rule.outputs:
        if move.dst in (RESIDUAL, P):
            yield "output whole", _changed(rule, outputs=((position, dataclasses.replace(move, dst=R)),))
        if move.dst == R:
            yield "output left a sum", _changed(rule, outputs=((position, dataclasses.replace(move, dst=P)),))
        if move.dst == LOGITS:
            yield "logits left cut", _changed(rule, outputs=((position, KEEP),))
        if move.sum_grad_of_last:
            yield "the last part's gradient not summed", _changed(rule, outputs=())
        if move.global_shape:
            shown = dataclasses.replace(move, global_shape=False)
            yield "local shape shown", _changed(rule, outputs=((position, shown),))


def _parameters(rule: Rule) -> Iterator[Mutant]:
    if rule.shard is not None:
        yield "cut along another dim", _changed(rule, shard=rule.shard + 1 if rule.shard < 1 else rule.shard - 1)
        yield "whole", _changed(rule, shard=None, unit=None, sections=(), grad="sum")
    if rule.once:
        yield "on every rank", _changed(rule, once=False, grad="complete")


def mutants(
    plan: Plan, config: Any, units: dict[str, int], wanted: Callable[[Rule], bool]
) -> Iterator[tuple[str, Plan]]:
    """Every plan that differs from ``plan`` by one mutant of one wanted rule that is in force."""
    for i, rule in enumerate(plan.rules):
        if wanted(rule):
            for label, new in mutants_of(rule, units):
                rules = (*plan.rules[:i], *new, *plan.rules[i + 1 :])
                yield f"{rule.pattern}: {label}", dataclasses.replace(plan, rules=rules)
    for v, variant in enumerate(plan.variants):
        if not holds(variant.when, config):
            continue
        for i, rule in enumerate(variant.rules):
            for label, new in mutants_of(rule, units):
                rules = (*variant.rules[:i], *new, *variant.rules[i + 1 :])
                variants = list(plan.variants)
                variants[v] = dataclasses.replace(variant, rules=rules)
                yield f"{rule.pattern}: {label}", dataclasses.replace(plan, variants=tuple(variants))
