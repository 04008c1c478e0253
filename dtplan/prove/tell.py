"""A proof as text for people, and a progress bar while it runs; on a pipe there is no bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dtplan.prove.proof import OnLeg
from dtplan.prove.result import Finding, LegResult, Proof, Smallest

_MARKS = {"proved": "ok", "refuted": "WRONG", "not run": "NOT RUN"}


def as_text(proof: Proof, again: str = "") -> str:
    """What was run, each leg in a line, each cause with its rule and advice, and the verdict.

    ``again``: how to run it again, where that is not the command line.
    """
    versions = ", ".join(f"{name} {version}" for name, version in proof.versions.items())
    rows, length = proof.batch
    lines = [
        f"{proof.plan} ({proof.digest[:12]}) on {proof.architecture} ({proof.model})",
        f"{proof.dtype}, batch {rows} x {length} random tokens, seed {proof.seed}; {versions}",
        f"relative error at most {proof.bound:g}: {proof.measure}",
        "shrunken (real -> used): "
        + ("; ".join(f"{c.field} {_short(c.real)} -> {_short(c.used)}" for c in proof.choices) or "nothing"),
    ]
    if proof.zero_gradients:
        names = ", ".join(proof.zero_gradients[:4])
        lines.append(
            f"{len(proof.zero_gradients)} gradients are zero up to rounding and measured against the largest of all: "
            + names
        )
    if proof.idle:
        names = ", ".join(proof.idle[:2])
        lines.append(f"{len(proof.idle)} parameters take no part on tokens alone, nothing is said of them: {names}")
    lines.append("")
    for leg in proof.legs:
        lines += _leg(leg)
    lines += ["", _verdict(proof)]
    if proof.verdict == "refuted":
        lines.append(f"again: {again or proof.replay}  # plan {proof.digest[:12]}")
    if proof.smallest is not None:
        lines += _smallest(proof.smallest, proof.digest)
    return "\n".join(lines)


def _leg(result: LegResult) -> list[str]:
    leg = result.leg
    head = f"{_MARKS[result.verdict]:<8}{leg}  ({leg.ranks} {leg.world}, {result.seconds:.1f} s)"
    if result.verdict == "not run":
        return [f"{head}: {result.reason}"]
    if result.largest_error is not None:
        steps = f", {result.steps} optimizer steps" if result.steps else ""
        head += f": {result.tensors} tensors{steps}, largest error {result.largest_error:.1e} ({result.largest_at})"
    if result.verdict == "proved":
        return [head]
    lines = [head]
    if len(result.wrong) > 1:
        lines.append(f"        {len(result.wrong)} tensors are wrong; what went wrong first:")
    for finding in result.findings:
        lines += _finding(finding)
    return lines


def _finding(finding: Finding) -> list[str]:
    what = "" if finding.what in ("plan", "crash") else f"{finding.what}, "
    lines = [f"      - {finding.name}: {what}{finding.kind}", f"        {finding.says}"]
    if finding.rule:
        lines.append(f"        rule: {finding.rule}")
    if finding.advice:
        lines.append(f"        -> {finding.advice}")
    if finding.tried:
        lines.append(f"        run: {finding.tried}")
    return lines


def _smallest(small: Smallest, digest: str) -> list[str]:
    rows, length = small.batch
    sizes = "; ".join(f"{choice.field} {_short(choice.used)}" for choice in small.choices)
    return [
        f"smallest that fails so ({small.finding.name}: {small.finding.kind}): {small.leg}, {rows} x {length} tokens, "
        + sizes,
        f"again: {small.replay}  # plan {digest[:12]}",
    ]


def _verdict(proof: Proof) -> str:
    count = {verdict: sum(leg.verdict == verdict for leg in proof.legs) for verdict in _MARKS}
    total = len(proof.legs)
    if proof.verdict == "proved":
        return f"proved: {total} of {total} legs, on this shrunken model"
    if proof.verdict == "refuted":
        return f"refuted: {count['refuted']} of {total} legs; {count['proved']} proved, {count['not run']} not run"
    return f"not proved: {count['not run']} of {total} legs could not be run; {count['proved']} proved"


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)} of {', '.join(sorted({str(item) for item in value}))}]"
    return str(value)


@contextmanager
def progress(*, wanted: bool) -> Iterator[OnLeg]:
    """A bar on standard error if that is a terminal."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield lambda _result, _legs: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("unsharded model", total=None)

        def on_leg(result: LegResult | None, legs: int) -> None:
            described = "legs" if result is None else f"{_MARKS[result.verdict]} {result.leg}"
            bar.update(task, total=legs, advance=0 if result is None else 1, description=described)

        yield on_leg
