"""The page docs/hf-plans.md, made from what benchmarks/hf_plans.py found.

python benchmarks/hf_table.py benchmarks/results/hf-plans.json > docs/hf-plans.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

_HEAD = """\
# The plans that transformers ships, proved

<!-- Made by benchmarks/hf_table.py from benchmarks/results/hf-plans.json. -->

transformers gives many of its causal language models a tensor-parallel plan (`base_model_tp_plan`). Each was imported
([importing.md](importing.md)) and proved ([prove.md](prove.md)): logits, next-token loss and the gradient of every
parameter of a small model in float64, on every rank, within 1e-12 of the unsharded model. Then transformers applied the
same plan itself, on two gloo processes, to the same weights, and was compared by the same measure. **A plan is called
refuted only where transformers' own run is wrong or crashes as well.**

```
python benchmarks/hf_plans.py      # minutes; --only NAME,... for some
```

Versions: {versions}.
"""
_HOW = """\
## How to read it

- *dense cut*: of the parameters outside of the two embeddings and the stacked experts, the share that the plan cuts, in
  the small model. **A plan that cuts nothing is exact as well**, and saves nothing. *experts cut*: the same of experts.
- The configs are the defaults made small as `dtplan prove` makes them, or set by hand (`benchmarks/hf_configs.py`), one
  layer of each kind. Weights are random, attention is eager, there is no cache and no dropout; float32 casts in models
  are read as float64.
- transformers shards the live model here (`apply_tensor_parallelism`, then ties). Through `from_pretrained` with a
  `DistributedConfig` the faults of apertus, gemma3n_text, doge and inkling_text were seen as well (by hand, once).
- *options*: what was turned over in the config, one at a time; biases together. A number without names: that many were
  proved at tp 2.
- At degrees that a unit forbids (2 kv heads over 4 ranks) nothing was run: transformers cuts features, and its model
  then fails inside attention.
- Not covered: parameters without a gradient from a loss on tokens (indexers of sparse attention, towers for images or
  sound), training over several steps, caches, generation, other backends of attention and experts, bfloat16, GPUs.
