"""How long the command line takes beside the imports that it cannot do without.

    python benchmarks/cli.py [--rounds 7]

Each figure is a whole process. Commands and their baselines take turns, round by round, so that a change of the
machine's speed hits both; differences are taken within a round and their median is printed. Exits with 1 when a
promise is not kept: `lint` and `list` within 0.1 s of importing click and PyYAML; `show` of a Llama 2 70B at tp 8
within 5 s of importing torch and transformers, under 2 GiB, and in the same time for 80 layers as for 8.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
GIB = 1 << 30


def seconds(*command: str) -> float:
    """Wall time of a whole process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def config(folder: Path, layers: int) -> str:
    """A 70B config with a number of layers."""
    file = folder / f"llama-70b-{layers}.json"
    file.write_text(json.dumps({**LLAMA_70B, "num_hidden_layers": layers}))
    return str(file)


def main() -> int:
    """Run the rounds, print the table, check the promises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show = ["-m", "dtplan.cli", "show", "llama", "--tp", "8", "--model"]
        commands = {
            "import click, yaml": ["-c", "import click, yaml"],
            "dtplan list": ["-m", "dtplan.cli", "list"],
            "dtplan lint llama gpt_neox": ["-m", "dtplan.cli", "lint", "llama", "gpt_neox"],
            "import torch, transformers, AutoModelForCausalLM": [
                "-c",
                "import torch; from transformers import AutoModelForCausalLM, LlamaForCausalLM",
            ],
            "dtplan show llama, 70B, 80 layers": [*show, config(folder, 80)],
            "dtplan show llama, 70B, 8 layers": [*show, config(folder, 8)],
        }
        for command in commands.values():
            seconds(*command)  # warm the file cache
        taken = {label: [] for label in commands}
        for _ in range(rounds):
            for label, command in commands.items():
                taken[label].append(seconds(*command))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    for label, times in taken.items():
        print(f"{label:<52} {statistics.median(times):7.3f} s  (min {min(times):.3f}, max {max(times):.3f})")

    def difference(label: str, baseline: str) -> float:
        return statistics.median(a - b for a, b in zip(taken[label], taken[baseline], strict=True))

    plain, heavy = "import click, yaml", "import torch, transformers, AutoModelForCausalLM"
    deep, shallow = "dtplan show llama, 70B, 80 layers", "dtplan show llama, 70B, 8 layers"
    checks = [
        ("list over its imports", difference("dtplan list", plain), 0.1, "s"),
        ("lint over its imports", difference("dtplan lint llama gpt_neox", plain), 0.1, "s"),
        ("show over its imports", difference(deep, heavy), 5.0, "s"),
        ("show, 80 layers over 8", difference(deep, shallow), 0.5, "s"),
        ("largest process", peak / GIB, 2.0, "GiB"),
    ]
    for what, value, bound, unit in checks:
        print(f"{what:<52} {value:7.3f} {unit}  (at most {bound} {unit}) {'ok' if value <= bound else 'MISSED'}")
    return 0 if all(value <= bound for _, value, bound, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
