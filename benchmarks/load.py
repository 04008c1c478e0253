"""Loading and saving a checkpoint at a tp degree: dtplan beside its peers, and beside reading the bytes alone.

    python benchmarks/load.py [--tp 2] [--gib 2.1] [--rounds 5] [--cache warm|cold] [--device cpu] [--folder DIR]

A bf16 Llama checkpoint in several safetensors files is made on the spot and removed afterwards. Every mode runs in
fresh processes, one per rank, that have imported everything and joined a process group before the clock starts; it
stops when the last rank is done. Modes take turns, round by round, and ratios are taken within a round. `warm` reads
all files once before each mode, `cold` drops the page cache (as root); both hold for every mode.

Loading: from a folder to a model whose parameters are all in place. `dtplan.load` is that call alone; `dtplan` also
builds the model on meta and shards it, as the peers' figures do. What a lazy load leaves to do is timed after it: a
first pass that reads every parameter, and then one that writes it, as an optimizer's step does; rows with `+` include
them. `cpu` is the processor time of the busiest rank, which a busy machine changes less. Memory is of the dearest
rank: the peak above what the process held before the mode, resident (VmHWM, which counts mapped file pages) and
anonymous (sampled), over the bytes that the rank keeps.
Saving: to the same folder; `+ fsync` is what save_pretrained needs more to be as durable as dtplan.save is.

Exits with 1 when dtplan reads over 1.05 times, or holds over 1.25 times, the bytes that it keeps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dtplan

GIB = 1 << 30
READ_LIMIT, MEMORY_LIMIT = 1.05, 1.25
SHARD_BYTES = 512 << 20
PRELOAD = ("transformers.models.llama.modeling_llama", "dtplan.planner.apply", "dtplan.weights.api")
CONTEXT = multiprocessing.get_context("forkserver")
Figures = dict[str, float]


# ------------------------------------------------------------------------------------------------- the checkpoint


def config(gib: float) -> LlamaConfig:
    """TinyLlama's layers, as many as fill ``gib``."""
    hidden, ffn, vocabulary, kv = 2048, 5632, 32000, 256
    layer = 2 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=max(1, -int((4 * vocabulary * hidden - gib * GIB) // layer)),
        num_attention_heads=32,
        num_key_value_heads=4,
        dtype="bfloat16",
    )


def meta_model(settings: LlamaConfig) -> Any:
    """The model on meta, in bf16."""
    with torch.device("meta"):
        return LlamaForCausalLM(settings).to(torch.bfloat16)


def make_checkpoint(folder: Path, settings: LlamaConfig) -> int:
    """Writes random weights in files of at most SHARD_BYTES with an index; returns the bytes of all tensors."""
    settings.architectures = ["LlamaForCausalLM"]
    settings.save_pretrained(folder)
    shards: list[dict[str, torch.Size]] = [{}]
    room = SHARD_BYTES
    for name, param in meta_model(settings).named_parameters():
        if param.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = param.shape
        room -= param.nbytes
    weight_map = {}
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file in folder.iterdir():
        sync(file)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def sync(path: Path) -> None:
    """Waits until a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def set_cache(folder: Path, cache: str) -> None:
    """The page cache as every mode finds it."""
    if cache == "cold":
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
        return
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            buffer = bytearray(1 << 24)
            while stream.readinto(buffer):
                pass


# -------------------------------------------------------------------------------------------- modes, on each rank


def with_dtplan(folder: Path, device: str) -> tuple[nn.Module, Figures]:
    """On meta, sharded, then loaded."""
    model = meta_model(LlamaConfig.from_pretrained(folder))
    model = dtplan.parallelize(model, init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",)))
    dist.barrier()
    start = time.perf_counter()
    report = dtplan.load(model, folder)
    dist.barrier()
    return model, {"load_s": time.perf_counter() - start, "copied": report.bytes_read}


def with_transformers(folder: Path, device: str) -> tuple[nn.Module, Figures]:
    """Transformers' own tensor parallelism."""
    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.bfloat16), {}


