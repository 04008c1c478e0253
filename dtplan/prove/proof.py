"""Prove a plan: the sharded model beside the unsharded one, in float64, on every rank of every leg."""

from __future__ import annotations

import copy
import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dtplan import __version__
from dtplan._errors import ApplyError, BindError
from dtplan.plan.spec import Plan
from dtplan.planner.bind import find_plan
from dtplan.planner.meta import meta_model
from dtplan.prove.diagnose import diagnose
from dtplan.prove.edits import Edit
from dtplan.prove.live import live_model, refuse_unfit, token_batch
from dtplan.prove.oracle import BOUND, Outcome, outcome
from dtplan.prove.pool import GlooPool, Kept
from dtplan.prove.ranks import STEPPED, STEPS, Job, bound_plan, errors_on_rank, train
from dtplan.prove.repair import Repairs
from dtplan.prove.result import MEASURE, Finding, Leg, LegResult, Proof, Smallest
from dtplan.prove.shrink import CannotProveError, Choice, differences, rebuilt, shrink
from dtplan.prove.simulated import simulated_ranks
from dtplan.prove.smallest import SECONDS, Small, smallest
from dtplan.prove.walk import Walk

Switch = Literal["off", "on", "both"]
Ranks = GlooPool | Kept
OnLeg = Callable[[LegResult | None, int], None]
OnRepair = Callable[[tuple[Edit, ...]], None]
_ROWS = 4
_LENGTH = 16
_ZERO = 1e-13
"""A gradient this much smaller than the largest of the model is rounding about zero (a key's bias has such)."""


def prove(
    plan: str | Path | Plan,
    model: str,
    *,
    tp: Sequence[int] = (2,),
    sequence_parallel: Switch = "both",
    loss_parallel: Switch = "both",
    fsdp: bool = False,
    seed: int = 0,
    sizes: Mapping[str, Any] | None = None,
    batch: tuple[int, int] | None = None,
    shrink_failure: bool = True,
    on_leg: OnLeg = lambda _result, _legs: None,
    on_repair: OnRepair = lambda _edits: None,
) -> Proof:
    """Compare the sharded with the unsharded model at every degree of ``tp``; see ``docs/prove.md``.

    Args:
        plan: a built-in's name, a file, a Plan, or ``"auto"``.
        model: a model folder, a config.json, or a name that transformers knows; its weights are not read.
        tp: degrees (ranks).
        sequence_parallel: which settings of the switch; "both" is "off" for a plan whose stream stays whole.
        loss_parallel: which settings of that switch, each with all of the other.
        fsdp: also wrap with FSDP2, over `shard` and over `replicate` x `shard`.
        seed: of weights and tokens.
        sizes: fields of the config, to be set after it was shrunken.
        batch: rows and tokens of each; 4 x 16 or a few more.
        shrink_failure: look for the smallest config on which a refuted plan still fails, which takes a few seconds.
        on_leg: called with None and the number of legs, then with every leg's result.
        on_repair: called with edits of the plan that were run on a refuted leg, and with which it was proved.

    Raises:
        CannotProveError: the proof cannot be run: torch is too old, or the model needs other inputs than tokens.
        PlanError, BindError: the plan is wrong, or serves another class.
    """
    real = meta_model(model)
    found = find_plan(real, plan, tp=max(tp))
    if sequence_parallel == "both" and not found.cuts_stream:
        sequence_parallel = "off"
    config, choices = shrink(real.config, tp, type(real))
    if sizes:
        config = rebuilt(config, sizes)
        choices = tuple(differences(real.config, config, {choice.field.split(".")[0] for choice in choices} | {*sizes}))
    refuse_unfit(type(real), config)
    tokens = None if batch is None else token_batch(config, rows=batch[0], length=batch[1], seed=seed)
    proof = prove_model(
        lambda: live_model(type(real), config, seed),
        found,
        given=plan.name if isinstance(plan, Plan) else str(plan),
        model=model,
        legs=legs_of(tp, sequence_parallel, loss_parallel, fsdp=fsdp),
        seed=seed,
        choices=choices,
        batch=tokens,
        on_leg=on_leg,
        on_repair=on_repair,
    )
    if sizes or batch or not shrink_failure:
        return proof
    return dataclasses.replace(proof, smallest=_smallest(proof, found, real))


