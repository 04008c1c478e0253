"""One assertion for users' tests: the sharded model gives the numbers of the unsharded one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from dtplan._errors import ApplyError
from dtplan.plan.spec import Plan
from dtplan.planner.bind import find_plan
from dtplan.prove.live import randomized
from dtplan.prove.pool import GlooPool, Kept
from dtplan.prove.proof import prove_model
from dtplan.prove.result import Leg, Proof
from dtplan.prove.tell import as_text

Switch = bool | Literal["both"]


def assert_plan_equivalent(
    model_fn: Callable[[], nn.Module],
    plan: str | Path | Plan = "auto",
    *,
    tp: int | Sequence[int] = 2,
    shard: int = 1,
    replicate: int = 1,
    sequence_parallel: Switch = "both",
    loss_parallel: Switch = False,
    batch: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    steps: int = 0,
    pool: GlooPool | Kept | None = None,
) -> Proof:
    """Compare a model with its sharded self on every rank: logits, loss, every gradient, in float64, to 1e-12.

    Args:
        model_fn: builds the model; it is taken in float64 and evaluation mode (no dropout) with random parameters. Its
            forward takes ``batch`` without labels as keywords and returns logits, or an object with ``logits``.
        plan: a plan file, a Plan, a built-in's name, or ``"auto"``.
        tp: degrees, each compared by itself; with ``shard`` and ``replicate`` ranks of FSDP2 around it.
        shard: ranks over which FSDP2 cuts parameters.
        replicate: copies of that.
        sequence_parallel: the switch, or ``"both"`` settings; of a plan whose stream stays whole, off.
        loss_parallel: the switch, or ``"both"`` settings.
        batch: ``input_ids`` and ``labels`` [rows, sequence], or other inputs; None: random tokens below the
            ``vocab_size`` of the model's config. Sequence parallelism wants a length that ``tp`` divides.
        seed: of parameters and tokens.
        steps: of AdamW with clipping, after which parameters are compared as well.
        pool: run on its gloo processes; None: on simulated ranks, threads of this process.

    Returns:
        What was compared, leg by leg.

    Raises:
        AssertionError: with the diagnosis that ``dtplan prove`` gives, also where nothing could be run.
        CannotProveError: the unsharded model does not run.
        PlanError: the plan file is wrong, or the plan serves another class.
    """
    model = randomized(model_fn().double().eval(), seed)
    given = [tp] if isinstance(tp, int) else list(tp)
    if not given:
        raise ApplyError("assert_plan_equivalent was given no degree: tp is empty, so nothing would be compared")
    found = find_plan(model, plan, tp=max(given))
    if sequence_parallel == "both" and not found.cuts_stream:
        sequence_parallel = False
    legs = [
        Leg(
            tp=degree,
            shard=shard,
            replicate=replicate,
            sequence_parallel=sp,
            loss_parallel=lp,
            world="simulated ranks" if pool is None else "gloo processes",
        )
        for degree in given
        for sp in _settings(sequence_parallel)
        for lp in _settings(loss_parallel)
    ]
    name = getattr(model_fn, "__qualname__", repr(model_fn))
    proof = prove_model(
        lambda: model,
        found,
        given=plan.name if isinstance(plan, Plan) else str(plan),
        model=f"{name}()",
        legs=legs,
        seed=seed,
        batch=batch,
        steps=steps,
        pool=pool,
    )
    if proof.verdict != "proved":
        options = f"tp={tp}, shard={shard}, replicate={replicate}, sequence_parallel={sequence_parallel!r}, "
        options += f"loss_parallel={loss_parallel!r}, seed={seed}, steps={steps}"
        raise AssertionError("\n" + as_text(proof, f"assert_plan_equivalent({name}, {proof.plan!r}, {options})"))
    return proof


def _settings(switch: Switch) -> tuple[bool, ...]:
    return (False, True) if switch == "both" else (switch,)
