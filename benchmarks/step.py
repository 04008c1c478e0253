"""One training step (forward and backward) of Llama 2 7B layers: dtplan beside its peers on the same GPUs.

    torchrun --nproc-per-node 2 benchmarks/step.py [--layers 16] [--sequence 4096] [--batch 2] [--rounds 5] [MODE ...]

All modes are built first and then take turns, round by round, so that a change of the machine's speed hits all of
them; ratios are taken within a round. `+compile` compiles each decoder layer. Rates are of the whole job; utilisation
is of the matrix rate that is measured in the same run. Writes a table, and JSON with --json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dtplan

WIDTH, FFN, VOCABULARY = 4096, 11008, 32000
GIB = 1 << 30


def config(layers: int, sequence: int) -> LlamaConfig:
    """Llama 2 7B with fewer layers."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )


def live(settings: LlamaConfig) -> nn.Module:
    """The same bf16 model on every rank."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = LlamaForCausalLM(settings).to(torch.bfloat16)
        return model


def tp_mesh() -> Any:
    """All ranks on one tp axis."""
    return init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))


def with_dtplan(settings: LlamaConfig, **options: bool) -> nn.Module:
    """Dtplan's built-in plan."""
    return dtplan.parallelize(live(settings), tp_mesh(), **options)


def with_hand_plan(settings: LlamaConfig, *, sequence_parallel: bool) -> nn.Module:
    """A careful plan of torch's own styles: grouped inputs, as a user of parallelize_module would write it."""
    between = Shard(1) if sequence_parallel else Replicate()
    out = functools.partial(RowwiseParallel, output_layouts=between, use_local_output=not sequence_parallel)
    plan: dict[str, Any] = {
        "model.embed_tokens": out(input_layouts=Replicate()),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "model.layers.*.self_attn.o_proj": out(),
        "model.layers.*.mlp.down_proj": out(),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    if sequence_parallel:
        for name in ("model.norm", "model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"):
            plan[name] = SequenceParallel(use_local_output=False)
    return parallelize_module(live(settings), tp_mesh(), plan)


def with_transformers(settings: LlamaConfig, folder: Path) -> nn.Module:
    """Transformers' own tensor parallelism, which loads from a folder."""
    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        live(settings).save_pretrained(folder)
    dist.barrier()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.bfloat16)
    return model


def with_fsdp(settings: LlamaConfig) -> nn.Module:
    """FSDP2 alone: every rank has its own part of the batch."""
    model = live(settings)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
    return fully_shard(model, mesh=mesh)


def builders(settings: LlamaConfig, folder: Path) -> dict[str, Callable[[], nn.Module]]:
    """Mode -> how its model is made."""
    return {
        "dtplan": lambda: with_dtplan(settings),
        "dtplan loss-parallel": lambda: with_dtplan(settings, loss_parallel=True),
        "dtplan sequence+loss-parallel": lambda: with_dtplan(settings, sequence_parallel=True, loss_parallel=True),
        "hand plan": lambda: with_hand_plan(settings, sequence_parallel=False),
        "hand plan sequence-parallel": lambda: with_hand_plan(settings, sequence_parallel=True),
        "transformers": lambda: with_transformers(settings, folder),
        "fsdp2": lambda: with_fsdp(settings),
    }


