"""Training a small Llama on real text, with and without fused layers and FP8: the loss goes the same way.

    torchrun --nproc-per-node 2 benchmarks/loss_curve.py [--steps 200] [--json FILE] [--plot FILE] [MODE ...]

The text is the documentation and source of Python's standard library, as bytes; every mode reads the same batches.
Other orders of the batches show what noise is. Prints the mean loss of the last 20 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sysconfig
from pathlib import Path
from typing import Any

os.environ.setdefault("UB_SKIPMC", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import dtplan

DELAYED = {"te": "require", "fp8": "delayed"}
MODES: dict[str, dict[str, Any]] = {
    "unfused bf16": {"te": "off"},
    "unfused bf16, order 2": {"te": "off", "order": 1},
    "unfused bf16, order 3": {"te": "off", "order": 2},
    "fused bf16": {"te": "require"},
    "fused FP8 current": {"te": "require", "fp8": "current"},
    "fused FP8 block": {"te": "require", "fp8": "block"},
    "fused FP8 delayed": DELAYED,
    "fused FP8 delayed, order 2": {**DELAYED, "order": 1},
    "fused FP8 delayed, order 3": {**DELAYED, "order": 2},
}
TAIL = 20


def text() -> torch.Tensor:
    """The standard library's files, one after another, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.long)


def curve(tokens: torch.Tensor, steps: int, *, order: int = 0, **options: Any) -> list[float]:
    """The loss of each step."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cuda", (1, dist.get_world_size()), mesh_dim_names=("shard", "tp")
    )
    dtplan.parallelize(
        model, mesh, mixed_precision="bf16", sequence_parallel=dist.get_world_size() > 1, loss_parallel=True, **options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(order)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1.0, (step + 1) / 20)
        starts = torch.randint(0, len(tokens) - 513, (8,), generator=generator)
        ids = torch.stack([tokens[start : start + 512] for start in starts.tolist()]).cuda()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        dtplan.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def plot(curves: dict[str, list[float]], file: Path) -> None:
    """All curves, each smoothed over five steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for mode, losses in curves.items():
        smooth = [statistics.mean(losses[max(0, i - 4) : i + 1]) for i in range(len(losses))]
        axes.plot(smooth, label=mode, linestyle="--" if "order" in mode else "-", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Every mode in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"of: {'; '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    dtplan.init(tensor_parallel_degree=int(os.environ.get("WORLD_SIZE", "1")))
    tokens, curves = text(), {}
    for mode in args.modes or MODES:
        curves[mode] = curve(tokens, args.steps, **MODES[mode])
        if dist.get_rank() == 0:
            tail = statistics.mean(curves[mode][-TAIL:])
            print(f"{mode:<34} first {curves[mode][0]:.3f}  last {TAIL}: {tail:.4f}", flush=True)
            if args.json:
                found = {"ranks": dist.get_world_size(), "torch": torch.__version__, "curves": curves}
                args.json.write_text(json.dumps(found) + "\n")
    if dist.get_rank() == 0 and args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
