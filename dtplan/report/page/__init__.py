"""``dtplan report``: a bound plan as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtplan.plan.spec import Plan
from dtplan.planner.bound import BoundPlan
from dtplan.planner.ledger import Ledger
from dtplan.report.diff import Diff
from dtplan.report.page.render import render
from dtplan.report.page.view import view
from dtplan.te.fused import Choice


def page(
    bound: BoundPlan,
    book: Ledger,
    *,
    model: str = "",
    gpus_per_host: int = 8,
    choice: Choice | None = None,
    proof: Mapping[str, Any] | None = None,
    difference: Diff | None = None,
    plan: Plan | None = None,
) -> str:
    """One HTML file without any request: the bound plan, its ledger ``book``, and what else is given.

    Args:
        bound: what is drawn.
        book: collectives and bytes of a step.
        model: what to call the model, beside its architecture.
        gpus_per_host: ranks of a host in the picture of the mesh.
        choice: which modules become TransformerEngine layers.
        proof: the JSON of a proof.
        difference: from something else to this bound plan.
        plan: what was bound, to show its text.

    Raises:
        ProofError: ``proof`` is not whole.
    """
    shown = view(
        bound,
        book,
        model=model,
        gpus_per_host=gpus_per_host,
        choice=choice,
        proof=proof,
        difference=difference,
        plan=plan,
    )
    return render(shown)
