"""The result of ``dtplan prove --json`` beside a bound plan: what was proved, and whether it is of this plan at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtplan._errors import DtplanError
from dtplan.planner.bound import BoundPlan

SCHEMA_VERSION = 1
SCALE = (-18.0, 2.0)
"""Powers of ten of the picture of errors, from left to right."""


class ProofError(DtplanError, ValueError):
    """A file that is no proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegView:
    """One leg; ``at`` is where its largest error lies in the picture, 0 to 100, None where there is none."""

    name: str
    world: str
    ranks: int
    verdict: str
    tensors: int
    steps: int
    error: str
    error_at: str
    at: float | None
    reason: str
    here: bool
    """Whether it has this report's tp degree and switches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """A cause, and the legs in which it was found."""

    name: str
    what: str
    kind: str
    says: str
    rule: str
    advice: str
    tried: str
    legs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofView:
    """A proof as the page shows it."""

    verdict: str
    of_this_plan: bool
    digest: str
    architecture: str
    bound: float
    bound_at: float
    legs: tuple[LegView, ...]
    findings: tuple[FindingView, ...]
    choices: tuple[tuple[str, str, str], ...]
    versions: Mapping[str, str]
    measure: str
    replay: str

    @property
    def covers(self) -> bool:
        """Whether a proved leg has this report's tp degree and switches."""
        return any(leg.here and leg.verdict == "proved" for leg in self.legs)


def read_proof(file: str) -> dict[str, Any]:
    """The JSON of ``dtplan prove --json``.

    Raises:
        ProofError: no such file, no JSON, or not a proof.
    """
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProofError(f"cannot read the proof {file}: {error.strerror}") from None
    except ValueError as error:  # JSON and UTF-8 errors alike
        raise ProofError(f"{file} is not JSON: {error}; give what `dtplan prove --json` printed") from None
    if not isinstance(data, dict) or not {"verdict", "legs", "digest"} <= data.keys():
        raise ProofError(f"{file} holds no proof; give what `dtplan prove --json` printed")
    return data


def proof_view(data: Mapping[str, Any], bound: BoundPlan) -> ProofView:
    """What a proof says of ``bound``.

    Raises:
        ProofError: a field is missing or of another kind.
    """
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ProofError(
            f"the proof has schema_version {data.get('schema_version')!r}; this dtplan reads {SCHEMA_VERSION}: "
            "run `dtplan prove --json` again"
        )
    try:
        return _view(data, bound)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProofError(f"the proof is not whole ({error!r}): run `dtplan prove --json` again") from None


def _view(data: Mapping[str, Any], bound: BoundPlan) -> ProofView:
    same = data["digest"] == bound.digest and data["architecture"] == bound.architecture
    return ProofView(
        verdict=str(data["verdict"]),
        of_this_plan=same,
        digest=str(data["digest"]),
        architecture=str(data["architecture"]),
        bound=float(data["bound"]),
        bound_at=_at(float(data["bound"])),
        legs=tuple(_leg(leg, bound) for leg in data["legs"]),
        findings=tuple(_findings(data["legs"])),
        choices=tuple((str(c["field"]), json.dumps(c["real"]), json.dumps(c["used"])) for c in data["choices"]),
        versions={str(name): str(version) for name, version in data["versions"].items()},
        measure=str(data["measure"]),
        replay=str(data["replay"]),
    )


def _leg(data: Mapping[str, Any], bound: BoundPlan) -> LegView:
    leg, error = data["leg"], data["largest_error"]
    here = (leg["tp"], leg["sequence_parallel"], leg["loss_parallel"])
    return LegView(
        name=_name(data),
        world=str(leg["world"]),
        ranks=int(data["ranks"]),
        verdict=str(data["verdict"]),
        tensors=int(data["tensors"]),
        steps=int(data["steps"]),
        error="" if error is None else f"{float(error):.1e}",
        error_at=str(data["largest_at"]),
        at=None if error is None else _at(float(error)),
        reason=str(data["reason"]),
        here=here == (bound.tp, bound.sequence_parallel, bound.loss_parallel),
    )


def _name(data: Mapping[str, Any]) -> str:
    switches = [
        word
        for key, word in (("sequence_parallel", "sequence parallel"), ("loss_parallel", "loss parallel"))
        if data["leg"][key]
    ]
    return ", ".join([" x ".join(f"{axis} {size}" for axis, size in data["mesh"].items()), *switches])


def _findings(given: list[Mapping[str, Any]]) -> list[FindingView]:
    """Each cause once, with the legs that have it."""
    keys = ("name", "what", "kind", "says", "rule", "advice", "tried")
    found: dict[tuple[str, ...], list[str]] = {}
    for leg in given:
        for finding in leg["findings"]:
            found.setdefault(tuple(str(finding[key]) for key in keys), []).append(_name(leg))
    return [
        FindingView(name=name, what=what, kind=kind, says=says, rule=rule, advice=advice, tried=tried, legs=tuple(legs))
        for (name, what, kind, says, rule, advice, tried), legs in found.items()
    ]


def _at(error: float) -> float:
    """Where an error lies on the scale, in percent."""
    low, high = SCALE
    power = high if not math.isfinite(error) else low if error <= 0 else math.log10(error)
    return round(100 * (min(max(power, low), high) - low) / (high - low), 2)