def with_broadcast(folder: Path, device: str) -> tuple[nn.Module, Figures]:
    """Rank 0 reads all; torch sends every rank its shards. The same sharded model as dtplan's."""
    model = meta_model(LlamaConfig.from_pretrained(folder))
    model = dtplan.parallelize(model, init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",)))
    model.to_empty(device=device)
    whole: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        for file in sorted(folder.glob("*.safetensors")):
            whole |= load_file(file)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)  # type: ignore[arg-type]
    return model, {}


LOADS: dict[str, Callable[[Path, str], tuple[nn.Module, Figures]]] = {
    "dtplan": with_dtplan,
    "transformers tp_plan=auto": with_transformers,
    "broadcast from rank 0": with_broadcast,
}


def load_on_rank(folder: Path, device: str, mode: str) -> Figures:
    """One mode: its wall time, a first pass over what it loaded, and what it cost this rank."""
    before, read, busy = status(), io_bytes(), cpu()
    start = time.perf_counter()
    model, figures = LOADS[mode](folder, device)
    dist.barrier()
    figures["s"], figures["cpu_s"] = time.perf_counter() - start, cpu() - busy
    figures["peak"] = status()["VmHWM"] - before["VmRSS"]
    figures |= {key: value - read[key] for key, value in io_bytes().items()}
    locals_ = [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    start = time.perf_counter()
    total = sum(int(part.view(torch.int64).sum()) for part in locals_)
    figures["read_s"] = time.perf_counter() - start
    with torch.no_grad():
        for part in locals_:
            part.view(torch.int64).add_(0)
    figures["write_s"] = time.perf_counter() - start
    figures["all_cpu_s"] = cpu() - busy
    return {**figures, "kept": sum(part.nbytes for part in locals_), "sum": total, "base_anon": before["RssAnon"]}


def cpu() -> float:
    """Processor time of this process, in seconds."""
    used = os.times()
    return used.user + used.system


def save_on_rank(folder: Path, device: str, target: Path) -> Figures:
    """dtplan.save of the sharded model."""
    model, _ = with_dtplan(folder, device)
    dist.barrier()
    start, busy = time.perf_counter(), cpu()
    dtplan.save(model, target, max_shard_bytes=SHARD_BYTES)
    used = cpu() - busy
    dist.barrier()
    return {"s": time.perf_counter() - start, "cpu_s": used}


def save_whole(folder: Path, device: str, target: Path) -> Figures:
    """save_pretrained of the whole model in one process, and what it takes to make the files durable."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    start, busy = time.perf_counter(), cpu()
    model.save_pretrained(target, max_shard_size=SHARD_BYTES)
    saved, used = time.perf_counter(), cpu() - busy
    for file in target.iterdir():
        sync(file)
    return {"s": saved - start, "durable_s": time.perf_counter() - start, "cpu_s": used}


def status() -> dict[str, int]:
    """This process's resident memory in bytes, as the kernel counts it."""
    return status_of("self")


def status_of(pid: object) -> dict[str, int]:
    """The same of another process."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def io_bytes() -> dict[str, int]:
    """Bytes that this process has read: by system calls, and from the disk (where read-ahead counts too)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"by_calls": int(fields["rchar"]), "from_disk": int(fields["read_bytes"])}


# ----------------------------------------------------------------------------------------------------- processes


def serve(pipe: Connection, seat: tuple[int, int, str, str], fn: Callable[..., Figures], args: tuple[Any, ...]) -> None:
    """One rank's process: joins, calls, sends."""
    rank, world, store, device = seat
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    transformers.utils.logging.disable_progress_bar()
    backend = "gloo"
    if device != "cpu":
        torch.get_device_module(device).set_device(rank)
        torch.zeros(1, device=device)
        backend = f"cpu:gloo,{device}:nccl"
    dist.init_process_group(
        backend, store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(minutes=10)
    )
    dist.barrier()
    try:
        pipe.send(fn(*args))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error)[:300]}")
        raise