class Run:
    """One mode: its model, its batch, and the times of its steps."""

    def __init__(self, mode: str, make: Callable[[], nn.Module], batch: int, sequence: int) -> None:
        before = torch.cuda.memory_allocated()
        self.mode, self.seconds, self.peak = mode, [], 0.0
        self.model = make().train()
        if mode.endswith("+compile"):
            for layer in self.model.model.layers:  # type: ignore[union-attr]
                layer.compile()
        self.own = torch.cuda.memory_allocated() - before
        data_ranks = dist.get_world_size() if mode.startswith("fsdp2") else 1
        rows = max(1, batch // data_ranks)
        self.tokens = rows * data_ranks * sequence
        generator = torch.Generator().manual_seed(dist.get_rank() if data_ranks > 1 else 0)
        self.ids = torch.randint(0, VOCABULARY, (rows, sequence), generator=generator).cuda()

    def step(self) -> float:
        """Forward and backward; gradients are dropped."""
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None
        return float(loss.detach())

    def round(self, steps: int) -> float:
        """The median of some steps after one that is not counted, in seconds; notes the peak memory."""
        self.step()
        resident = torch.cuda.memory_allocated() - self.own  # the other modes' models
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        self.peak = max(self.peak, (torch.cuda.max_memory_allocated() - resident) / GIB)
        self.seconds.append(statistics.median(times))
        return self.seconds[-1]


def matrix_rate(size: int = 8192) -> float:
    """FLOP/s of a large bf16 matrix product on random data, measured here and now."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(30):
        a @ b
    torch.cuda.synchronize()
    return 30 * 2 * size**3 / (time.perf_counter() - start)


def flops(tokens: int, layers: int, sequence: int) -> float:
    """Model FLOPs of a step: 6 a weight and token (Kaplan et al. 2020), and causal attention counted once."""
    weights = layers * (4 * WIDTH * WIDTH + 3 * WIDTH * FFN) + WIDTH * VOCABULARY
    return tokens * (6 * weights + 6 * layers * sequence * WIDTH)


def main() -> None:
    """Build, take turns, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtplan.init(tensor_parallel_degree=int(os.environ.get("WORLD_SIZE", "1")))
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = config(args.layers, args.sequence)
    folder = Path(os.environ.get("STEP_FOLDER", tempfile.gettempdir())) / f"dtplan-step-{args.layers}"
    makers = builders(settings, folder)
    modes = args.modes or [name + suffix for name in makers for suffix in ("", "+compile")]
    runs: list[Run] = []
    failed: dict[str, str] = {}
    for mode in modes:
        try:
            run = Run(mode, makers[mode.removesuffix("+compile")], args.batch, args.sequence)
            run.loss = run.step()  # type: ignore[attr-defined]
            run.step()
            runs.append(run)
        except Exception as error:  # noqa: BLE001 - a peer that cannot run is a row of the table
            failed[mode] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
            gc.collect()
            torch.cuda.empty_cache()
    rates = []
    for _ in range(args.rounds):
        rates.append(matrix_rate())
        for run in runs:
            run.round(args.steps)
    rows = [row(run, args, statistics.median(rates) * world) for run in runs]
    if rank == 0:
        report(rows, failed, statistics.median(rates), args)
    dist.destroy_process_group()


def row(run: Run, args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """The figures of one mode."""
    seconds = statistics.median(run.seconds)
    return {
        "mode": run.mode,
        "ms": round(seconds * 1e3, 1),
        "min_ms": round(min(run.seconds) * 1e3, 1),
        "max_ms": round(max(run.seconds) * 1e3, 1),
        "tokens_per_s": round(run.tokens / seconds),
        "utilisation": round(flops(run.tokens, args.layers, args.sequence) / seconds / rate, 3),
        "peak_gib": round(run.peak, 2),
        "loss": round(run.loss, 4),  # type: ignore[attr-defined]
        "per_token": [second / run.tokens for second in run.seconds],
    }


def report(rows: list[dict[str, Any]], failed: dict[str, str], rate: float, args: argparse.Namespace) -> None:
    """The table; ratios are of the time a token, within a round, to dtplan's own mode of the same kind."""
    print(f"{args.layers} layers, sequence {args.sequence}, batch {args.batch}, {args.rounds} rounds")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"matrix rate {rate / 1e12:.0f} TFLOP/s a GPU")
    best = min((r for r in rows if r["mode"].startswith("dtplan")), key=lambda r: r["ms"], default=None)
    for r in rows:
        ratio = ""
        if best is not None:
            pairs = [other / own for other, own in zip(r["per_token"], best["per_token"], strict=True)]
            ratio = f"{statistics.median(pairs):.3f} ({min(pairs):.3f}-{max(pairs):.3f}) x {best['mode']}"
        print(
            f"{r['mode']:<42} {r['ms']:7.1f} ms ({r['min_ms']:.1f}-{r['max_ms']:.1f})  {r['tokens_per_s']:>6} tok/s  "
            f"util {r['utilisation']:.3f}  {r['peak_gib']:6.2f} GiB  loss {r['loss']:.4f}  {ratio}"
        )
    for mode, error in failed.items():
        print(f"{mode:<42} not run: {error}")
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "dtplan": dtplan.__version__}
        found = {"device": torch.cuda.get_device_name(), "matrix_tflops": rate / 1e12, "versions": versions}
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "modes")}
        args.json.write_text(json.dumps({**found, **settings, "rows": rows, "failed": failed}, indent=2) + "\n")


if __name__ == "__main__":
    main()
