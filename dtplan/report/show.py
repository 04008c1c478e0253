"""``dtplan show``: a bound plan and its ledger as tables, or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtplan.planner.bound import BoundModule, BoundMove, BoundPlan, BoundTensor
from dtplan.planner.ledger import Entry, Ledger
from dtplan.report.words import size

_WIDE = 240


def as_json(bound: BoundPlan, book: Ledger) -> dict[str, Any]:
    """Everything that the tables show, as JSON data."""
    whole, kept = bound.parameter_bytes()
    return {
        **bound.to_json(),
        "parameter_bytes": {"model": whole, "rank": kept, "sharded_share": bound.sharded_share()},
        "ledger": dataclasses.asdict(book),
    }


def print_tables(bound: BoundPlan, book: Ledger) -> None:
    """The tables, on standard output; without colour and wide where it is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    console.print(_heading(bound))
    console.print(_modules(bound))
    console.print(_memory(bound))
    console.print(_ledger(bound, book))
    for line in _notes(bound, book):
        console.print(line)


def _heading(bound: BoundPlan) -> Text:
    degrees = " x ".join(f"{axis} {size}" for axis, size in bound.degrees.items())
    switches = [
        f"sequence_parallel={'on' if bound.sequence_parallel else 'off'}",
        f"loss_parallel={'on' if bound.loss_parallel else 'off'}",
    ]
    units = ", ".join(f"{unit.name} {unit.count}" for unit in bound.units)
    return Text.assemble(
        (f"{bound.plan} on {bound.architecture}", "bold"),
        f"   {degrees}   {'  '.join(switches)}\n",
        f"plan {bound.digest[:12]}   units: {units}   residual {bound.residual}, {bound.width} features",
    )


def _modules(bound: BoundPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("module", "style", "parameters: global -> rank 0", "input", "output", "rule"):
        table.add_column(column, overflow="fold")
    for module in bound.modules:
        count = f" x{len(module.names)}" if len(module.names) > 1 else ""
        table.add_row(
            (module.pattern or ".") + count,
            _style(module),
            "\n".join(_tensor(tensor) for tensor in module.tensors),
            "\n".join(_move(move) for move in (*module.inputs, *_shared(module))),
            "\n".join(_move(move) for move in module.outputs),
            module.rule,
        )
    return table


def _style(module: BoundModule) -> str:
    return module.style or ("parallel residual" if module.shared else "-")


def _shared(module: BoundModule) -> tuple[BoundMove, ...]:
    return () if module.shared is None else (module.shared,)


def _tensor(tensor: BoundTensor) -> str:
    shape = f"{_dims(tensor.shape)} {tensor.placement}"
    parts = [f"{tensor.name} {shape} -> {_dims(tensor.local_shape)}"]
    parts += [f"in part on {max(tensor.copies)} ranks each"] if tensor.shared else []
    parts += ["grad summed"] * (tensor.grad == "sum") + ["added once"] * tensor.once
    parts += ["buffer"] * tensor.buffer + ["frozen"] * (not tensor.trainable and not tensor.buffer)
    parts += [f"tied to {tensor.tied_to}"] if tensor.tied_to else []
    return ", ".join(parts)


def _dims(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _move(move: BoundMove) -> str:
    change = f"{move.src}" if move.op == "keep" else f"{move.src} > {move.dst} ({move.op})"
    return change + (" as DTensor" if move.global_shape else "")


def _memory(bound: BoundPlan) -> str:
    whole, kept = bound.parameter_bytes()
    return (
        f"parameters: {size(whole)} in all, {size(kept)} on rank 0 ({bound.sharded_share():.1%} of the bytes are "
        "cut on tp); gradients as much, AdamW twice as much in the parameters' dtype"
    )


def _ledger(bound: BoundPlan, book: Ledger) -> Table:
    title = f"collectives of one step: batch {book.batch} x {book.sequence} tokens, activations in {book.dtypes}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for column, justify in (
        ("where", "left"),
        ("cause", "left"),
        ("axis", "left"),
        ("direction", "left"),
        ("kind", "left"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for column in ("calls", "bytes a call", "sent by a rank"):
        table.add_column(column, justify="right")
    for entry in book.entries:
        table.add_row(*_entry(bound, entry))
    sent = sum(e.wire_bytes(bound.degrees[e.axis]) for e in book.entries)
    calls = sum(e.count for e in book.entries)
    table.add_row("all", "", "", "", "", str(calls), "", size(sent), style="bold")
    return table


def _entry(bound: BoundPlan, entry: Entry) -> tuple[str, ...]:
    cause = entry.cause.removeprefix(entry.layer).lstrip(".") or entry.cause
    sent = size(entry.wire_bytes(bound.degrees[entry.axis]))
    return (
        entry.layer,
        cause,
        entry.axis,
        entry.direction,
        entry.kind,
        str(entry.count),
        size(entry.bytes),
        sent,
    )


def _notes(bound: BoundPlan, book: Ledger) -> Iterable[str]:
    for floor in book.floors:
        found = f"{floor.forward} forward + {floor.backward} backward"
        fewest = f"{floor.floor_forward} + {floor.floor_backward}"
        above = floor.forward > floor.floor_forward or floor.backward > floor.floor_backward
        verdict = f"warning: the floor is {fewest}" if above else f"the floor ({fewest})"
        yield f"{floor.layer} x{floor.count}: {found} collectives on tp a layer, {verdict}"
        yield from (f"  {line}" for line in floor.excess)
    if bound.ties:
        yield "tied: " + "; ".join(" = ".join(tie) for tie in bound.ties)
    if bound.fsdp_units:
        yield f"FSDP units: {len(bound.fsdp_units)}, {bound.fsdp_units[0]} to {bound.fsdp_units[-1]}, then the root"
    if bound.te:
        yield f"{len(bound.te)} kinds of TransformerEngine layers are declared: --te tells which are taken"
