"""transformers' own tensor-parallel plans, imported and proved.

    python benchmarks/hf_plans.py [--only NAME,...] [--jobs 2] [--no-options] [--resume] [-o FILE]
    python benchmarks/hf_table.py benchmarks/results/hf-plans.json > docs/hf-plans.md

For every causal language model whose config has a plan: a small config is built, the plan imported and proved at tp 2
and 4 (options at tp 2). Then transformers applies the same plan itself, on two gloo processes, to the same weights, and
is compared with the unsharded model by the same measure. A plan is called refuted only where both say so.

Each architecture runs in processes of its own with a time limit; results are kept by name, so `--only` renews some of
them. The parent imports and never computes: what it forks can use autograd.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import transformers
from hf_configs import architectures, options_of, small_config
from torch import nn
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from dtplan._errors import BindError
from dtplan.author.importers import from_hf
from dtplan.planner.bind import bind
from dtplan.prove.live import live_model, token_batch
from dtplan.prove.oracle import BOUND, outcome
from dtplan.prove.proof import legs_of, prove_model
from dtplan.prove.ranks import compare

fork = multiprocessing.get_context("fork")
PROOF_S, HF_S = 600.0, 300.0
Record = dict[str, Any]

# -------------------------------------------------------------------------------------------------------- one import


def proved(model_type: str, name: str, options: dict[str, Any], degrees: list[int]) -> Record:
    """The imported plan, proved: verdict, the first finding, and how much of the model is cut."""
    cls = getattr(transformers, name)
    config = small_config(model_type, options)
    with torch.device("meta"):
        model = cls(config)
    imported = from_hf(model)
    if imported.draft.undecided:
        reasons = sorted({note for rule in imported.draft.undecided for note in rule.notes})
        return {"verdict": "not run", "reason": "; ".join(reasons), "left_alone": len(imported.alone)}
    plan = imported.plan()
    allowed = {d for d in degrees if d == min(degrees) or divides(model, plan, d)}
    told = {"left_alone": len(imported.alone), "degrees": sorted(allowed), **shares(model, plan)}
    proof = prove_model(
        lambda: live_model(cls, config, 0),
        plan,
        given="imported",
        model=model_type,
        legs=legs_of([d for d in degrees if d in allowed], "off", "off"),
        steps=0,
    )
    failed = next((leg for leg in proof.legs if leg.verdict != "proved"), None)
    told |= {"verdict": proof.verdict, "idle": len(proof.idle), "largest_error": largest(proof.legs)}
    if failed is not None:
        told |= {
            "at": str(failed.leg),
            "reason": failed.reason,
            "wrong": dict(sorted(failed.wrong.items(), key=lambda item: -item[1])),
            "findings": [dataclasses.asdict(finding) for finding in failed.findings[:3]],
        }
    return told


def divides(model: nn.Module, plan: Any, degree: int) -> bool:
    """Whether every unit can be cut over so many ranks: 2 kv heads cannot over 4."""
    try:
        bind(model, plan, tp=degree)
    except BindError as error:
        return not any(finding.code == "DTP405" for finding in error.diagnostics)
    return True


def largest(legs: Any) -> float | None:
    """The largest error of all legs."""
    return max((leg.largest_error for leg in legs if leg.largest_error is not None), default=None)


def shares(model: nn.Module, plan: Any) -> Record:
    """Parameters of the dense layers (all but embeddings, head and stacked experts) and how many of them are cut."""
    bound = bind(model, plan, tp=2)
    ends = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}  # type: ignore[operator, union-attr]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    dense = cut = experts = experts_cut = 0
    for module in bound.modules:
        for tensor in (t for t in module.tensors if not t.buffer):
            held = [parameters[f"{each}.{tensor.name}" if each else tensor.name] for each in module.names]
            count = sum(parameter.numel() for parameter in held)
            sharded = count * (tensor.placement.word == "S")
            if id(held[0]) in ends:
                continue
            if len(tensor.shape) == 3 and "expert" in module.pattern:
                experts, experts_cut = experts + count, experts_cut + sharded
            else:
                dense, cut = dense + count, cut + sharded
    return {"dense": dense, "dense_cut": cut, "experts": experts, "experts_cut": experts_cut}


# ------------------------------------------------------------------------------------------- transformers' own sharding


def sharded_by_transformers(rank: int, model_type: str, name: str, options: dict[str, Any], store: str) -> Record:
    """One rank of two: transformers applies its plan to the live model, which is compared with the unsharded one."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = live_model(getattr(transformers, name), small_config(model_type, options), 0)
    batch = token_batch(model.config, rows=4, length=16, seed=0)
    whole = copy.deepcopy(model)
    truth = outcome(whole, batch)
    largest = max(grad.abs().max().item() for grad in truth.grads.values())
    zero = {n for n, grad in truth.grads.items() if grad.abs().max().item() <= 1e-13 * largest}
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rules, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))  # type: ignore[operator]  # noqa: SLF001
    for tied in getattr(model, "_tied_weights_keys", None) or {}:  # as when loading: sharded first, tied after
        owner, _, last = tied.rpartition(".")
        if tied in dict(model.named_parameters(remove_duplicate=False)):
            setattr(model.get_submodule(owner), last, nn.Parameter(model.get_parameter(tied).detach().clone()))
    apply_tensor_parallelism(model, mesh, rules)  # type: ignore[no-untyped-call]
    model.tie_weights()  # type: ignore[operator]
    found = compare(outcome(model, batch), truth, zero)
    wrong = {n: error for n, error in found.items() if not error <= BOUND}
    return {"verdict": "wrong" if wrong else "exact", "wrong": wrong, "largest_error": max(found.values())}