def on_ranks(world: int, device: str, fn: Callable[..., Figures], *args: Any) -> list[Figures]:
    """What ``fn(*args)`` returns on each rank of ``world`` fresh processes, with its sampled peaks of memory."""
    with tempfile.TemporaryDirectory() as name:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = CONTEXT.Pipe()
            seat = (rank, world, f"{name}/store", device)
            process = CONTEXT.Process(target=serve, args=(theirs, seat, fn, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        peaks = [dict.fromkeys(("RssAnon", "RssFile"), 0) for _ in processes]
        while not all(pipe.poll(0.005) for pipe in pipes):
            for process, peak in zip(processes, peaks, strict=True):
                if process.is_alive():
                    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it may end meanwhile
                        now = status_of(process.pid)
                        peak |= {key: max(value, now.get(key, 0)) for key, value in peak.items()}
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    if errors := [one for one in found if isinstance(one, str)]:
        raise RuntimeError(errors[0])
    return [{**one, **peak} for one, peak in zip(found, peaks, strict=True)]


# ------------------------------------------------------------------------------------------------ reading the bytes


def commands(folder: Path, tp: int, scratch: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """Reading the same bytes: each of ``tp`` processes reads its part of the files."""
    files = sorted(map(str, folder.glob("*.safetensors")))
    parts = [files[rank::tp] for rank in range(tp)]
    yield "dd to /dev/null", [["sh", "-c", dd(part, "/dev/null")] for part in parts if part]
    yield "cp to memory", [["cp", *part, str(scratch)] for part in parts if part]


def dd(files: list[str], target: str) -> str:
    """A shell command that copies some files."""
    return " && ".join(f"dd if={file} of={target} bs=4M status=none" for file in files)


def time_commands(several: list[list[str]]) -> float:
    """Wall time of some processes at once."""
    start = time.perf_counter()
    running = [subprocess.Popen(command) for command in several]
    if any(process.wait() for process in running):
        raise RuntimeError(f"{several} failed")
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------------------------- report


def measure(folder: Path, args: argparse.Namespace) -> Any:
    """All rounds: seconds by row of the table, the ranks' figures by mode of loading, and the saves' processor time."""
    seconds: dict[str, list[float]] = {}
    ranks: dict[str, list[list[Figures]]] = {}
    saves: dict[str, list[float]] = {}

    def note(row: str, value: float) -> None:
        seconds.setdefault(row, []).append(value)

    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.memory) as scratch:
            for row, several in commands(folder, args.tp, Path(scratch)):
                set_cache(folder, args.cache)
                note(row, time_commands(several))
        for mode in LOADS:
            set_cache(folder, args.cache)
            found = on_ranks(args.tp, args.device, load_on_rank, folder, args.device, mode)
            ranks.setdefault(mode, []).append(found)
            note(mode, max(one["s"] for one in found))
            note(f"{mode} + read", max(one["s"] + one["read_s"] for one in found))
            note(f"{mode} + read, write", max(one["s"] + one["write_s"] for one in found))
            if mode == "dtplan":
                note("dtplan.load", max(one["load_s"] for one in found))
        for row, world, fn in (("dtplan.save", args.tp, save_on_rank), ("save_pretrained, 1 process", 1, save_whole)):
            set_cache(folder, "warm")
            target = folder.with_name("saved")
            found = on_ranks(world, args.device, fn, folder, args.device, target)
            saves.setdefault(row, []).append(max(one["cpu_s"] for one in found))
            note(row, max(one["s"] for one in found))
            if "durable_s" in found[0]:
                note(f"{row} + fsync", found[0]["durable_s"])
            shutil.rmtree(target)
    return seconds, ranks, {row: round(statistics.median(found), 2) for row, found in saves.items()}


def times(seconds: dict[str, list[float]], whole: int) -> list[dict[str, Any]]:
    """Medians, and ratios within a round to dtplan's own row."""
    rows = []
    for row, found in seconds.items():
        own = "dtplan.save" if "save" in row else "dtplan.load" if row.startswith(("dd", "cp")) else "dtplan"
        own += row[row.index(" + ") :] if row.endswith((" + read", " + read, write")) else ""
        ratios = [theirs / ours for theirs, ours in zip(found, seconds[own], strict=True)]
        rows.append(
            {
                "row": row,
                "s": round(statistics.median(found), 3),
                "min_s": round(min(found), 3),
                "max_s": round(max(found), 3),
                "gb_per_s": round(whole / statistics.median(found) / 1e9, 2),
                "over": own,
                "ratio": round(statistics.median(ratios), 2),
                "min_ratio": round(min(ratios), 2),
                "max_ratio": round(max(ratios), 2),
            }
        )
    return rows


def costs(ranks: dict[str, list[list[Figures]]]) -> list[dict[str, Any]]:
    """Bytes of the dearest rank of any round, over the bytes that it keeps."""
    rows = []
    for mode, rounds in ranks.items():
        every = [one for found in rounds for one in found]
        row: dict[str, Any] = {"mode": mode, "kept": max(one["kept"] for one in every)}
        for key in ("copied", "by_calls", "from_disk", "peak"):
            row[key] = round(max(one[key] / one["kept"] for one in every), 3) if key in every[0] else None
        for key in ("cpu_s", "all_cpu_s"):
            row[key] = round(statistics.median(max(one[key] for one in found) for found in rounds), 2)
        row["peak_anon"] = round(max((one["RssAnon"] - one["base_anon"]) / one["kept"] for one in every), 3)
        rows.append(row)
    return rows


def main() -> int:
    """Make, measure, print, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--gib", type=float, default=2.1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="where the checkpoint is made (default: the system's temporary folder)")
    parser.add_argument("--memory", default="/dev/shm", help="a folder in memory, for `cp`")  # noqa: S108
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    CONTEXT.set_forkserver_preload([Path(__file__).stem, *PRELOAD])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="dtplan-load-") as name:
        folder = Path(name) / "checkpoint"
        folder.mkdir()
        whole = make_checkpoint(folder, config(args.gib))
        seconds, ranks, saves = measure(folder, args)
    return report(times(seconds, whole), costs(ranks), saves, whole, args)


def report(
    rows: list[dict[str, Any]],
    memory: list[dict[str, Any]],
    saves: dict[str, float],
    whole: int,
    args: argparse.Namespace,
) -> int:
    """The tables; 1 when a bound is missed."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "dtplan": dtplan.__version__,
    }
    print(f"{whole / GIB:.2f} GiB, tp {args.tp}, {args.device}, {args.cache} cache, {args.rounds} rounds")
    print(f"{os.cpu_count()} cores, " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for row in rows:
        spread = f"{row['ratio']:5.2f} ({row['min_ratio']:.2f}-{row['max_ratio']:.2f}) x {row['over']}"
        speed = f"{row['s']:7.2f} s ({row['min_s']:.2f}-{row['max_s']:.2f})  {row['gb_per_s']:5.2f} GB/s"
        print(f"{row['row']:<36} {speed}  {spread}")
    for row in memory:
        print(
            f"{row['mode']:<36} keeps {row['kept'] / GIB:.2f} GiB a rank; copied {row['copied']} x, by calls "
            f"{row['by_calls']} x, from disk {row['from_disk']} x; peak {row['peak']} x, anonymous {row['peak_anon']} x"
        )
        print(f"{'':<36} cpu {row['cpu_s']} s, with read and write {row['all_cpu_s']} s")
    print("; ".join(f"{row} uses cpu {used} s" for row, used in saves.items()))
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "folder", "memory")}
        found = {"versions": versions, "cores": os.cpu_count(), "bytes": whole, **settings}
        args.json.write_text(
            json.dumps({**found, "times": rows, "ranks": memory, "save_cpu_s": saves}, indent=2) + "\n"
        )
    ours = next(row for row in memory if row["mode"] == "dtplan")
    return int(ours["copied"] > READ_LIMIT or ours["peak"] > MEMORY_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
