"""How steps scale with GPUs: `benchmarks/step.py` at several numbers of ranks, weakly and strongly.

    python benchmarks/scaling.py [--ranks 1,2,4,8] [--tp 2] [--model llama2-7b] [--layers 8] [--json FILE] [--plot FILE]

tp is at most --tp, FSDP2's shard takes the other ranks. Weak scaling: --batch sequences a rank at any number of ranks.
Strong: the batch of the largest number at all of them. Efficiency is tokens/s a GPU over those at the fewest ranks;
each number of ranks takes its turn by itself, so these ratios feel changes of the machine. --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEP = Path(__file__).with_name("step.py")
MODES = ["dtplan te fp8 delayed+compile", "dtplan te bf16+compile", "dtplan+compile", "fsdp2+compile"]


def placed(mode: str, ranks: int, tp: int) -> str:
    """The mode with the degrees of so many ranks."""
    name, *tags = mode.split("+")
    if name.split()[0] != "fsdp2":
        own = min(tp, ranks)
        name += f" tp{own} shard{ranks // own}"
    return "+".join([name, *tags])


def run(ranks: int, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a mode: what `step.py` measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        options = {"ranks": ranks, "batch": batch, "rounds": args.rounds, "steps": args.steps, "json": out}
        options |= {"model": args.model, "layers": args.layers, "sequence": args.sequence}
        words = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        modes = [placed(mode, ranks, args.tp) for mode in args.modes]
        subprocess.run([sys.executable, str(STEP), *words, *modes], check=True)
        rows: dict[str, dict[str, Any]] = {row["mode"]: row for row in json.loads(out.read_text())["rows"]}
    found = zip(args.modes, modes, strict=True)
    return [{**rows[at], "mode": mode, "ranks": ranks, "batch": batch} for mode, at in found if at in rows]


def efficiency(rows: list[dict[str, Any]]) -> None:
    """Add each row's tokens/s a GPU, over those of the same mode at the fewest ranks."""
    first: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row["ranks"]):
        each = row["tokens_per_s"] / row["ranks"]
        row["efficiency"] = round(each / first.setdefault(row["mode"], each), 3)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Efficiency over ranks, weak and strong side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, charts = plt.subplots(1, len(found), figsize=(10, 4), sharey=True, squeeze=False)
    for chart, (kind, rows) in zip(charts[0], found.items(), strict=True):
        for mode in dict.fromkeys(row["mode"] for row in rows):
            own = [row for row in rows if row["mode"] == mode]
            chart.plot([r["ranks"] for r in own], [r["efficiency"] for r in own], marker="o", label=mode)
        chart.set(title=f"{kind} scaling", xlabel="GPUs", ylim=(0, 1.1))
        chart.set_xscale("log", base=2)
        chart.grid(alpha=0.3)
    charts[0][0].set_ylabel("tokens/s a GPU, over the fewest GPUs")
    charts[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all, print a table, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE", default=MODES)
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank, in weak scaling")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kinds", default="weak,strong")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.plot:
        import matplotlib as mpl  # noqa: F401 - missing, it is missed before the runs and not after
    counts = [int(text) for text in args.ranks.split(",")]
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in args.kinds.split(","):
        found[kind] = [row for n in counts for row in run(n, args.batch * (n if kind == "weak" else max(counts)), args)]
        efficiency(found[kind])
    for kind, rows in found.items():
        for row in rows:
            print(
                f"{kind:<7} {row['ranks']:>2} ranks, batch {row['batch']:>3}  {row['mode']:<36} {row['ms']:8.1f} ms  "
                f"{row['tokens_per_s']:>8} tok/s  {row['peak_gib']:6.2f} GiB  efficiency {row['efficiency']:.3f}"
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
