"""``dtplan fit`` in words and tables."""

from __future__ import annotations

from collections.abc import Iterator

from dtplan.sizing.fit import Ask, Fit, Row, Variant

GIB = 1 << 30


def lines(fitted: Fit, *, explain: bool) -> Iterator[str]:
    """The whole answer."""
    yield from _head(fitted)
    yield ""
    yield from _table(fitted)
    yield ""
    yield from _choice(fitted)
    if explain:
        yield ""
        yield from _explained(fitted)


def _head(fitted: Fit) -> Iterator[str]:
    ask = fitted.ask
    mixed = f"float32 parameters, {ask.precision.compute} computation" if ask.precision.mixed else ask.precision.compute
    yield f"{fitted.architecture}, {fitted.parameters / 1e9:.2f} billion parameters, plan {fitted.plan}"
    yield (
        f"{ask.gpus} x {ask.gpu.name}, {gib(ask.memory)} GiB each less {gib(ask.reserve)} in reserve, {ask.per_host} a host; "
        f"{ask.batch} sequences of {ask.sequence} tokens a step; {mixed}; {ask.optimizer}"
    )


def _table(fitted: Fit) -> Iterator[str]:
    """A row for each layout."""
    here = {str(variant.switches) for row in fitted.rows for variant in row.variants}
    kinds = [kind for kind in ("plain", "SP", "CKPT", "SP+CKPT") if kind in here]
    yield "GiB on the fullest rank: between steps, and the peak of a step (SP sequence parallelism, CKPT checkpointing)"
    head = f"{'tp':>4}{'shard':>6}{'repl':>6}  {'params':>7}{'grads':>7}{'optim':>7}   "
    head += "".join(f"{kind:>8} " for kind in kinds) + f"  {'calls':>6}{'GB sent':>9}{'step':>9}{'tok/s':>9}"
    yield head
    for row in fitted.rows:
        yield _row(row, fitted, kinds)
    for tp, why in fitted.refused.items():
        yield f"{tp:>4}  {why}"
    yield "  * fits. Calls and GB that a rank sends in a step, and its estimated time, are of the fastest that fits, or the leanest."


def _row(row: Row, fitted: Fit, kinds: list[str]) -> str:
    ask = fitted.ask
    by_kind = {str(v.switches): v for v in row.variants}
    held = f"{gib(row.held.parameters):>7}{gib(row.held.gradients):>7}{gib(row.held.optimizer):>7}"
    peaks = ""
    for kind in kinds:
        variant = by_kind.get(kind)
        mark = "*" if variant is not None and variant.peak.total <= ask.usable else " "
        peaks += f"{'' if variant is None else gib(variant.peak.total):>8}{mark}"
    best = next(iter(row.fitting(ask.usable)), None) or min(row.variants, key=lambda v: v.peak.total)
    calls = row.times * sum(entry.count for entry in best.book.entries)
    sent = row.times * sum(entry.wire_bytes(best.bound.degrees[entry.axis]) for entry in best.book.entries)
    seconds = best.estimate.seconds
    speed = f"{calls:>6}{sent / 1e9:>9.1f}{time(seconds):>9}{ask.batch * ask.sequence / seconds:>9.0f}"
    choice = fitted.smallest
    arrow = "  <-" if choice is not None and choice[0] is row else ""
    return f"{row.tp:>4}{row.shard:>6}{row.replicate:>6}  {held}   {peaks}   {speed}{arrow}"


def _choice(fitted: Fit) -> Iterator[str]:
    choice = fitted.smallest
    if choice is None:
        yield from _short(fitted)
        return
    yield f"Smallest tp that fits: {named(*choice)}"
    yield from _memory(fitted.ask, *choice)
    yield from _time(fitted.ask, choice[1])
    yield from _others(fitted)
    fastest = fitted.fastest
    if fastest is not None and fastest[0].tp != choice[0].tp:
        yield f"Fastest by the estimate: {named(*fastest)}, {time(fastest[1].estimate.seconds)} a step"
    yield ""
    yield "  " + _call(*choice)


def _others(fitted: Fit) -> Iterator[str]:
    """The chosen layout under all switches."""
    ask = fitted.ask
    yield f"  {'this layout with':<32}{'kept':>8}{'rest':>8}{'peak':>8}{'step':>12}{'tok/s':>9}"
    names = {"torch": "", "te": "TransformerEngine bf16 ", "fp8": "TransformerEngine FP8 "}
    for variant in fitted.others:
        name, said, seconds = names[variant.switches.layers] + str(variant.switches), variant.peak, variant.estimate.seconds
        mark = "*" if said.total <= ask.usable else " "
        held = f"{gib(said.activations):>8}{gib(said.rest):>8}{gib(said.total):>8}{mark}"
        yield f"  {name:<32}{held}{time(seconds):>11}{ask.batch * ask.sequence / seconds:>9.0f}"