def _smallest(proof: Proof, plan: Plan, real: nn.Module) -> Smallest | None:
    """A small form of the first refuted leg; None where binding refuses the plan, which runs nothing."""
    failed = next((result for result in proof.legs if result.verdict == "refuted"), None)
    if failed is None or not failed.findings or failed.findings[0].what == "plan":
        return None
    leg = dataclasses.replace(failed.leg, world="simulated ranks")
    start, _ = shrink(real.config, [leg.tp], type(real))
    small = small_failure(type(real), start, plan, leg, failed.findings[0], batch=proof.batch, seed=proof.seed)
    if small is None:
        return None
    used = rebuilt(start, small.changes)
    return Smallest(
        leg=leg,
        batch=small.batch,
        sizes=small.changes,
        choices=tuple(differences(real.config, used, used.to_dict())),
        finding=small.finding,
        replay=proof.replay_of(leg, small.batch, small.changes),
    )


def small_failure(
    cls: type[nn.Module],
    start: Any,
    plan: Plan,
    leg: Leg,
    failed: Finding,
    *,
    batch: tuple[int, int],
    seed: int,
    seconds: float = SECONDS,
) -> Small | None:
    """From the config ``start`` on, the smallest found within ``seconds`` on which ``plan`` fails as ``failed`` did."""

    def fails(config: Any, size: tuple[int, int]) -> Finding | None:
        tokens = token_batch(config, rows=size[0], length=size[1], seed=seed)
        try:
            job, walk = job_of(live_model(cls, config, seed), plan, leg, [leg], seed=seed, batch=tokens)
            causes = diagnose(job, bound_plan(job), walk)
        except (CannotProveError, BindError):
            return None
        return causes[0].finding if causes else None

    return smallest(start, batch, leg.shard * leg.replicate, leg.tp, failed, fails, seconds=seconds)


def legs_of(
    tp: Sequence[int], sequence_parallel: Switch = "both", loss_parallel: Switch = "both", *, fsdp: bool = False
) -> tuple[Leg, ...]:
    """Every leg, small worlds first: each degree with each switch, then FSDP2 around it."""
    settings = {"off": (False,), "on": (True,), "both": (False, True)}
    switches = settings[sequence_parallel]
    legs = [
        Leg(tp=d, sequence_parallel=sp, loss_parallel=lp)
        for d in sorted(set(tp))
        for sp in switches
        for lp in settings[loss_parallel]
    ]
    for d in sorted(set(tp)) if fsdp else ():
        legs += [Leg(tp=d, shard=2, sequence_parallel=sp) for sp in switches]
        legs += [Leg(tp=d, shard=2, replicate=2, sequence_parallel=sp) for sp in switches[-1:]]
    if fsdp:
        legs.append(Leg(tp=min(tp), shard=2, sequence_parallel=switches[-1], world="gloo processes"))
    return tuple(legs)


def prove_model(
    make: Callable[[], nn.Module],
    plan: Plan,
    *,
    given: str,
    model: str,
    legs: Sequence[Leg],
    seed: int = 0,
    choices: tuple[Choice, ...] = (),
    batch: Mapping[str, Tensor] | None = None,
    steps: int = STEPS,
    explain: bool = True,
    pool: Ranks | None = None,
    on_leg: OnLeg = lambda _result, _legs: None,
    on_repair: OnRepair = lambda _edits: None,
) -> Proof:
    """The legs of a model that ``make`` builds: float64, live, every parameter random.

    ``batch``: instead of random tokens; its rows are divided among data-parallel ranks. Without ``explain`` a refuted
    leg is not run again to say why. ``pool``: for legs on gloo processes, instead of a new one.
    """
    job, walk = job_of(make(), plan, legs[0], legs, seed=seed, batch=batch, steps=steps)
    on_leg(None, len(legs))
    results, repairs = [], Repairs(walk) if explain else None
    for leg in legs:
        results.append(_run(dataclasses.replace(job, leg=leg), repairs, pool))
        on_leg(results[-1], len(legs))
    for repair in dict.fromkeys(repairs.proved if repairs else ()):
        on_repair(repair)
    rows, length = next(iter(job.batch.values())).shape[:2]
    return Proof(
        plan=given,
        digest=plan.digest,
        model=model,
        architecture=type(job.model).__name__,
        seed=seed,
        bound=BOUND,
        batch=(rows, length),
        versions=_versions(),
        choices=choices,
        legs=tuple(results),
        zero_gradients=tuple(sorted(job.zero)),
        measure=MEASURE + (", and every parameter after the steps" if steps else ""),
        idle=tuple(name for name, _ in job.model.named_parameters() if name not in job.truth.grads),
    )


