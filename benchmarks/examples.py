"""Property examples a second: how many times a Hypothesis property can shard a tiny model and compare it.

    python benchmarks/examples.py [--examples 40] [--rounds 3]

An example is a one-layer Llama with 4 heads in float64: built, run unsharded, then sharded at tp 2 and compared,
logits, loss and every gradient on both ranks. Worlds: simulated ranks (threads of this process) and a pool of two gloo
processes that are kept from example to example. Beside each property runs a bare loop over the same work with one
config and one batch; what the property takes longer is Hypothesis, and configs that change. Property and loop take
turns, the first examples of each are left out. Exits with 1 below 2 examples a second on simulated ranks or 8 on
processes.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

import dtplan
from dtplan.prove.live import randomized, token_batch
from dtplan.prove.oracle import BOUND, Outcome, errors, outcome
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.testing import model_configs, token_batches

FIELDS = {
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
}
WANTED = {"simulated ranks": 2.0, "gloo processes": 8.0}


def on_rank(rank: int, model: torch.nn.Module, batch: dict[str, torch.Tensor], truth: Outcome) -> float:
    """The largest error of one rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = dtplan.parallelize(copy.deepcopy(model), mesh)
    return max(errors(outcome(sharded, batch), truth).values())


def example(run: Callable[..., list[float]], config: LlamaConfig, batch: dict[str, torch.Tensor]) -> None:
    """One model, compared."""
    model = randomized(AutoModelForCausalLM.from_config(config).double().eval(), 0)
    truth = outcome(copy.deepcopy(model), batch)
    assert max(run(on_rank, model, batch, truth)) <= BOUND


def bare(run: Callable[..., list[float]], examples: int) -> float:
    """Examples a second of a loop."""
    config = LlamaConfig(**FIELDS, vocab_size=32, use_cache=False, attn_implementation="eager")
    batch = token_batch(config, rows=2, length=8, seed=0)
    start = time.perf_counter()
    for _ in range(examples):
        example(run, config, batch)
    return examples / (time.perf_counter() - start)


def properties(run: Callable[..., list[float]], examples: int) -> float:
    """Examples a second of a property over configs and batches."""
    done = 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def law(data: st.DataObject) -> None:
        nonlocal done
        config = data.draw(model_configs("llama", **FIELDS | {"num_key_value_heads": st.sampled_from((2, 4))}))
        batch = data.draw(token_batches(config.vocab_size, rows=2, length=8))
        if batch["input_ids"].shape[1] > 1:  # a loss needs a next token
            example(run, config, batch)
            done += 1

    start = time.perf_counter()
    law()
    return done / (time.perf_counter() - start)


def main() -> int:
    """Both worlds, property and loop in turn; the table, and whether the rates are those wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = True
    with GlooPool(2) as pool, pool.kept() as pair:
        worlds = {"simulated ranks": lambda *job: simulated_ranks(2, *job), "gloo processes": pair.run}
        for world, run in worlds.items():
            bare(run, 5)
            pairs = [(properties(run, args.examples), bare(run, args.examples)) for _ in range(args.rounds)]
            rate, loop = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(found / looped for found, looped in pairs)
            enough = rate >= WANTED[world]
            kept = kept and enough
            print(
                f"{world:<16} {rate:6.1f} examples/s as a property, {loop:6.1f} in a bare loop, ratio {ratio:.2f}; "
                f"at least {WANTED[world]:g} wanted: {'ok' if enough else 'MISSED'}"
            )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
