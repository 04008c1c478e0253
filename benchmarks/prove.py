"""How long a proof takes, beside the same comparison made by a process per rank.

    python benchmarks/prove.py [--tp 2,4,8] [--plan llama|gpt_neox] [--skip-processes]

Each figure is a whole process, imports included. `dtplan prove` runs all its legs: every degree, with and without
sequence parallelism, each with and without loss parallelism. The process per rank is what one writes without it:
torch.multiprocessing spawns `tp` ranks for a leg, each imports torch and transformers, joins over gloo, builds the
same shrunken model and makes the same comparison. Both run in one go, leg for leg; the ratio is of their totals.
Exits with 1 when a proof fails or takes 60 s or more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMISE_S = 60.0
CONFIGS = {
    ("llama", "Llama 2 7B"): {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    ("gpt_neox", "GPT-NeoX-20B"): {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    },
}


def by_processes(plan: str, model: str, degrees: list[int]) -> int:
    """The same legs, one after another, each by freshly spawned processes."""
    import torch.multiprocessing as mp

    from dtplan.prove.proof import legs_of

    for number, leg in enumerate(legs_of(degrees)):
        with tempfile.TemporaryDirectory() as folder:
            args = (plan, model, degrees, number, folder)
            mp.spawn(_rank, args=args, nprocs=leg.tp)  # type: ignore[no-untyped-call]
            found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
        if len(found) != leg.tp or not all(error <= 1e-12 for errors in found for error in errors.values()):
            return 1
    return 0


def _rank(rank: int, plan: str, model: str, degrees: list[int], number: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from dtplan.plan.read import load_plan
    from dtplan.planner.meta import meta_model
    from dtplan.prove.live import live_model
    from dtplan.prove.proof import job_of, legs_of
    from dtplan.prove.ranks import errors_on_rank
    from dtplan.prove.shrink import shrink

    torch.set_num_threads(1)
    legs = legs_of(degrees)
    real = meta_model(model)
    config, _ = shrink(real.config, degrees)
    job, _ = job_of(live_model(type(real), config, 0), load_plan(plan), legs[number], legs, seed=0)
    store = dist.FileStore(f"{folder}/store", legs[number].tp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=legs[number].tp)
    Path(folder, f"{rank}.json").write_text(json.dumps(errors_on_rank(rank, job)))
    dist.barrier()
    dist.destroy_process_group()


def seconds(*command: str) -> tuple[float, int]:
    """Wall time and exit code of a whole process."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], check=False, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start, done.returncode


def main() -> int:
    """Time both, print the table, check the promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", default="2,4,8")
    parser.add_argument("--plan", choices=[plan for plan, _ in CONFIGS], help="only this one")
    parser.add_argument("--skip-processes", action="store_true")
    parser.add_argument("--by-processes", nargs=2, metavar=("PLAN", "MODEL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    degrees = [int(part) for part in given.tp.split(",")]
    if given.by_processes:
        return by_processes(*given.by_processes, degrees)
    kept = True
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} from others; tp {given.tp}, float64, whole processes", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for (plan, label), config in CONFIGS.items():
            if given.plan not in (None, plan):
                continue
            file = Path(name) / f"{plan}.json"
            file.write_text(json.dumps(config))
            ours, code = seconds("-m", "dtplan.cli", "prove", plan, "--model", str(file), "--tp", given.tp)
            kept &= code == 0 and ours < PROMISE_S
            print(
                f"dtplan prove {plan:<9} {label:<13} {ours:7.1f} s  exit {code}  (under {PROMISE_S:.0f} s)", flush=True
            )
            if not given.skip_processes:
                theirs, code = seconds(__file__, "--tp", given.tp, "--by-processes", plan, str(file))
                print(f"  a process per rank, the same legs {theirs:7.1f} s  exit {code}  ratio {theirs / ours:.1f}")
                kept &= code == 0
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