def by_transformers(model_type: str, name: str, options: dict[str, Any]) -> Record:
    """Both ranks' findings as one."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(sharded_by_transformers, (r, model_type, name, options, f"{folder}/store")) for r in range(2)]
        ranks = in_processes(jobs, HF_S)
    crashed = [r for r in ranks if "error" in r]
    if crashed:
        told = next((r for r in crashed if not r.get("lost")), crashed[0])
        return {"verdict": "crash", "reason": told["error"]}
    wrong: dict[str, float] = {}
    for rank in ranks:
        wrong |= {n: max(error, wrong.get(n, 0.0)) for n, error in rank["wrong"].items()}
    return {
        "verdict": "wrong" if wrong else "exact",
        "wrong": wrong,
        "largest_error": max(r["largest_error"] for r in ranks),
    }


# --------------------------------------------------------------------------------------------------------- processes


def _main(end: Connection, work: Callable[..., Record], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # tracebacks of simulated ranks, gloo's farewells
    try:
        told = work(*args)
    except Exception as error:  # noqa: BLE001 - what one model does must not end the sweep
        lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
        told = {"error": f"{type(error).__name__}: {lines[0][:300]}", "kind": type(error).__name__}
        told["lost"] = "Connection" in str(error) or "peer" in str(error)
    end.send(told)
    end.close()
    os._exit(0)


def in_processes(jobs: list[tuple[Callable[..., Record], tuple[Any, ...]]], seconds: float) -> list[Record]:
    """Every job in a forked process; after the first error, or when time is up, the others are ended."""
    ends, processes = [], []
    for work, args in jobs:
        mine, theirs = fork.Pipe(duplex=False)
        processes.append(fork.Process(target=_main, args=(theirs, work, args)))
        processes[-1].start()
        theirs.close()
        ends.append(mine)
    found: dict[int, Record] = {}
    until = time.monotonic() + seconds
    while len(found) < len(ends):
        left = until - time.monotonic()
        for end in wait([e for i, e in enumerate(ends) if i not in found], max(left, 0.0)) or [None]:
            if end is None:
                found |= {
                    i: {"error": f"no result in {seconds:.0f} s", "lost": True}
                    for i in range(len(ends))
                    if i not in found
                }
                break
            number = ends.index(end)  # type: ignore[arg-type]
            try:
                found[number] = end.recv()  # type: ignore[union-attr]
            except EOFError:
                found[number] = {"error": "the process ended without a result", "lost": True}
            if "error" in found[number]:
                until = min(until, time.monotonic() + 3.0)
    for process in processes:
        process.kill()
        process.join()
    return [found[i] for i in range(len(ends))]


# ---------------------------------------------------------------------------------------------------------- the sweep


def architecture(model_type: str, name: str, vary: bool, known: dict[str, Record]) -> Record:  # noqa: FBT001
    """Every case of one architecture but those that are ``known``."""
    start = time.monotonic()
    try:
        base = small_config(model_type, {})
        getattr(transformers, name)  # its module is imported once, here
    except Exception as error:  # noqa: BLE001 - told in the table
        return {"class": name, "cases": {"": {"verdict": "not run", "reason": f"no config: {first_line(error)}"}}}
    cases: dict[str, Record] = {}
    for case, options in {"": {}, **(options_of(base) if vary else {})}.items():
        if case in known:
            cases[case] = known[case]
        elif not case or takes(model_type, options):
            cases[case] = told = one_case(model_type, name, options, [2, 4] if not case else [2])
            if not case or told["verdict"] != "proved":
                told["transformers"] = by_transformers(model_type, name, options)
    return {"class": name, "cases": cases, "seconds": round(time.monotonic() - start, 1)}


def takes(model_type: str, options: dict[str, Any]) -> bool:
    """Whether the config's class takes the options, which may contradict others."""
    try:
        small_config(model_type, options)
    except Exception:  # noqa: BLE001 - whatever it raises, it refuses them
        return False
    return True


