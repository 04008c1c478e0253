"""What a proof says: data with a JSON form, and nothing that was not run."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dtplan.prove.shrink import Choice

Verdict = Literal["proved", "refuted", "not run"]
SCHEMA_VERSION = 1
MEASURE = (
    "largest difference over largest magnitude of the unsharded model's, per tensor, on every rank: logits, "
    "next-token loss, every gradient"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One arrangement in which the sharded model is compared: sizes of axes (ranks), and the two switches."""

    tp: int
    shard: int = 1
    replicate: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    world: Literal["simulated ranks", "gloo processes"] = "simulated ranks"

    @property
    def mesh(self) -> dict[str, int]:
        """Axes by name, those that are needed."""
        axes = {"replicate": self.replicate, "shard": self.shard, "tp": self.tp}
        fsdp = self.replicate * self.shard > 1
        return {name: size for name, size in axes.items() if name == "tp" or (fsdp and (size > 1 or name == "shard"))}

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.tp * self.shard * self.replicate

    def __str__(self) -> str:
        switches = [name for name in ("sequence_parallel", "loss_parallel") if getattr(self, name)]
        return ", ".join([" x ".join(f"{name} {size}" for name, size in self.mesh.items()), *switches])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause: which tensor or module, the rule that it came from, what the ranks hold, and what to write."""

    name: str
    what: Literal["plan", "crash", "output", "gradient", "parameter", "logits", "loss"]
    kind: str
    """Short and stable: `partial sum`, `counted n times`, `another shard`, `ranks disagree`, `contaminated`..."""
    says: str
    rule: str = ""
    advice: str = ""
    """What to write."""
    tried: str = ""
    """What a run of the leg with the advice gave; empty where none was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegResult:
    """What came of a leg. ``largest_error`` is over all ranks and tensors, ``wrong`` their errors above the bound."""

    leg: Leg
    verdict: Verdict
    tensors: int = 0
    steps: int = 0
    """Optimizer steps after which the parameters were compared as well."""
    largest_error: float | None = None
    largest_at: str = ""
    wrong: Mapping[str, float] = dataclasses.field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    """Why it was not run."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """The smallest form of a refuted leg that was found to fail in the same way; it was run."""

    leg: Leg
    batch: tuple[int, int]
    sizes: Mapping[str, Any]
    """Fields that are smaller than shrinking for this degree makes them."""
    choices: tuple[Choice, ...]
    finding: Finding
    replay: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All legs of one plan on one shrunken model."""

    plan: str
    digest: str
    model: str
    architecture: str
    seed: int
    bound: float
    batch: tuple[int, int]
    versions: Mapping[str, str]
    choices: tuple[Choice, ...]
    legs: tuple[LegResult, ...]
    zero_gradients: tuple[str, ...] = ()
    """Parameters whose true gradient is zero up to rounding: compared against the largest gradient of all."""
    smallest: Smallest | None = None
    idle: tuple[str, ...] = ()
    """Parameters that take no part in a forward on tokens, such as those for images: nothing is said of them."""
    dtype: str = "float64"
    measure: str = MEASURE

    @property
    def verdict(self) -> Verdict:
        """Refuted if any leg is; proved only if every leg is."""
        found = {leg.verdict for leg in self.legs}
        if "refuted" in found:
            return "refuted"
        return "not run" if "not run" in found or not found else "proved"

    @property
    def exit_code(self) -> int:
        """0 proved, 1 refuted, 2 not run."""
        return {"proved": 0, "refuted": 1, "not run": 2}[self.verdict]

    @property
    def replay(self) -> str:
        """One command that runs all of it again; the degrees and the seed decide the shrunken model."""
        return self._command([result.leg for result in self.legs])

    def replay_of(self, leg: Leg, batch: tuple[int, int], sizes: Mapping[str, Any]) -> str:
        """The command that runs one leg with other sizes."""
        given = [f"{field}={json.dumps(value)}" for field, value in sizes.items()]
        options = [word for text in given for word in ("--set", text)]
        return self._command([leg], "--batch", "x".join(map(str, batch)), *options)

    def _command(self, legs: Sequence[Leg], *options: str) -> str:
        degrees = ",".join(map(str, sorted({leg.tp for leg in legs})))
        parts = ["dtplan", "prove", self.plan, "--model", self.model, "--tp", degrees]
        for switch in ("sequence_parallel", "loss_parallel"):
            settings = {getattr(leg, switch) for leg in legs}
            setting = "both" if len(settings) > 1 else ("on" if True in settings else "off")
            if (switch, setting) != ("loss_parallel", "both"):
                parts += ["--" + switch.replace("_", "-"), setting]
        parts += ["--seed", str(self.seed)]
        parts += ["--fsdp"] * any(leg.shard * leg.replicate > 1 for leg in legs)
        return shlex.join([*parts, *options])

    def to_json(self) -> dict[str, Any]:
        """The proof as JSON data."""
        data = dataclasses.asdict(self)
        for told, leg in zip(data["legs"], self.legs, strict=True):
            told["mesh"], told["ranks"] = leg.leg.mesh, leg.leg.ranks
            told["wrong"] = {name: _finite(error) for name, error in leg.wrong.items()}
            told["largest_error"] = _finite(leg.largest_error)
        return {"schema_version": SCHEMA_VERSION, "verdict": self.verdict, "replay": self.replay, **data}


def _finite(error: float | None) -> float | str | None:
    """JSON has no infinity."""
    return error if error is None or error - error == 0 else str(error)