def job_of(
    model: nn.Module,
    plan: Plan,
    leg: Leg,
    legs: Sequence[Leg],
    *,
    seed: int,
    batch: Mapping[str, Tensor] | None = None,
    steps: int = STEPS,
) -> tuple[Job, Walk]:
    """What ranks of ``leg`` need to know, the truth included; the batch is the same for all ``legs``."""
    if batch is None:
        batch = token_batch(model.config, rows=_ROWS, length=_length(leg.tp for leg in legs), seed=seed)
    walk, truth, stepped = _unsharded_run(model, batch, steps)
    largest = max(grad.abs().max().item() for grad in truth.grads.values())
    zero = frozenset(name for name, grad in truth.grads.items() if grad.abs().max().item() <= _ZERO * largest)
    told = Job(model=model, batch=batch, plan=plan, leg=leg, truth=truth, stepped=stepped, zero=zero, steps=steps)
    return told, walk


def _length(degrees: Iterable[int]) -> int:
    """Tokens of a sequence: a multiple of every degree, so that sequence parallelism can cut it."""
    step = math.lcm(*degrees)
    return step * math.ceil(_LENGTH / step)


def _unsharded_run(
    model: nn.Module, batch: Mapping[str, Tensor], steps: int
) -> tuple[Walk, Outcome, dict[str, Tensor]]:
    """The truth: what every module gave, the outcome of one step, the parameters after all steps."""
    walk, reference = Walk(), copy.deepcopy(model)
    try:
        with walk.of(reference):
            truth = outcome(reference, batch)
    except Exception as error:
        raise CannotProveError(
            f"the unsharded {type(model).__name__} does not run on token ids alone, once shrunken "
            f"({type(error).__name__}: {_line(error)}): nothing is said about the plan"
        ) from error
    truth = Outcome(truth.logits, truth.loss, {name: grad.clone() for name, grad in truth.grads.items()})
    train(reference, batch, clip=nn.utils.clip_grad_norm_, steps=steps)
    return walk, truth, {name: p.detach() for name, p in reference.named_parameters()}


def _run(job: Job, repairs: Repairs | None, pool: Ranks | None = None) -> LegResult:
    """One leg: bound, run on its world, and diagnosed where it fails."""
    start = time.perf_counter()
    try:
        told = _compared(job, repairs, pool)
    except BindError as error:
        told = LegResult(leg=job.leg, verdict="refuted", findings=refusals(error))
    return dataclasses.replace(told, seconds=round(time.perf_counter() - start, 3))


def _compared(job: Job, repairs: Repairs | None, pool: Ranks | None) -> LegResult:
    leg, bound = job.leg, bound_plan(job)
    try:
        ranks = _on_its_world(job, pool)
    except Exception as error:  # noqa: BLE001 - what a model raises under a wrong plan is a finding
        pool_failed = leg.world == "gloo processes" and isinstance(error, ApplyError)
        if pool_failed or "were not all done" in str(error):  # slow, or a matter of the machine
            return LegResult(leg=leg, verdict="not run", reason=str(error))
        return LegResult(leg=leg, verdict="refuted", findings=repairs.findings(job, bound, error) if repairs else ())
    names = dict.fromkeys(name for found in ranks for name in found)
    worst = {name: max(found.get(name, 0.0) for found in ranks) for name in names}
    wrong = {name: error for name, error in worst.items() if not error <= BOUND}
    largest = max(worst, key=lambda name: worst[name])
    return LegResult(
        leg=leg,
        verdict="refuted" if wrong else "proved",
        tensors=len(worst),
        steps=job.steps if any(name.startswith(STEPPED) for name in worst) else 0,
        largest_error=worst[largest],
        largest_at=largest,
        wrong=wrong,
        findings=repairs.findings(job, bound) if wrong and repairs else (),
    )


def _on_its_world(job: Job, pool: Ranks | None) -> list[dict[str, float]]:
    if job.leg.world == "gloo processes":
        if isinstance(pool, GlooPool):
            return pool.run(errors_on_rank, job, ranks=job.leg.ranks)
        if pool is not None:
            return pool.run(errors_on_rank, job)
        with GlooPool(job.leg.ranks, preload=(type(job.model).__module__,), timeout_s=300) as own:
            return own.run(errors_on_rank, job)
    return simulated_ranks(job.leg.ranks, errors_on_rank, job)


def refusals(error: BindError) -> tuple[Finding, ...]:
    """What binding said, as findings."""
    return tuple(
        Finding(
            name=found.code,
            what="plan",
            kind="refused by bind",
            says=found.message,
            rule=found.where,
            advice=found.hint,
        )
        for found in error.diagnostics
    )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _versions() -> dict[str, str]:
    import transformers

    return {
        "dtplan": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