"""


_ALTERNATING = (
    "gives other numbers on a live model: it cuts the rows of a checkpoint, where two halves alternate, and reorders "
    "each rank's own while it loads; inkling2_text loaded so is right up to the order of rows in a gradient"
)


def page(data: Record) -> str:
    """The whole page."""
    rows = {name: _row(told) for name, told in data["architectures"].items()}
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    parts = [_HEAD.format(versions=versions), _counts(rows), _refuted(rows), _odd(rows), _all(rows), _HOW]
    return "\n".join(part for part in parts if part)


def _row(told: Record) -> dict[str, Any]:
    """One architecture: its case without options, the verdict of both, and its options by verdict."""
    base = told["cases"][""]
    options: dict[str, list[str]] = {}
    for case, each in told["cases"].items():
        if case:
            options.setdefault(verdict(each), []).append(case)
    return {"class": told["class"], "base": base, "verdict": verdict(base), "options": options, "cases": told["cases"]}


def verdict(case: Record) -> str:
    """`refuted` only where transformers fails as well; `differs` where the two do not agree."""
    own = case.get("transformers", {}).get("verdict")
    if case["verdict"] == "refuted":
        return "refuted" if own in ("wrong", "crash") else "differs"
    if case["verdict"] == "proved" and own in ("wrong", "crash"):
        return "proved, but"
    return str(case["verdict"])


def _counts(rows: Mapping[str, Any]) -> str:
    by = {
        name: [row for row in rows.values() if row["verdict"] == name] for name in ("proved", "proved, but", "refuted")
    }
    proved = by["proved"] + by["proved, but"]
    nothing = sum(share(row["base"], "dense") == 0 for row in proved)
    little = sum(0 < (share(row["base"], "dense") or 0) < 0.85 for row in proved)
    other = len(rows) - len(proved) - len(by["refuted"])
    cases = [each for row in rows.values() for case, each in row["cases"].items() if case]
    refuted = sum(verdict(each) == "refuted" for each in cases)
    lines = [
        "## Counts",
        "",
        f"{len(rows)} architectures: **{len(proved)} proved, {len(by['refuted'])} refuted, {other} not run.**",
        f"Of the proved plans {nothing} cut no dense parameter at all, and {little} cut less than 85 % of them.",
        f"With options turned over: {len(cases)} more cases, {refuted} of them refuted.",
        "",
    ]
    return "\n".join(lines)


def share(case: Record, what: str) -> float | None:
    """The cut share of dense or expert parameters; None where there are none."""
    return case[f"{what}_cut"] / case[what] if case.get(what) else None


def _refuted(rows: Mapping[str, Any]) -> str:
    lines = ["## Refuted", "", "| model type | case | found by the proof | transformers' own run |"]
    lines.append("| --- | --- | --- | --- |")
    for name, row in rows.items():
        told: dict[str, dict[str, Record]] = {}
        for case, each in row["cases"].items():
            if verdict(each) == "refuted":
                told.setdefault(_found(each), {})[case or "as it is"] = each
        for found, cases in told.items():
            spelled = ", ".join(cases) if len(cases) < len(row["cases"]) else "every case"
            lines.append(f"| {name} | {spelled} | {found}{_wrong(cases.values())} | {_own(cases.values())} |")
    return "\n".join([*lines, ""])


def _found(case: Record) -> str:
    """The first finding, without numbers."""
    findings = case.get("findings") or []
    if not findings:
        return _cell(case.get("reason", ""))
    first = findings[0]
    where = _generic(first["name"])
    if first["kind"] == "crash":
        return _cell(f"`{where}` crashes: {first['says'].split('; shapes')[0][:140]}")
    tried = f"; {_generic(first['advice'])}: {first['tried']}" if first["tried"].startswith("with this") else ""
    return _cell(f"`{where}`: {first['what']}, {first['kind']}{tried}")


def _wrong(cases: Iterable[Record]) -> str:
    """How many tensors are wrong, and by how much the worst is."""
    wrong = [case["wrong"] for case in cases if case.get("wrong")]
    if not wrong:
        return ""
    worst = max(max(errors.values()) for errors in wrong)
    return f"; {_span([len(errors) for errors in wrong])} tensors wrong, by up to {worst:.0%}"


def _own(cases: Iterable[Record]) -> str:
    crashes = {case["transformers"]["reason"] for case in cases if case["transformers"]["verdict"] == "crash"}
    if crashes:
        return _cell("crashes: " + "; ".join(sorted(reason[:140] for reason in crashes)))
    both = [(case["transformers"]["wrong"], case.get("wrong", {})) for case in cases]
    same = all(
        theirs.keys() == ours.keys() and all(abs(theirs[n] - ours[n]) <= 1e-6 * ours[n] for n in ours)
        for theirs, ours in both
    )
    counted = _span([len(theirs) for theirs, _ in both])
    return f"wrong: {'the same' if same else counted} tensors{', by the same' if same else ''}"


def _span(numbers: Iterable[int]) -> str:
    numbers = sorted(set(numbers))
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _odd(rows: Mapping[str, Any]) -> str:
    lines = []
    for name, row in rows.items():
        for case, each in row["cases"].items():
            if verdict(each) == "proved, but":
                own = each["transformers"]
                told = f"crashes: {own['reason']}" if own["verdict"] == "crash" else _ALTERNATING
                lines.append(
                    f"- {name}{f' ({case})' if case else ''}: the plan is exact; applied by transformers it {told}"
                )
            elif verdict(each) == "differs":
                lines.append(
                    f"- {name}{f' ({case})' if case else ''}: refuted here, exact in transformers: {_found(each)}"
                )
            elif verdict(each) == "not run":
                own = each.get("transformers", {}).get("verdict", "not run")
                lines.append(
                    f"- {name}{f' ({case})' if case else ''}: not run: {each.get('reason', '')}; transformers: {own}"
                )
    return (
        "\n".join(["## Not run, and where the two do not agree", "", *(_cell(line) for line in lines), ""])
        if lines
        else ""
    )


def _all(rows: Mapping[str, Any]) -> str:
    lines = [
        "## All",
        "",
        "| model type | class | verdict | tp | dense cut | experts cut | left alone | options |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {' | '.join(_columns(name, row))} |" for name, row in rows.items()]
    return "\n".join([*lines, ""])


def _columns(name: str, row: Mapping[str, Any]) -> Iterator[str]:
    base = row["base"]
    yield name
    yield row["class"].removesuffix("ForCausalLM")
    yield row["verdict"]
    yield ", ".join(map(str, base.get("degrees", ())))
    for what in ("dense", "experts"):
        part = share(base, what)
        yield "" if part is None else f"{part:.0%}"
    yield str(base.get("left_alone", ""))
    told = [
        f"{len(cases)} {found}" if found == "proved" else f"{found}: {', '.join(cases)}"
        for found, cases in row["options"].items()
    ]
    yield "; ".join(told)


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()


if __name__ == "__main__":
    sys.stdout.write(page(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
