"""Everything that the page shows, as data: views of a bound plan, its ledger, and what else was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtplan.plan.spec import Plan
from dtplan.planner.bound import BoundPlan, BoundTensor
from dtplan.planner.ledger import Entry, Ledger
from dtplan.report import fused
from dtplan.report.diff import Diff
from dtplan.report.page.facts import Facts, FloorView, facts, floor_view
from dtplan.report.page.glyph import Glyph, glyph
from dtplan.report.page.lanes import Layer, layers
from dtplan.report.page.mesh import Mesh, mesh
from dtplan.report.page.moves import WORDS, MoveView, moves_of
from dtplan.report.page.proofs import ProofView, proof_view
from dtplan.report.page.source import File, files
from dtplan.report.page.tree import Row, tree
from dtplan.report.page.words import chip
from dtplan.te.fused import Choice

_PIXELS = 34.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A parameter or buffer, with its picture and the shape that rank 0 keeps between steps."""

    bound: BoundTensor
    glyph: Glyph
    rest: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """A row of the tree with what it says; ``parent`` is its key, None for the first row."""

    row: Row
    parent: int | None
    style: str
    tensors: tuple[TensorView, ...]
    moves: tuple[MoveView, ...]
    is_unit: bool
    fused: tuple[str, ...]
    """TransformerEngine layers that take its place."""
    share: float
    """Of a rank's bytes, 0 to 1."""
    words: str
    """What the search looks in, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryView:
    """A line of the ledger with the bytes that a rank sends."""

    entry: Entry
    cause: str
    """Below its layer."""
    kind: str
    sent: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The whole page."""

    bound: BoundPlan
    book: Ledger
    model: str
    facts: Facts
    mesh: Mesh
    gpus_per_host: int
    layers: tuple[Layer, ...]
    rows: tuple[RowView, ...]
    entries: tuple[EntryView, ...]
    floors: tuple[FloorView, ...]
    fused: Mapping[str, Any] | None
    """As `dtplan show --te --json` tells it."""
    proof: ProofView | None
    difference: Diff | None
    files: tuple[File, ...]
    legend: tuple[str, ...]
    """The placements that occur, for the legend."""

    def place(self, rule: str) -> str:
        """The id of a rule's line, empty where its file is not shown."""
        name, line, _ = rule.rsplit(":", 2)
        return next((file.anchor(int(line)) for file in self.files if file.name == name), "")


def view(
    bound: BoundPlan,
    book: Ledger,
    *,
    model: str = "",
    gpus_per_host: int = 8,
    choice: Choice | None = None,
    proof: Mapping[str, Any] | None = None,
    difference: Diff | None = None,
    plan: Plan | None = None,
) -> View:
    """The page's data. ``choice``: fused layers; ``proof``: the JSON of `dtplan prove`.

    Raises:
        ProofError: ``proof`` is not whole.
    """
    root = tree(bound)
    picture = mesh(bound, gpus_per_host)
    proved = None if proof is None else proof_view(proof, bound)

    def moves(row: Row) -> list[MoveView]:
        return list(moves_of(bound, book, row.module))

    rows = tuple(_rows(bound, book, root, _fused_at(choice)))
    return View(
        bound=bound,
        book=book,
        model=model,
        facts=facts(bound, book, picture, proved),
        mesh=picture,
        gpus_per_host=gpus_per_host,
        layers=tuple(layers(bound, root, moves)),
        rows=rows,
        entries=tuple(_entries(bound, book)),
        floors=tuple(floor_view(floor, book, floor.count) for floor in book.floors),
        fused=None if choice is None else fused.as_json(choice),
        proof=proved,
        difference=difference,
        files=files(plan, list(root.walk())),
        legend=tuple(sorted({str(t.bound.placement) for row in rows for t in row.tensors if not t.bound.buffer})),
    )


def _rows(bound: BoundPlan, book: Ledger, root: Row, fused_at: Mapping[str, list[str]]) -> list[RowView]:
    found: list[RowView] = []
    units, total = set(bound.fsdp_units), root.held.rank or 1

    def add(row: Row, parent: int | None) -> None:
        tensors = tuple(_tensor(bound, tensor) for tensor in (row.module.tensors if row.module else ()))
        moves = tuple(moves_of(bound, book, row.module))
        style = _style(row)
        engine = tuple(fused_at.get(row.first, ()))
        found.append(
            RowView(
                row=row,
                parent=parent,
                style=style,
                tensors=tensors,
                moves=moves,
                is_unit=row.first in units,
                fused=engine,
                share=row.held.rank / total,
                words=_words(row, style, tensors, moves, engine),
            )
        )
        for child in row.children:
            add(child, row.key)

    add(root, None)
    return found


def _style(row: Row) -> str:
    if row.module is None:
        return ""
    return row.module.style or ("parallel residual" if row.module.shared else "")


def _tensor(bound: BoundPlan, tensor: BoundTensor) -> TensorView:
    notes = ["gradient summed over tp"] * (tensor.grad == "sum") + ["added by one rank"] * tensor.once
    notes += ["buffer"] * tensor.buffer + ["frozen"] * (not tensor.trainable and not tensor.buffer)
    notes += [f"the same rows on {max(tensor.copies)} ranks each"] if tensor.shared else []
    notes += [f"tied to {tensor.tied_to}"] if tensor.tied_to else []
    notes += [f"parts of {', '.join(map(str, tensor.sections))}, each cut"] if tensor.sections else []
    return TensorView(
        bound=tensor,
        glyph=glyph(tensor, bound.tp, largest=max(tensor.shape, default=1), pixels=_PIXELS),
        rest=bound.shard_shape(tensor),
        notes=tuple(notes),
    )


def _words(
    row: Row, style: str, tensors: tuple[TensorView, ...], moves: tuple[MoveView, ...], fused: tuple[str, ...]
) -> str:
    said = [row.path, style, *fused]
    if row.module is not None:
        said += [row.module.kind, row.module.rule]
    said += [word for t in tensors for word in (t.bound.name, str(t.bound.placement), chip(str(t.bound.placement)))]
    said += [word for move in moves for word in (move.forward, move.backward) if word]
    return " ".join(said).lower()


def _fused_at(choice: Choice | None) -> dict[str, list[str]]:
    """Full name of a module -> the layers that take its place."""
    found: dict[str, list[str]] = {}
    for layer in () if choice is None else choice.fused:
        for name in layer.parts():
            found.setdefault(name, []).append(layer.layer)
    return found


def _entries(bound: BoundPlan, book: Ledger) -> Iterator[EntryView]:
    sent = [entry.wire_bytes(bound.degrees[entry.axis]) for entry in book.entries]
    largest = max(sent, default=0) or 1
    for entry, bytes_ in zip(book.entries, sent, strict=True):
        yield EntryView(
            entry=entry,
            cause=entry.cause.removeprefix(entry.layer).lstrip(".") or entry.cause,
            kind=WORDS[entry.kind],
            sent=bytes_,
            share=bytes_ / largest,
        )
