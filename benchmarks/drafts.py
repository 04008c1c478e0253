"""Plans that `dtplan new --prove` drafts by itself for every causal language model of transformers.

    python benchmarks/drafts.py [--only NAME,...] [--json FILE] [--table docs/drafts.md]

Each model's default config is drafted and proved at tp 2 in a process of its own, with a limit of time and memory.
Where a class needs more than its defaults, hf_configs.py says what. `--table` writes the table of docs/drafts.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_configs import architectures, given
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from dtplan._errors import DtplanError
from dtplan.author.new import WHOLE, New, new_plan, proved

SECONDS, BYTES, TOGETHER = 240, 9 << 30, 2
RESULTS = Path(__file__).parent / "results" / "drafts.json"


def drafted(model_type: str) -> dict[str, Any]:
    """What comes of one model: its verdict, and in a line what was found."""
    try:
        config = CONFIG_MAPPING[model_type](**given(model_type))
    except Exception as error:  # noqa: BLE001 - transformers' own defaults do not fit each other
        return {"verdict": "no config", "says": _line(error)}
    name = CLASSES[model_type]
    config.architectures = [name if isinstance(name, str) else name[0]]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            return outcome(proved(new_plan(folder), folder, tp=[2]))
        except DtplanError as error:
            return {"verdict": "refused", "says": _line(error).replace(folder, model_type)}
        except Exception as error:  # noqa: BLE001 - that is what this looks for
            return {"verdict": "crashed", "says": f"{type(error).__name__}: {_line(error)}"}


def outcome(new: New) -> dict[str, Any]:
    """Of a draft that was made."""
    rules = new.draft.rules
    found = {
        "rules": len(rules),
        "whole": sum(WHOLE in rule.notes for rule in rules),
        "todo": len(new.draft.undecided),
        "sequence_parallel": new.draft.cuts_stream,
    }
    if new.proof is None:
        return {"verdict": "todo" if new.draft.undecided else "not proved", "says": new.unproved, **found}
    first = next((f for leg in new.proof.legs for f in leg.findings), None)
    says = "" if first is None else f"{first.name}: {first.says if first.what == 'plan' else first.kind}"
    return {"verdict": new.proof.verdict, "says": says, **found}


def apart(model_type: str) -> dict[str, Any]:
    """In a process of its own, which may use up its time or memory."""
    there, here = multiprocessing.Pipe()
    began = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(model_type, there))
    process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        found = {"verdict": "stopped", "says": f"after {SECONDS} s, or for want of memory"}
    process.join()
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def _child(model_type: str, pipe: Any) -> None:
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    pipe.send(drafted(model_type))


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def table(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    rows, versions = found["models"], ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    counts: dict[str, int] = {}
    for row in rows.values():
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items(), key=lambda item: -item[1]))
    theirs = {name for name, _ in architectures() if name in rows}
    both = sum(rows[name]["verdict"] == "proved" for name in theirs)
    lines = [_HEAD.format(versions=versions, count=len(rows), told=told, theirs=len(theirs), both=both)]
    for model_type, row in sorted(rows.items()):
        whole = f"{row['whole']} of {row['rules']} rules" if row.get("whole") else ""
        cut = "" if row.get("sequence_parallel", True) else "no"
        says = row["says"].replace("|", "/") if row["verdict"] != "proved" else ""
        lines.append(f"| {model_type} | {row['verdict']} | {whole} | {cut} | {says} |")
    return "\n".join(lines) + "\n"


_HEAD = """# Drafts for the models of transformers

<!-- Made by benchmarks/drafts.py. -->

What `dtplan new --prove --tp 2` ([authoring.md](authoring.md)) makes of the default config of every causal language
model of transformers, with nothing added by a person:

```
python benchmarks/drafts.py --json benchmarks/results/drafts.json --table docs/drafts.md
```

{versions}.
{count} models: **{told}.**
Of the {theirs} for which transformers has a tensor-parallel plan ([hf-plans.md](hf-plans.md)), {both} are proved.
Most of the others are encoders, decoders of encoder-decoders, and models without attention.

"whole": rules with which every rank does all of something that the draft could not cut, taken since a proof found the
plan exact with them. "sequence parallel: no": the proof refuted it, so the plan says `sequence_parallel: R`. "todo" and
"refused" end with exit code 2 and a reason; a person goes on from there.

| model type | verdict | whole | sequence parallel | what was found |
| --- | --- | --- | --- | --- |"""


def main() -> None:
    """All models, or those asked for, into what is known already."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    asked = [name for name in args.only.split(",") if name] or list(CLASSES)
    if unknown := [name for name in asked if name not in CLASSES]:
        parser.error(f"--only: transformers has no causal language model {', '.join(unknown)}")
    known = json.loads(args.json.read_text())["models"] if args.only and args.json.exists() else {}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    with ThreadPoolExecutor(TOGETHER) as pool:
        for model_type, row in zip(asked, pool.map(apart, asked), strict=True):
            known[model_type] = row
            print(f"{model_type:<28} {row['verdict']:<10} {row['seconds']:6.1f} s  {row['says'][:150]}", flush=True)
            found = {"versions": versions, "models": dict(sorted(known.items()))}
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.table:
        args.table.write_text(table(found))


if __name__ == "__main__":
    main()
