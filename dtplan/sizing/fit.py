"""Which degrees fit: every legal (tp, shard, replicate) of some GPUs, with and without what saves memory."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from dtplan._errors import BindError, DtplanError
from dtplan.plan.spec import Plan
from dtplan.planner.bind import bind, find_plan
from dtplan.planner.bound import BoundPlan
from dtplan.planner.ledger import Ledger, ledger
from dtplan.planner.memory import Held, Optimizer, Precision, whole_modules
from dtplan.sizing.gpus import Gpu
from dtplan.sizing.peak import Peak, peak
from dtplan.sizing.roofline import Estimate, estimate
from dtplan.sizing.schedule import Links
from dtplan.sizing.traced import Cut, Traced, cut_model, traced_step
from dtplan.te.choose import choose
from dtplan.te.precision import ROWS
from dtplan.te.rebind import rebound

Layers = Literal["torch", "te", "fp8"]
"""The model's own layers, TransformerEngine's, or those in FP8."""


class FitError(DtplanError, ValueError):
    """What was asked for cannot be laid out; the text says what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """What saves memory or time: sequence parallelism, checkpointing (a second forward), TransformerEngine's layers."""

    sequence_parallel: bool = False
    checkpointing: bool = False
    layers: Layers = "torch"

    def __str__(self) -> str:
        words = ["SP"] * self.sequence_parallel + ["CKPT"] * self.checkpointing
        return "+".join(words) or "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be trained, and on what."""

    gpus: int
    memory: int
    """Bytes of one GPU."""
    gpu: Gpu
    sequence: int
    batch: int
    """Sequences of a step over all GPUs."""
    micro: int = 1
    """Sequences that a rank computes at once; the others of its share follow, and gradients are added up."""
    reserve: int = 6 << 30
    """Bytes that are left to CUDA, NCCL and fragmentation."""
    per_host: int = 8
    optimizer: Optimizer = "adamw"
    precision: Precision = field(default_factory=Precision)
    loss_parallel: bool = True
    sequence_parallel: bool | None = None
    """None: both are tried."""
    checkpointing: bool | None = None
    layers: Layers = "torch"
    compiled: bool = False
    """Whether `dtplan.compile_model` follows."""
    tp: int | None = None
    """None: all degrees that divide the GPUs, within a host if any of them fits."""

    @property
    def usable(self) -> int:
        """Bytes that a step may take."""
        return self.memory - self.reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A layout with some switches."""

    switches: Switches
    peak: Peak
    estimate: Estimate
    book: Ledger
    traced: Traced
    bound: BoundPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A legal layout, what each rank holds between steps, and its variants, the cheapest in time first."""

    tp: int
    shard: int
    replicate: int
    times: int
    """Forward and backward in a step, each of ``Ask.micro`` sequences."""
    held: Held
    variants: tuple[Variant, ...]

    def fitting(self, usable: int) -> list[Variant]:
        """The variants that fit."""
        return [variant for variant in self.variants if variant.peak.total <= usable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """All rows, what was refused and why, and the choice."""

    ask: Ask
    architecture: str
    plan: str
    parameters: int
    """Numbers, not bytes."""
    rows: tuple[Row, ...]
    refused: dict[int, str]
    """tp degree -> why not."""
    others: tuple[Variant, ...] = ()
    """The chosen layout (the nearest, if none fits) with all switches, and with TransformerEngine's layers."""

    @property
    def _fits(self) -> list[tuple[Row, Variant]]:
        return [(row, variant) for row in self.rows for variant in row.fitting(self.ask.usable)]

    @property
    def smallest(self) -> tuple[Row, Variant] | None:
        """At the smallest tp degree that fits, the layout with the shortest estimate."""
        return min(self._fits, key=lambda fit: (fit[0].tp, fit[1].estimate.seconds), default=None)

    @property
    def fastest(self) -> tuple[Row, Variant] | None:
        """The shortest estimate of all that fit."""
        return min(self._fits, key=lambda fit: fit[1].estimate.seconds, default=None)

    @property
    def nearest(self) -> tuple[Row, Variant]:
        """What needs the least memory."""
        return min(((r, v) for r in self.rows for v in r.variants), key=lambda fit: fit[1].peak.total)


def fit(model: nn.Module, plan: str | Path | Plan, ask: Ask, *, on_tp: Callable[[int], None] = lambda _: None) -> Fit:
    """Lay ``model`` (on the meta device) out on the GPUs in every legal way.

    Raises:
        FitError: no layout divides the batch, or no tp degree is legal; the text says which would do.
        TraceError: the model's step cannot be followed.
    """
    model = model.to(getattr(torch, ask.precision.parameters))
    rows: list[Row] = []
    refused: dict[int, str] = {}
    laid: dict[int, _Tp] = {}
    for tp in _degrees(ask):
        if why := _indivisible(ask, tp):
            refused[tp] = why
        elif tp > ask.per_host and ask.tp is None and any(row.fitting(ask.usable) for row in rows):
            refused[tp] = f"reaches over hosts of {ask.per_host}, and smaller degrees fit"
        else:
            on_tp(tp)
            laid[tp] = _Tp(model, plan, ask, tp)
            try:
                rows += laid[tp].rows()
            except BindError as error:
                refused[tp] = _first(error)
    if not rows:
        raise FitError(_no_layout(ask, refused))
    found = Fit(
        ask=ask,
        architecture=type(model).__name__,
        plan=find_plan(model, plan, tp=rows[0].tp).name,
        parameters=sum(p.numel() for p in model.parameters()),
        rows=tuple(rows),
        refused=refused,
    )
    row, _ = found.smallest or found.nearest
    return dataclasses.replace(found, others=tuple(laid[row.tp].others(row)))


class _Tp:
    """All layouts of one tp degree; a rank's step is the same for all of them."""

    def __init__(self, model: nn.Module, plan: str | Path | Plan, ask: Ask, tp: int) -> None:
        self.model, self.plan, self.ask, self.tp = model, plan, ask, tp
        self.ranks = ask.gpus // tp
        self.times = ask.batch // self.ranks // ask.micro
        self._cut: Cut | None = None
        self._bound: dict[tuple[bool, Layers], BoundPlan] = {}
        self._traced: dict[Switches, Traced] = {}

    @functools.cached_property
    def streams(self) -> tuple[bool, ...]:
        """The settings of sequence parallelism that are possible."""
        even = self.tp > 1 and self.ask.sequence % self.tp == 0
        return (False, True) if even and find_plan(self.model, self.plan).cuts_stream else (False,)

    def rows(self) -> Iterator[Row]:
        """The rows, replicas last."""
        for replicate in (d for d in range(1, self.ranks + 1) if self.ranks % d == 0):
            shard = self.ranks // replicate
            variants = [self._variant(shard, replicate, switches) for switches in self._switches()]
            yield Row(
                tp=self.tp,
                shard=shard,
                replicate=replicate,
                times=self.times,
                held=variants[0].peak.held,
                variants=tuple(sorted(variants, key=lambda v: v.estimate.seconds)),
            )

    def others(self, row: Row) -> Iterator[Variant]:
        """A layout with everything that can be switched; TransformerEngine's layers where it has any."""
        for layers in self._kinds():
            for checkpointing in (False, True):
                for sequence_parallel in self.streams:
                    switches = Switches(sequence_parallel=sequence_parallel, checkpointing=checkpointing, layers=layers)
                    yield self._variant(row.shard, row.replicate, switches)

    def _kinds(self) -> tuple[Layers, ...]:
        """What layers can be made of; FP8 takes multiples of some tokens on every rank."""
        half = self.ask.precision.compute in ("bfloat16", "float16")
        if not half or self.ask.gpu.fp8 is None or not self._at(sequence_parallel=False).te:
            return ("torch",)
        even = self.ask.micro * self.ask.sequence % (ROWS * self.tp) == 0
        return ("torch", "te", "fp8") if even else ("torch", "te")

    def _switches(self) -> Iterator[Switches]:
        ask = self.ask
        for checkpointing in (False, True) if ask.checkpointing is None else (ask.checkpointing,):
            free = ask.sequence_parallel is None or self.tp == 1
            for sequence_parallel in self.streams if free else (bool(ask.sequence_parallel),):
                yield Switches(sequence_parallel=sequence_parallel, checkpointing=checkpointing, layers=ask.layers)

    def _variant(self, shard: int, replicate: int, switches: Switches) -> Variant:
        ask = self.ask
        degrees = {"replicate": replicate, "shard": shard, "tp": self.tp}
        cut = switches.sequence_parallel
        bound = dataclasses.replace(self._at(sequence_parallel=cut), degrees=degrees)
        counted = dataclasses.replace(self._at(sequence_parallel=cut, layers=switches.layers), degrees=degrees)
        traced = self._step(switches)
        book = ledger(
            counted,
            batch=ask.micro,
            sequence=ask.sequence,
            dtype=ask.precision.compute,
            checkpointing=switches.checkpointing,
            fp8=switches.layers == "fp8",
        )
        found = peak(traced, bound, ask.precision, ask.optimizer, times=self.times)
        guess = estimate(
            traced,
            bound,
            found.held,
            Links(ask.gpu, degrees, ask.per_host),
            optimizer=ask.optimizer,
            precision=ask.precision,
            times=self.times,
        )
        return Variant(
            switches=switches,
            peak=found,
            estimate=guess,
            book=book,
            traced=traced,
            bound=bound,
        )

    def _at(self, *, sequence_parallel: bool, layers: Layers = "torch") -> BoundPlan:
        """The bound plan at this degree. Fused layers make other calls; between steps they hold the same bytes."""
        key = sequence_parallel, layers
        if key not in self._bound and layers != "torch":
            bound = self._at(sequence_parallel=sequence_parallel)
            self._bound[key] = rebound(bound, choose(self.model, bound, fp8=layers == "fp8").fused)
        elif key not in self._bound:
            bound = bind(
                self.model,
                self.plan,
                tp=self.tp,
                sequence_parallel=sequence_parallel,
                loss_parallel=self.ask.loss_parallel,
            )
            modules = bound.modules or whole_modules(self.model)
            self._bound[key] = dataclasses.replace(bound, modules=modules)
        return self._bound[key]

    def _step(self, switches: Switches) -> Traced:
        """A rank's step, of any layout at this degree."""
        ask = self.ask
        if switches not in self._traced:
            if self._cut is None:
                self._cut = cut_model(self.model, self._at(sequence_parallel=False))
            self._traced[switches] = traced_step(
                self._cut,
                self.plan,
                tp=self.tp,
                rows=ask.micro,
                sequence=ask.sequence,
                dtype=getattr(torch, ask.precision.compute),
                sequence_parallel=switches.sequence_parallel,
                loss_parallel=ask.loss_parallel,
                checkpointing=switches.checkpointing,
                by_unit=self.ranks > 1 or ask.precision.mixed,
                te=switches.layers != "torch",
                fp8=switches.layers == "fp8",
                compiled=ask.compiled,
            )
        return self._traced[switches]


def _degrees(ask: Ask) -> list[int]:
    return [d for d in range(1, ask.gpus + 1) if ask.gpus % d == 0] if ask.tp is None else [ask.tp]


def _indivisible(ask: Ask, tp: int) -> str:
    if ask.gpus % tp:
        return f"does not divide {ask.gpus} GPUs"
    ranks = ask.gpus // tp
    if ask.batch % (ranks * ask.micro):
        more = f" times micro-batches of {ask.micro}" if ask.micro > 1 else ""
        return f"its {ranks} data-parallel ranks{more} do not divide a batch of {ask.batch}"
    if ask.sequence_parallel and ask.sequence % tp:
        return f"does not divide {ask.sequence} tokens, as sequence parallelism needs"
    return ""


def _no_layout(ask: Ask, refused: dict[int, str]) -> str:
    lines = [f"no layout of {ask.gpus} GPUs is legal:", *(f"  tp {tp}: {why}" for tp, why in refused.items())]
    steps = sorted({ask.gpus // tp * ask.micro for tp in refused if ask.gpus % tp == 0})
    if steps and all(ask.batch % step for step in steps):
        near = {size for step in steps for size in (ask.batch // step * step, -(-ask.batch // step) * step) if size}
        closest = sorted(near, key=lambda size: (abs(size - ask.batch), size))[:2]
        smaller = ", or a smaller --micro-batch" if ask.micro > 1 else ""
        lines.append(f"  = give --batch {' or '.join(map(str, closest))}{smaller}")
    return "\n".join(lines)


def _first(error: BindError) -> str:
    return textwrap.shorten(str(error).strip().splitlines()[0], 110, placeholder=" ...")