def one_case(model_type: str, name: str, options: dict[str, Any], degrees: list[int]) -> Record:
    """The proof in a process of its own."""
    [told] = in_processes([(proved, (model_type, name, options, degrees))], PROOF_S)
    return {"verdict": "not run", "reason": told["error"]} if "error" in told else told


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def sweep(
    wanted: list[tuple[str, str]], jobs: int, *, vary: bool, known: dict[str, Record]
) -> Iterator[tuple[str, Record]]:
    """Architectures as they are done, ``jobs`` at a time; ``known``: cases of each that are done already."""
    waiting, running = list(wanted), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            model_type, name = waiting.pop(0)
            mine, theirs = fork.Pipe(duplex=False)
            process = fork.Process(
                target=_main, args=(theirs, architecture, (model_type, name, vary, known.get(model_type, {})))
            )
            process.start()
            theirs.close()
            running[mine] = (model_type, name, process)
        for end in wait(list(running)):
            model_type, name, process = running.pop(end)  # type: ignore[call-overload]
            try:
                told = end.recv()  # type: ignore[union-attr]
            except EOFError:
                told = {"error": "the process ended without a result"}
            if "error" in told:
                told = {"class": name, "cases": {"": {"verdict": "not run", "reason": told["error"]}}}
            process.join()
            yield model_type, told


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types, with commas")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-options", action="store_true", help="the configs as they are only")
    parser.add_argument("--resume", action="store_true", help="keep the cases that the output has already")
    parser.add_argument("-o", "--output", default="benchmarks/results/hf-plans.json")
    args = parser.parse_args()
    file = Path(args.output)
    kept = json.loads(file.read_text())["architectures"] if file.is_file() else {}
    every = list(architectures())
    wanted = [pair for pair in every if not args.only or pair[0] in args.only.split(",")]
    known = {key: told["cases"] for key, told in kept.items()} if args.resume else {}
    for model_type, told in sweep(wanted, args.jobs, vary=not args.no_options, known=known):
        kept[model_type] = told
        for case, each in told["cases"].items():
            hf = each.get("transformers", {}).get("verdict", "")
            print(f"{model_type} {case}: {each['verdict']} {each.get('reason', '')[:100]} {hf}", flush=True)
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        ordered = {key: kept[key] for key, _ in every if key in kept}
        file.write_text(json.dumps({"versions": versions, "architectures": ordered}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
