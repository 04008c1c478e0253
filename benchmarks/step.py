"""One training step (forward and backward) of a decoder's layers: dtplan beside its peers on the same GPUs.

    python benchmarks/step.py [--ranks 2] [--model llama2-7b] [--layers 16] [--sequence 4096] [--batch 2] [MODE ...]

On a 2-D mesh a mode names its degrees, as `dtplan te bf16 tp2 shard2+compile`; --batch is the whole batch of all modes.
Without GPUs it is a dry run on gloo: `--model tiny --layers 2 --sequence 64 --batch 4 --ranks 4 "dtplan tp2 shard2"`.

Every mode (see benchmarks/step_modes.py) runs in torchrun processes of its own, so that no mode meets another's global
state. They are built, a few at a time, and then take turns, round by round, so that a change of the machine's speed
hits all of them; ratios are taken within a round. Utilisation is of the matrix rate that is measured in the same run.
Prints a table, and writes JSON with --json, after each round. The models of all modes are on the GPUs at the same time
(16 layers of Llama 2 7B at tp 2: 5 GiB a mode between its turns, 17 with a CUDA graph), so about ten modes fit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHAPES: dict[str, dict[str, int]] = json.loads((HERE / "shapes.json").read_text())
DEFAULT_MODES = [
    "dtplan+compile",
    "dtplan te bf16+compile",
    "dtplan te bf16 overlap+compile+graph",
    "dtplan te fp8 delayed+compile",
    "dtplan te fp8 delayed+compile+graph",
    "hand plan+compile",
    "transformers+compile",
    "fsdp2+compile",
    "megatron bf16",
    "megatron fp8 delayed",
    "megatron fp8 delayed sp overlap",
]


BUILDERS = 3
"""So many modes are built at the same time: compilers want cores, and a mode's first steps GPU memory."""


class Worker:
    """The processes of one mode."""

    def __init__(self, mode: str, number: int, args: argparse.Namespace, listener: Listener, logs: Path) -> None:
        self.mode, self.rounds, self.why = mode, [], ""
        self.log = logs / f"{number:02d}.txt"
        port = listener.address[1]
        settings = [str(v) for key in ("model", "layers", "sequence", "batch") for v in (key, getattr(args, key))]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)),
            *("--master-port", str(29600 + number), str(HERE / "step_modes.py"), mode, str(port)),
            *settings,
            *("folder", tempfile.gettempdir()),
        ]
        log = self.log.open("w")
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.pipe: Connection | None = None

    def ask(self, what: Any, seconds: float = 300) -> Any:
        """The answer of rank 0, or None if the processes are gone; then ``why`` tells."""
        if self.pipe is None:
            self.why = self.why or self._last_error()
            return None
        try:
            self.pipe.send(what)
            end = time.monotonic() + seconds
            while not self.pipe.poll(1):
                if self.process.poll() is not None or time.monotonic() > end:
                    return self._gone()
            return self.pipe.recv()
        except (EOFError, OSError):
            return self._gone()

    def _gone(self) -> None:
        self.pipe, self.why = None, self._last_error()
        self.end()

    def end(self) -> None:
        """The launcher and its ranks."""
        self.process.terminate()  # a launcher that is killed leaves its ranks, and what they hold of the GPUs

    def _last_error(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line.strip() for line in lines if "Error" in line and "ChildFailedError" not in line]
        return (errors[-1] if errors else "no answer")[:200]


def connect(workers: list[Worker], listener: Listener, seconds: float) -> None:
    """Wait until every worker's rank 0 has called, or its processes ended."""
    by_mode = {worker.mode: worker for worker in workers}
    end = time.monotonic() + seconds
    listener._listener._socket.settimeout(2)  # type: ignore[attr-defined]  # noqa: SLF001 - Listener has no timeout
    while any(w.pipe is None and w.process.poll() is None for w in workers) and time.monotonic() < end:
        try:
            pipe = listener.accept()
        except TimeoutError:
            continue
        by_mode[pipe.recv()].pipe = pipe


