"""Peak memory of real training steps beside what `dtplan fit` says: predicted, measured, and the ratio, case by case.

    torchrun --nproc-per-node 1 benchmarks/memory.py [--rates] [--json FILE] [CASE ...]
    torchrun --nproc-per-node 2 benchmarks/memory.py ...
    python benchmarks/memory.py --again FILE [--ranks N] [--json FILE]      # predict again what was measured; no GPU

A case is a model of shapes.json with a number of layers, and words: `llama2-7b:8 tp=2 sp ckpt adamw`. Words: `tp=N`,
`shard=N` (default: what is left of the ranks), `sp` (sequence parallelism), `ckpt` (activation checkpointing), `adamw`
(fused; without it gradients are dropped), `mixed` (float32 parameters, bf16 computation), `whole` (the logits are not
cut), `te`, `fp8=RECIPE`, `compile` (`dtplan.compile_model`), `seq=N`, `rows=N` (sequences of one data-parallel rank).
On a CPU (`--device cpu`, gloo) storages are followed operator by operator in place of the CUDA allocator's statistics.
`--rates` measures what the estimate of time takes from a table: rates of matrix products, attention, memory and links.
Times are estimated for an H200 (`dtplan.sizing.gpus`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

import dtplan
from dtplan.planner.bind import bind
from dtplan.planner.memory import Optimizer, Precision
from dtplan.sizing.gpus import GPUS
from dtplan.sizing.peak import WORKSPACE, Peak, peak
from dtplan.sizing.roofline import Estimate, estimate
from dtplan.sizing.schedule import Links
from dtplan.sizing.traced import cut_model, fused, traced_step
from dtplan.sizing.watch import Watch, local_tensors, watched_storages

GIB = 1 << 30
SHAPES: dict[str, dict[str, int]] = json.loads((Path(__file__).parent / "shapes.json").read_text())
CASES = {
    1: [
        "llama2-7b:8 rows=2",
        "llama2-7b:8 rows=2 whole",
        "llama2-7b:8 rows=2 ckpt adamw",
        "llama2-7b:8 rows=1 mixed adamw",
        "llama2-7b:4 rows=1 seq=16384",
        "llama2-70b:2 rows=1 adamw",
        "neox-20b:3 rows=1 adamw",
        "llama2-7b:8 rows=2 te",
        "llama2-7b:8 rows=2 te fp8=current",
        "llama2-7b:8 rows=2 te fp8=delayed adamw",
        "llama2-7b:8 rows=2 te fp8=delayed ckpt",
        "neox-20b:3 rows=1 te",
        "llama2-7b:8 rows=2 compile",
        "llama2-7b:8 rows=2 te compile",
        "llama2-7b:8 rows=2 te fp8=delayed compile",
    ],
    2: [
        "llama2-7b:8 tp=2 rows=2",
        "llama2-7b:8 tp=2 rows=2 sp",
        "llama2-7b:8 tp=2 rows=2 sp ckpt adamw",
        "llama2-7b:8 shard=2 rows=1 adamw",
        "llama2-7b:8 shard=2 rows=1 ckpt mixed adamw",
        "llama2-70b:2 tp=2 rows=1 sp adamw",
        "neox-20b:3 tp=2 rows=1 sp adamw",
        "llama2-7b:8 tp=2 rows=2 sp te",
        "llama2-7b:8 tp=2 rows=2 te fp8=delayed",
        "llama2-7b:8 tp=2 rows=2 sp te fp8=delayed adamw",
        "neox-20b:6 tp=2 rows=2 te compile",
        "llama2-7b:8 tp=2 rows=2 compile",
        "llama2-7b:8 tp=2 rows=2 te compile",
        "llama2-7b:8 tp=2 rows=1 seq=16384 sp te fp8=delayed compile",
    ],
}
DRY = ["tiny:4 rows=2", "tiny:4 rows=2 ckpt adamw"]


@dataclass(frozen=True)
class Case:
    """One model at some degrees."""

    text: str
    model: str
    layers: int
    words: dict[str, str]

    @classmethod
    def of(cls, text: str) -> Case:
        """Read from its text."""
        first, *words = text.split()
        model, _, layers = first.partition(":")
        found = {word.partition("=")[0]: word.partition("=")[2] for word in words}
        known = {"tp", "shard", "sp", "ckpt", "adamw", "mixed", "whole", "te", "fp8", "compile", "seq", "rows"}
        if model not in SHAPES or not layers.isdecimal() or found.keys() - known:
            raise SystemExit(f"{text!r} is no case: give MODEL:LAYERS of {', '.join(SHAPES)}, words {', '.join(known)}")
        return cls(text, model, int(layers), found)

    def has(self, word: str) -> bool:
        """Whether a word was given."""
        return word in self.words

    def number(self, word: str, default: int) -> int:
        """A word's number."""
        return int(self.words.get(word) or default)

    def degrees(self, world: int) -> dict[str, int]:
        """Sizes of the axes."""
        tp = self.number("tp", 1)
        shard = self.number("shard", world // tp)
        return {"replicate": world // tp // shard, "shard": shard, "tp": tp}

    @property
    def precision(self) -> Precision:
        """Dtypes."""
        return Precision.of("bfloat16", "bfloat16" if self.has("mixed") else None)

    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        return self.number("seq", 32 if self.model == "tiny" else 4096)


def model_of(case: Case, device: str, dtype: torch.dtype) -> nn.Module:
    """The model, with random weights."""
    shape = SHAPES[case.model]
    common: dict[str, Any] = {
        "vocab_size": shape["vocabulary"],
        "hidden_size": shape["width"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": case.layers,
        "num_attention_heads": shape["heads"],
        "max_position_embeddings": case.sequence,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            if case.model.startswith("neox"):
                return GPTNeoXForCausalLM(GPTNeoXConfig(**common, hidden_act="gelu_new"))
            return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=shape["kv"]))
    finally:
        torch.set_default_dtype(before)


def predicted(case: Case, world: int) -> tuple[Peak, Estimate]:
    """What `dtplan fit` says; no process group may be there."""
    precision, degrees = case.precision, case.degrees(world)
    model = model_of(case, "meta", getattr(torch, precision.parameters))
    bound = bind(model, **degrees, loss_parallel=not case.has("whole"), sequence_parallel=case.has("sp"))
    if case.has("te"):
        bound = fused(model, bound, fp8=case.has("fp8")).bound
    traced = traced_step(
        cut_model(model, bound),
        "auto",
        tp=degrees["tp"],
        rows=case.number("rows", 1),
        sequence=case.sequence,
        dtype=getattr(torch, precision.compute),
        sequence_parallel=case.has("sp"),
        loss_parallel=not case.has("whole"),
        checkpointing=case.has("ckpt"),
        by_unit=degrees["shard"] * degrees["replicate"] > 1 or precision.mixed,
        te=case.has("te"),
        fp8=case.has("fp8"),
        compiled=case.has("compile"),
    )
    optimizer: Optimizer | None = "adamw" if case.has("adamw") else None
    found = peak(traced, bound, precision, optimizer or "sgd")
    links = Links(GPUS["h200"], degrees, per_host=8)
    guess = estimate(traced, bound, found.held, links, optimizer=optimizer, precision=precision)
    return found, guess


def sharded(case: Case, world: int, device: str) -> nn.Module:
    """The model on its mesh."""
    degrees = case.degrees(world)
    mesh = init_device_mesh(device, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    torch.manual_seed(0)
    options: dict[str, Any] = {"te": "require" if case.has("te") else "off", "fp8": case.words.get("fp8") or None}
    if case.has("mixed"):
        options["mixed_precision"] = "bf16"
    made = dtplan.parallelize(
        model_of(case, device, getattr(torch, case.precision.parameters)),
        mesh,
        sequence_parallel=case.has("sp"),
        loss_parallel=not case.has("whole"),
        activation_checkpointing=case.has("ckpt"),
        **options,
    )
    return dtplan.compile_model(made) if case.has("compile") else made


class Meter:
    """Bytes that are allocated, on a GPU by the allocator's statistics."""

    def __init__(self, device: str) -> None:
        self.device = device

    def measured(self, known: Callable[[], list[Tensor]], step: Callable[[], None]) -> dict[str, Any]:
        """Peaks and seconds of steady steps."""
        step()
        step()
        if self.device == "cpu":
            return self._followed(known(), step)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(4):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        free, total = torch.cuda.mem_get_info()
        return {
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "outside": total - free - torch.cuda.memory_reserved(),
            "between": torch.cuda.memory_allocated(),
            "ms": round(statistics.median(seconds) * 1e3, 2),
        }

    def _followed(self, known: list[Tensor], step: Callable[[], None]) -> dict[str, Any]:
        watch = Watch(known, device="cpu")
        watch.begin("step", "step")
        with watch, watched_storages(watch):
            step()
        watch.end()
        return {"above": watch.segments[0].above}


def measured(case: Case, world: int, device: str) -> dict[str, Any]:
    """Run it."""
    model = sharded(case, world, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if case.has("adamw") else None
    generator = torch.Generator().manual_seed(0)  # the same on all ranks of a tp group
    rows, vocabulary = case.number("rows", 1), SHAPES[case.model]["vocabulary"]
    ids = torch.randint(0, vocabulary, (rows, case.sequence), generator=generator).to(device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    def known() -> list[Tensor]:
        state = optimizer.state.values() if optimizer is not None else ()
        moments = [value for one in state for value in one.values() if isinstance(value, Tensor)]
        return list(local_tensors([ids, *model.parameters(), *model.buffers(), *moments]))

    return Meter(device).measured(known, step)


def rates(world: int) -> dict[str, float]:
    """What the estimate of time reads from a table."""
    x = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(8192, 8192, **x), torch.randn(8192, 8192, **x)
    q, k, v = (torch.randn(2, 32, 4096, 128, **x, requires_grad=True) for _ in range(3))
    work = 4 * q.numel() * 4096 / 2
    small = torch.randn(16, 16, **x)
    found = {"matrix TFLOP/s": 2 * 8192**3 / _seconds(lambda: a @ b) / 1e12}
    found["mul TB/s"] = 3 * a.numel() * 2 / _seconds(lambda: a * b) / 1e12
    attention = torch.nn.functional.scaled_dot_product_attention
    forward = _seconds(lambda: attention(q, k, v, is_causal=True))
    both = _seconds(lambda: attention(q, k, v, is_causal=True).sum().backward())
    found["flash forward TFLOP/s"] = work / forward / 1e12
    found["flash both TFLOP/s"] = 3.5 * work / both / 1e12
    found["host us an operator"] = _seconds(lambda: small * small, 2000) * 1e6
    if world > 1:
        for size in (1 << 20, 16 << 20, 64 << 20, 256 << 20):
            whole = torch.zeros(size // 2, **x)
            part = torch.zeros(size // 2 // world, **x)
            name = f"{size >> 20} MiB ms"
            found[f"all_reduce {name}"] = _seconds(lambda t=whole: dist.all_reduce(t)) * 1e3
            found[f"all_gather {name}"] = _seconds(lambda t=whole, p=part: dist.all_gather_into_tensor(t, p)) * 1e3
            found[f"reduce_scatter {name}"] = _seconds(lambda t=whole, p=part: dist.reduce_scatter_tensor(p, t)) * 1e3
    return {name: round(value, 4) for name, value in found.items()}


def _seconds(run: Callable[[], Any], times: int = 20) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def main() -> None:
    """Predict all, then run all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rates", action="store_true", help="also measure the machine's rates")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path, metavar="FILE", help="an earlier --json: predict its cases again")
    parser.add_argument("--ranks", type=int, default=1, help="of --again")
    args = parser.parse_args()
    if args.again is not None:
        again(args.again, args.ranks, args.json)
        return
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    began = time.monotonic()
    cases = [Case.of(text) for text in args.cases or (CASES[world] if args.device == "cuda" else DRY)]
    said = {case.text: predicted(case, world) for case in cases} if rank == 0 else {}
    dtplan.init(tensor_parallel_degree=1)
    if rank == 0:
        print(f"{torch.__version__}, {world} ranks, predicted after {time.monotonic() - began:.0f} s", flush=True)
        if args.device == "cuda":
            torch.zeros(1, device="cuda")
            free, total = torch.cuda.mem_get_info()
            print(f"{(total - free) / GIB:.2f} of {total / GIB:.2f} GiB are taken before any model", flush=True)
    rows = []
    for case in cases:
        row: dict[str, Any] = {"case": case.text}
        try:
            row |= measured(case, world, args.device)
        except (dtplan.DtplanError, torch.OutOfMemoryError) as error:
            row["error"] = str(error).splitlines()[0]
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        if rank == 0:
            rows.append(row | told(said[case.text]))
            print(line(rows[-1]), flush=True)
    found = rates(world) if args.rates and args.device == "cuda" else {}
    if rank == 0:
        for name, value in found.items():
            print(f"{name:<28} {value:12.4f}")
        print(f"{time.monotonic() - began:.0f} s")
        if args.json:
            args.json.write_text(
                json.dumps({"torch": torch.__version__, "rows": rows, "rates": found}, indent=2) + "\n"
            )
    dist.destroy_process_group()


def again(file: Path, ranks: int, out: Path | None) -> None:
    """What was measured, beside what is said of it now."""
    data = json.loads(file.read_text())
    for row in data["rows"]:
        row.update(told(predicted(Case.of(row["case"]), ranks)))
        print(line(row), flush=True)
    if out is not None:
        out.write_text(json.dumps(data, indent=2) + "\n")


def told(prediction: tuple[Peak, Estimate]) -> dict[str, Any]:
    """A prediction as data."""
    said, guess = prediction
    return {
        "predicted_ms": round(guess.seconds * 1e3, 1),
        "terms_ms": {term.name: round(term.exposed * 1e3, 1) for term in guess.terms},
        "predicted": said.total,
        "state": said.held.parameters + said.held.optimizer,
        "gradients": said.held.gradients,
        "activations": said.activations,
        "rest": said.rest,
        "where": said.where,
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    parts = f"state {row['state'] / GIB:.2f} activations {row['activations'] / GIB:.2f} rest {row['rest'] / GIB:.2f}"
    said = f"predicted {row['predicted'] / GIB:7.3f} GiB ({parts}; {row['where']})"
    if "error" in row:
        return f"{row['case']:<50} {said}  not run: {row['error']}"
    if "above" in row:
        above = row["predicted"] - row["state"] - WORKSPACE
        return f"{row['case']:<50} above the state: predicted {above:,} measured {row['above']:,} bytes; {row['where']}"
    more = f"reserved {row['reserved'] / GIB:.2f} outside {row['outside'] / GIB:.2f} between {row['between'] / GIB:.3f}"
    ratio = row["predicted"] / row["peak"]
    took = f"{row['ms']} ms ({row['predicted_ms']} estimated)"
    return f"{row['case']:<50} measured {row['peak'] / GIB:7.3f} ratio {ratio:.3f}  {took}  {more}  {said}"


if __name__ == "__main__":
    main()
