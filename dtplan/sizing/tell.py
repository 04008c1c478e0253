"""``dtplan fit`` in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtplan.sizing.fit import Ask, Fit, Row, Variant
from dtplan.sizing.roofline import time

GIB = 1 << 30
_SWITCHES = ("plain", "SP", "CKPT", "SP+CKPT")
_LAYERS = {"torch": "", "te": "TransformerEngine bf16, ", "fp8": "TransformerEngine FP8, "}


def lines(fitted: Fit, *, explain: bool) -> Iterator[str]:
    """The whole answer."""
    yield from _head(fitted)
    yield ""
    yield from _table(fitted)
    yield ""
    yield from _choice(fitted)
    if explain:
        yield ""
        yield "What the numbers are"
        yield from (f"  {name}: {told}" for name, told in EXPLAINED.items())


def _head(fitted: Fit) -> Iterator[str]:
    ask = fitted.ask
    dtypes = f"{ask.precision.parameters} parameters, {ask.precision.compute} computation"
    dtypes = dtypes if ask.precision.mixed else ask.precision.compute
    layers = _LAYERS[ask.layers].rstrip(", ")
    measured = "rates measured" if ask.gpu.measured else "rates scaled from an H200's by datasheet"
    yield f"{fitted.architecture}, {fitted.parameters / 1e9:.2f} billion parameters, plan {fitted.plan}"
    yield f"{ask.gpus} x {ask.gpu.name} ({measured}), {ask.per_host} a host; {gib(ask.usable)} GiB usable of each"
    often = f"{ask.micro} at once on a rank"
    yield (
        f"{ask.batch} sequences of {ask.sequence} tokens a step, {often}; {dtypes}; {ask.optimizer}"
        + (f"; {layers}" if layers else "")
        + ("; compiled" if ask.compiled else "")
    )


def _table(fitted: Fit) -> Iterator[str]:
    """A row for each layout."""
    here = {str(variant.switches) for row in fitted.rows for variant in row.variants}
    kinds = [kind for kind in _SWITCHES if kind in here]
    yield "GiB on the fullest rank: between steps, and the peak of a step (SP sequence parallelism, CKPT checkpointing)"
    held = f"{'tp':>4}{'shard':>6}{'repl':>6} {'params':>8}{'grads':>7}{'optim':>7}  "
    yield held + "".join(f"{kind:>8} " for kind in kinds) + f"{'calls':>7}{'GB sent':>9}{'step':>9}{'tok/s':>9}"
    yield from (_row(row, fitted, kinds) for row in fitted.rows)
    yield from (f"{tp:>4}  {why}" for tp, why in fitted.refused.items())
    yield "  * fits. Calls, GB sent by a rank and the estimated time are of the fastest that fits, else the leanest."


def _row(row: Row, fitted: Fit, kinds: Sequence[str]) -> str:
    ask = fitted.ask
    by_kind = {str(variant.switches): variant for variant in row.variants}
    peaks = ""
    for kind in kinds:
        variant = by_kind.get(kind)
        peaks += " " * 9 if variant is None else f"{gib(variant.peak.total):>8}{_mark(variant, ask)}"
    best = next(iter(row.fitting(ask.usable)), None) or min(row.variants, key=lambda v: v.peak.total)
    calls = row.times * sum(entry.count for entry in best.book.entries)
    sent = row.times * sum(entry.wire_bytes(best.bound.degrees[entry.axis]) for entry in best.book.entries)
    seconds = best.estimate.seconds
    arrow = "  <-" if fitted.smallest is not None and fitted.smallest[0] is row else ""
    held = f"{gib(row.held.parameters):>8}{gib(row.held.gradients):>7}{gib(row.held.optimizer):>7}"
    speed = f"{calls:>7}{sent / 1e9:>9.1f}{time(seconds):>9}{_rate(ask, seconds):>9}"
    return f"{row.tp:>4}{row.shard:>6}{row.replicate:>6} {held}  {peaks}{speed}{arrow}"


def _choice(fitted: Fit) -> Iterator[str]:
    choice = fitted.smallest
    if choice is None:
        yield from _short(fitted)
        return
    yield f"Smallest tp that fits: {named(*choice)}"
    yield from _memory(fitted.ask, choice[1])
    yield from _time(fitted.ask, choice[1])
    yield from _others(fitted)
    fastest = fitted.fastest
    if fastest is not None and fastest[0].tp != choice[0].tp:
        yield f"Fastest that fits, by the estimate: {named(*fastest)}, {time(fastest[1].estimate.seconds)} a step"
    yield ""
    yield from _call(fitted.ask, *choice)


def _others(fitted: Fit) -> Iterator[str]:
    """The chosen layout under all switches."""
    ask = fitted.ask
    yield f"  {'this layout with':<34}{'kept':>8}{'peak':>9} {'step':>10}{'tok/s':>9}"
    for variant in fitted.others:
        name = _LAYERS[variant.switches.layers] + str(variant.switches)
        said, seconds = variant.peak, variant.estimate.seconds
        held = f"{gib(said.activations):>8}{gib(said.total):>9}{_mark(variant, ask)}"
        yield f"  {name:<34}{held}{time(seconds):>10}{_rate(ask, seconds):>9}"


def _short(fitted: Fit) -> Iterator[str]:
    """What is short, by how much, and what would do."""
    row, variant = fitted.nearest
    over = variant.peak.total - fitted.ask.usable
    yield f"Nothing fits. The leanest layout is {named(row, variant)}: it is {gib(over)} GiB too large."
    yield from _memory(fitted.ask, variant)
    yield "What would help:"
    yield from (f"  - {advice}" for advice in _advice(fitted, row, variant))


def _advice(fitted: Fit, row: Row, variant: Variant) -> Iterator[str]:
    ask, said = fitted.ask, variant.peak
    over, state = said.total - ask.usable, said.held.total
    more = [v for v in fitted.others if v.peak.total <= ask.usable]
    if more:
        best = min(more, key=lambda v: v.estimate.seconds)
        switches = _LAYERS[best.switches.layers] + str(best.switches)
        yield f"allow what was switched off: with {switches} this layout takes {gib(best.peak.total)} GiB"
    if ask.micro > 1:
        yield f"--micro-batch 1: {ask.micro} sequences at once keep {gib(said.activations)} GiB for backward"
    if ask.precision.mixed:
        yield f"without --mixed-precision: parameters, gradients and optimizer take half of {gib(state)} GiB"
    if ask.optimizer == "adamw":
        yield f"--optimizer momentum: {gib(said.held.optimizer // 2)} GiB less, or sgd: {gib(said.held.optimizer)}"
    if row.shard * row.tp >= ask.gpus:
        yield f"more GPUs: of the {gib(said.total)} GiB, {gib(state)} shrink with their number"
    if ask.sequence > 1024:
        growing = said.total - said.held.total
        yield f"shorter sequences: about {gib(growing)} GiB grow with their {ask.sequence} tokens"
    if over < ask.reserve:
        yield f"--reserve {gib(ask.reserve - over)}GiB, if CUDA, NCCL and fragmentation leave so much"


def _memory(ask: Ask, variant: Variant) -> Iterator[str]:
    said = variant.peak
    parts = {
        "parameters": said.held.parameters,
        "optimizer": said.held.optimizer,
        "kept for backward": said.activations,
        "gradients, gathered weights, temporaries": said.rest,
    }
    yield f"  memory  {gib(said.total)} of {gib(ask.usable)} GiB, in the {said.where}:"
    yield from (f"{gib(size):>13}  {name}" for name, size in parts.items())


def _time(ask: Ask, variant: Variant) -> Iterator[str]:
    seconds = variant.estimate.seconds
    yield f"  time    {time(seconds)} a step, {_rate(ask, seconds)} tokens/s, an estimate:"
    yield from (f"{time(term.exposed):>13}  {term.name}: {term.told}" for term in variant.estimate.terms)


EXPLAINED = {
    "params, grads, optim": "bytes between steps, exact: a tie once, FSDP2's padding, the rank with the most rows",
    "kept for backward": "storages alive at the end of forward, found by running the model's own code on shapes; it "
    "falls during backward, while gradients grow",
    "temporaries": "FSDP2's gathered units and buffers, gradients on their way, what operators and kernels allocate "
    "for a moment, and cuBLAS's 64 MiB, at the moment that is worst in all",
    "compiled": "between products, attention and collectives a compiler makes one kernel of all, and recomputes in "
    "backward what such kernels can; TransformerEngine's layers stay as they are",
    "usable": "the GPU's memory less --reserve: CUDA, NCCL and fragmentation are not in a peak",
    "calls, GB sent": "of one rank: a ring sends 2(n-1)/n of an all-reduce, (n-1)/n of a gather or scatter. "
    "Checkpointing repeats a layer's calls of forward, which count in the time",
    "step": "each kernel takes the larger of its FLOP and its bytes, at rates that steps sustain; collectives on tp "
    "are waited for, FSDP2's run beside kernels and count as far as they last longer. Launches are free",
}


def named(row: Row, variant: Variant) -> str:
    """A layout in words."""
    switches = "" if str(variant.switches) == "plain" else f", {variant.switches}"
    often = f", {row.times} micro-batches a step" if row.times > 1 else ""
    return f"tp {row.tp} x shard {row.shard} x replicate {row.replicate}{switches}{often}"


def _call(ask: Ask, row: Row, variant: Variant) -> Iterator[str]:
    on = variant.switches
    options = ["sequence_parallel=True"] * on.sequence_parallel + ["activation_checkpointing=True"] * on.checkpointing
    options += ["loss_parallel=True"] * variant.bound.loss_parallel
    options += [] if on.layers == "torch" else ['te="require"']
    options += ['fp8="delayed"'] if on.layers == "fp8" else []
    yield f"  dtplan.init(tensor_parallel_degree={row.tp}, hybrid_shard_degree={row.shard})"
    yield f"  model = dtplan.transform({', '.join(['model', *options])})"
    if ask.compiled:
        yield "  model = dtplan.compile_model(model)"


def _mark(variant: Variant, ask: Ask) -> str:
    return "*" if variant.peak.total <= ask.usable else " "


def _rate(ask: Ask, seconds: float) -> str:
    return f"{ask.batch * ask.sequence / seconds:.0f}"


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:.1f}"