def _short(fitted: Fit) -> Iterator[str]:
    """What is short, by how much, and what would do."""
    row, variant = fitted.nearest
    over = variant.peak.total - fitted.ask.usable
    yield f"Nothing fits. The leanest layout is {named(row, variant)}: it is {gib(over)} GiB too large."
    yield from _memory(fitted.ask, row, variant)
    yield "What would help:"
    yield from (f"  - {advice}" for advice in _advice(fitted, row, variant))


def _advice(fitted: Fit, row: Row, variant: Variant) -> Iterator[str]:
    ask, said = fitted.ask, variant.peak
    over = said.total - ask.usable
    state = said.held.parameters + said.held.optimizer
    if ask.checkpointing is False:
        yield "allow --checkpointing: only the inputs of the units are kept for backward"
    if ask.sequence_parallel is False and row.tp > 1:
        yield "allow --sequence-parallel: the residual stream is cut over tp"
    if ask.micro > 1:
        yield f"--micro-batch 1: {ask.micro} sequences at once keep {gib(said.activations)} GiB for backward"
    elif ask.sequence > 2048:
        yield f"shorter sequences: what grows with them is {gib(said.activations + said.rest)} GiB at {ask.sequence} tokens"
    if ask.precision.mixed:
        yield f"parameters in {ask.precision.compute} instead of --mixed-precision: half of {gib(state)} GiB"
    if ask.optimizer == "adamw":
        yield f"--optimizer momentum: {gib(said.held.optimizer // 2)} GiB less"
    if over < ask.reserve:
        yield f"--reserve {gib(ask.reserve - over)}GiB, if CUDA and NCCL leave so much"
    if row.shard * row.tp >= ask.gpus:
        yield f"more GPUs: {gib(state)} GiB a rank are parameters and optimizer, which shrink with their number"


def _memory(ask: Ask, row: Row, variant: Variant) -> Iterator[str]:
    said = variant.peak
    yield (
        f"  memory  {gib(said.total)} of {gib(ask.usable)} GiB at the {said.where}: parameters {gib(said.held.parameters)}, "
        f"optimizer {gib(said.held.optimizer)}, kept for backward {gib(said.activations)}, gradients, gathered weights "
        f"and temporaries {gib(said.rest)}"
    )


def _time(ask: Ask, variant: Variant) -> Iterator[str]:
    seconds = variant.estimate.seconds
    yield f"  time    {time(seconds)} a step, estimated, {ask.batch * ask.sequence / seconds:.0f} tokens/s:"
    for term in variant.estimate.terms:
        yield f"    {time(term.exposed):>9}  {term.name}: {term.told}"


def _explained(fitted: Fit) -> Iterator[str]:
    yield "What the numbers are"
    for name, told in EXPLAINED.items():
        yield f"  {name}: {told}"


EXPLAINED = {
    "params, grads, optim": "bytes between steps, exact: a tie once, FSDP2's padding, the rank with the most rows",
    "kept for backward": "storages alive at the end of forward, found by running the model's own code on shapes",
    "temporaries": "the rest at the worst moment: FSDP2's gathered units and buffers, gradients on their way, and what "
    "operators and kernels allocate for a moment; 64 MiB of it are cuBLAS's",
    "GB sent": "by each rank in a step: a ring sends 2(n-1)/n of an all-reduce, (n-1)/n of a gather or scatter",
    "time": "each kernel takes the larger of its FLOP and its bytes at the GPU's sustained rates; collectives on tp are "
    "waited for, FSDP2's run beside kernels and count where they last longer. Eager code; no launch times",
}


def named(row: Row, variant: Variant) -> str:
    """A layout in words."""
    switches = {"plain": ""}.get(str(variant.switches), f", {variant.switches}")
    often = f", {row.times} micro-batches a step" if row.times > 1 else ""
    return f"tp {row.tp} x shard {row.shard} x replicate {row.replicate}{switches}{often}"


def _call(row: Row, variant: Variant) -> str:
    options = ", sequence_parallel=True" * variant.switches.sequence_parallel
    options += ", activation_checkpointing=True" * variant.switches.checkpointing
    options += ", loss_parallel=True" * variant.bound.loss_parallel
    degrees = f"tensor_parallel_degree={row.tp}, hybrid_shard_degree={row.shard}"
    return f"dtplan.init({degrees}); dtplan.transform(model{options})"


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:.1f}"


def time(seconds: float) -> str:
    """Seconds, or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