def main() -> None:
    """Start all modes, let them take turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=SHAPES, default="llama2-7b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=450, help="begin no round after this time")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--sequences", default="", help="afterwards, a round of every mode at each of these lengths")
    parser.add_argument("--profile", action="store_true", help="also print each mode's longest kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="of the lengths; needs matplotlib")
    args = parser.parse_args()
    began = time.monotonic()
    with Listener(("127.0.0.1", 0), authkey=b"step") as listener:
        modes = args.modes or DEFAULT_MODES
        workers = [Worker(mode, number, args, listener, args.logs) for number, mode in enumerate(modes)]
        connect(workers, listener, 180)
        with ThreadPoolExecutor(BUILDERS) as builders:
            for worker, _ in zip(workers, builders.map(lambda w: w.ask("build", 120), workers), strict=True):
                print(f"{time.monotonic() - began:5.0f} s  {worker.mode}: {worker.why or 'built'}", flush=True)
        rates = []
        for _ in range(args.rounds):
            alive = [worker for worker in workers if worker.pipe is not None]
            if not alive or time.monotonic() - began > args.seconds:
                break
            rates.append(alive[0].ask("rate"))
            for worker in alive:
                if (found := worker.ask(args.steps, 60)) is not None:
                    worker.rounds.append(found)
            write(workers, rates, args, {})
        lengths = [int(text) for text in args.sequences.split(",") if text]
        longer = {length: {w.mode: w.ask(("sequence", length), 120) for w in workers if w.pipe} for length in lengths}
        write(workers, rates, args, longer)
        report(workers, rates, args, longer)
        if args.plot:
            plot(rows_of(workers, rates, args)[0], longer, args)
        for worker in workers if args.profile else ():
            print(f"--- {worker.mode}\n{worker.ask('profile', 90) or worker.why}", flush=True)
        for worker in workers:
            worker.ask("end", 5) if worker.pipe is not None else None
            worker.end()


def flops(tokens: int, args: argparse.Namespace) -> float:
    """Model FLOPs of a step: 6 a weight and token (Kaplan et al. 2020), and causal attention counted once."""
    shape = SHAPES[args.model]
    head = shape["width"] // shape["heads"]
    attention = shape["width"] * (2 * shape["width"] + 2 * shape["kv"] * head)
    mlp = (2 if args.model.startswith("neox") else 3) * shape["width"] * shape["ffn"]
    weights = args.layers * (attention + mlp) + shape["width"] * shape["vocabulary"]
    return tokens * (6 * weights + 6 * args.layers * args.sequence * shape["width"])


def figures(worker: Worker, args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Of one mode: the median of the rounds' medians, and a token's time in each round."""
    medians = [statistics.median(found["seconds"]) for found in worker.rounds]
    tokens, seconds = worker.rounds[0]["tokens"], statistics.median(medians)
    shares = [h / s for found in worker.rounds for h, s in zip(found["host"], found["seconds"], strict=True)]
    return {
        "mode": worker.mode,
        "ms": round(seconds * 1e3, 1),
        "min_ms": round(min(medians) * 1e3, 1),
        "max_ms": round(max(medians) * 1e3, 1),
        "host_share": round(statistics.median(shares), 2),
        "tokens_per_s": round(tokens / seconds),
        "utilisation": round(flops(tokens, args) / seconds / (rate * args.ranks), 3),
        "peak_gib": round(max(found["peak_gib"] for found in worker.rounds), 2),
        "taken_gib": round(max(found["taken_gib"] for found in worker.rounds), 2),
        "loss": round(worker.rounds[0]["loss"], 4),
        "per_token": [median / tokens for median in medians],
    }


def ratio(other: dict[str, Any], own: dict[str, Any]) -> tuple[float, float, float]:
    """How many times as long ``other`` takes for a token: median, least and most over the rounds."""
    pairs = [a / b for a, b in zip(other["per_token"], own["per_token"], strict=False)]
    return statistics.median(pairs), min(pairs), max(pairs)


def rows_of(workers: list[Worker], rates: list[float], args: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Figures of all modes that ran, and the matrix rate."""
    rate = statistics.median(rates) if rates else float("nan")
    return [figures(worker, args, rate) for worker in workers if worker.rounds], rate


def failed(workers: list[Worker]) -> dict[str, str]:
    """Mode -> why it did not run, or not to the end."""
    return {worker.mode: worker.why for worker in workers if worker.why or not worker.rounds}


def report(workers: list[Worker], rates: list[float], args: argparse.Namespace, longer: dict[int, Any]) -> None:
    """The table, with ratios to dtplan's best mode, and what longer sequences gave."""
    rows, rate = rows_of(workers, rates, args)
    print(f"{args.model}, {args.layers} layers, sequence {args.sequence}, batch {args.batch}, {args.ranks} ranks")
    print(f"{_versions()}; matrix rate {rate / 1e12:.0f} TFLOP/s a GPU; {len(rates)} rounds")
    best = min((r for r in rows if r["mode"].startswith("dtplan")), key=lambda r: r["ms"], default=None)
    for r in sorted(rows, key=lambda r: r["ms"]):
        told = "{:.3f} ({:.3f}-{:.3f})".format(*ratio(r, best)) if best else ""
        print(
            f"{r['mode']:<44} {r['ms']:7.1f} ms ({r['min_ms']:.1f}-{r['max_ms']:.1f})  {r['tokens_per_s']:>6} tok/s  "
            f"util {r['utilisation']:.3f}  host {r['host_share']:.2f}  "
            f"{r['peak_gib']:6.2f} of {r['taken_gib']:.2f} GiB  loss {r['loss']:.4f}  x {told}"
        )
    for mode, why in failed(workers).items():
        print(f"{mode:<44} not run to the end: {why}")
    for length, by_mode in longer.items():
        for mode, found in by_mode.items():
            if found is None:
                print(f"{length:>7}  {mode:<44} out of memory")
                continue
            seconds = statistics.median(found["seconds"])
            print(f"{length:>7}  {mode:<44} {found['tokens'] / seconds:9.0f} tok/s  {found['peak_gib']:6.1f} GiB")


def plot(rows: list[dict[str, Any]], longer: dict[int, Any], args: argparse.Namespace) -> None:
    """Peak memory and tokens/s of each mode by the length of a sequence; a line ends where memory does."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (memory, speed) = plt.subplots(1, 2, figsize=(10, 4))
    for row in rows:
        found = {length: by_mode[row["mode"]] for length, by_mode in longer.items() if by_mode.get(row["mode"])}
        lengths = [args.sequence, *found]
        peaks = [row["peak_gib"], *(f["peak_gib"] for f in found.values())]
        rates = [row["tokens_per_s"], *(f["tokens"] / statistics.median(f["seconds"]) for f in found.values())]
        memory.plot(lengths, peaks, marker="o", label=row["mode"])
        speed.plot(lengths, [rate / 1e3 for rate in rates], marker="o", label=row["mode"])
    memory.set(xlabel="tokens of a sequence", ylabel="peak of a GPU, GiB", ylim=(0, None))
    speed.set(xlabel="tokens of a sequence", ylabel="thousand tokens/s, all GPUs", ylim=(0, None))
    for chart in (memory, speed):
        chart.set_xscale("log", base=2)
        chart.set_xticks([args.sequence, *longer], [f"{n // 1024}k" for n in (args.sequence, *longer)])
        chart.grid(alpha=0.3)
    memory.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.plot, dpi=120)


def write(workers: list[Worker], rates: list[float], args: argparse.Namespace, longer: dict[int, Any]) -> None:
    """What is known so far, as JSON."""
    if not args.json:
        return
    rows, rate = rows_of(workers, rates, args)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "modes", "logs", "plot")}
    found = {"matrix_tflops": rate / 1e12, "versions": _versions(), "environment": _environment()}
    data = {**found, **settings, "rows": rows, "failed": failed(workers), "longer": longer}
    args.json.write_text(json.dumps(data, indent=2) + "\n")


def _versions() -> dict[str, str]:
    return {n: metadata.version(n) for n in ("torch", "transformers", "dtplan") if _installed(n)}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith(("NCCL_", "NVTE_", "UB_", "CUDA_DEVICE"))}


if __name__ == "__main__":
    main()
