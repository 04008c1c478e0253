"""What `benchmarks/step.py` times: one mode in processes of its own, which wait for their turn.

A mode is a name and tags, as `dtplan te fp8 delayed sp+compile`. Words: `tp2`, `shard4`, `replicate2` are degrees
(tp takes the ranks that are left, for `fsdp2` shard does), `sp` is sequence parallelism (`sp rows`: along the batch),
`attention` uses TransformerEngine's, `overlap` does collectives beside matrix products (`overlap_tokens`). Tags:
`compile` (each decoder layer; `dtplan.compile_model` for dtplan), `cudnn` (torch's attention on cuDNN in place of
flash), `overlap` (inductor moves work between a collective and its wait), `adamw` (an optimizer step in the step),
`graph` (forward and backward as one CUDA graph: `dtplan.GraphedStep`; its recorder for Megatron-core as well),
`unsealed` (fused layers that a compiler may look into: `dtplan.te.install.seal` left out).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("UB_SKIPMC", "1")  # no multicast: it can hang a host that others share
if any(word in sys.argv[1] for word in (" te", "megatron")) and (" sp" in sys.argv[1] or " overlap" not in sys.argv[1]):
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # a collective that is launched first also runs first

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

import dtplan
from dtplan.plan.spec import S, TeLayer
from dtplan.planner.bind import find_plan
from dtplan.planner.graphed import Recorded
from dtplan.te import fuse

GIB = 1 << 30
AXES = ("replicate", "shard", "tp")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU the program runs on gloo: for a dry run, whose times mean nothing."""
SHAPES: dict[str, dict[str, int]] = json.loads((Path(__file__).parent / "shapes.json").read_text())


def live(args: SimpleNamespace) -> nn.Module:
    """The same bf16 model on every rank, with fewer layers than the real one."""
    shape = SHAPES[args.model]
    common: dict[str, Any] = {
        "vocab_size": shape["vocabulary"],
        "hidden_size": shape["width"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": args.layers,
        "num_attention_heads": shape["heads"],
        "max_position_embeddings": args.sequence,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(0)
    with torch.device(DEVICE):
        if args.model.startswith("neox"):
            # tanh-gelu, so that every mode computes the same function
            return GPTNeoXForCausalLM(GPTNeoXConfig(**common, hidden_act="gelu_new")).to(torch.bfloat16)
        return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=shape["kv"])).to(torch.bfloat16)


def layers_of(model: nn.Module) -> Any:
    """The decoder layers."""
    base = getattr(model, getattr(model, "base_model_prefix", "model"))
    return base.layers


def degrees(words: list[str]) -> dict[str, int]:
    """Size of each axis; the axis that is not named takes the ranks that are left."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = {axis: int(found[1]) for axis in AXES for word in words if (found := re.fullmatch(rf"{axis}(\d+)", word))}
    free = "shard" if words[0] == "fsdp2" else "tp"
    sizes.setdefault(free, max(1, world // math.prod(sizes.values())))
    found = {axis: sizes.get(axis, 1) for axis in AXES}
    if math.prod(found.values()) != world:
        raise ValueError(f"{found} are not {world} ranks: ValueError")
    return found


def mesh_of(words: list[str], *axes: str) -> Any:
    """A mesh of these axes, and of any other whose degree is above 1."""
    sizes = {axis: size for axis, size in degrees(words).items() if size > 1 or axis in axes}
    return init_device_mesh(DEVICE, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2 over the mesh's data axes, each layer a unit, as torch's own examples do it."""
    axes = tuple(axis for axis in ("replicate", "shard") if axis in mesh.mesh_dim_names)
    if not axes:
        return model
    data = mesh[axes if "shard" in axes else axes[0]]
    for layer in layers_of(model):
        fully_shard(layer, mesh=data)
    return fully_shard(model, mesh=data)


def with_dtplan(words: list[str], args: SimpleNamespace) -> nn.Module:
    """`dtplan [te bf16|te fp8 RECIPE] [sp]`."""
    options: dict[str, Any] = {"te": "require" if "te" in words else "off", "sequence_parallel": "sp" in words}
    if "fp8" in words:
        options["fp8"] = words[words.index("fp8") + 1]
    if "overlap" in words:
        sizes = degrees(words)
        options["overlap_tokens"] = args.batch // (sizes["replicate"] * sizes["shard"]) * args.sequence
    model = live(args)
    plan = find_plan(model)
    if "rows" in words:
        plan = dataclasses.replace(plan, sequence_parallel=S(0))
    if "attention" in words:
        own = TeLayer(
            under=("model", "layers", "*"), layer="DotProductAttention", attention="self_attn", at=plan.te[0].at
        )
        plan = dataclasses.replace(plan, te=(*plan.te, own))
    return dtplan.parallelize(model, mesh_of(words, "tp"), plan, loss_parallel=True, **options)


def with_hand_plan(words: list[str], args: SimpleNamespace) -> nn.Module:
    """A careful plan of torch's own styles: grouped inputs, as a user of parallelize_module would write it."""
    sequence_parallel = "sp" in words
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
    mesh = mesh_of(words, "tp")
    return data_parallel(parallelize_module(live(args), mesh["tp"], plan), mesh)


def with_transformers(words: list[str], args: SimpleNamespace) -> nn.Module:
    """Transformers' own tensor parallelism, which loads from a folder."""
    mesh = mesh_of(words, "tp")
    folder = Path(args.folder) / f"{args.model}-{args.layers}"
    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        live(args).save_pretrained(folder)
    dist.barrier()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", device_mesh=mesh["tp"], dtype=torch.bfloat16
    )
    return data_parallel(model, mesh)


def with_fsdp(words: list[str], args: SimpleNamespace) -> nn.Module:
    """FSDP2 alone: every rank has its own part of the batch."""
    return data_parallel(live(args), mesh_of(words, "shard"))


class Megatron(nn.Module):
    """Megatron-core's GPT of the same shape, called as a model of transformers is.

    On data axes its own data parallelism sums the gradients beside backward; that was not run yet.
    """

    def __init__(self, words: list[str], args: SimpleNamespace) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        super().__init__()
        shape, sizes = SHAPES[args.model], degrees(words)
        world, data_ranks = sizes["tp"], sizes["replicate"] * sizes["shard"]
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        options: dict[str, Any] = {}
        if "fp8" in words:
            recipe = {"current": "tensorwise", "delayed": "delayed", "block": "blockwise"}[
                words[words.index("fp8") + 1]
            ]
            options = {"fp8": "hybrid" if recipe != "blockwise" else "e4m3", "fp8_recipe": recipe}
        if "overlap" in words:
            from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

            mode = UserBufferQuantizationMode.FP8 if "fp8" in words else UserBufferQuantizationMode.NONE
            tokens = [args.sequence * (args.batch // data_ranks), shape["width"]]
            initialize_ub(tokens, world, quantization_modes=[mode], dtype=torch.bfloat16, bootstrap_backend="nccl")
            options["tp_comm_overlap"] = True
        config = TransformerConfig(
            num_layers=args.layers,
            hidden_size=shape["width"],
            ffn_hidden_size=shape["ffn"],
            num_attention_heads=shape["heads"],
            num_query_groups=shape["kv"],
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            bias_activation_fusion=True,
            masked_softmax_fusion=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            tensor_model_parallel_size=world,
            sequence_parallel="sp" in words,
            apply_rope_fusion=True,
            cross_entropy_loss_fusion=True,
            gradient_accumulation_fusion=False,
            **options,
        )
        spec = get_gpt_layer_with_transformer_engine_spec()
        self.gpt = GPTModel(
            config,
            spec,
            shape["vocabulary"],
            args.sequence,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        self.gpt.cuda().bfloat16()
        if data_ranks > 1:
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

            self.gpt = DistributedDataParallel(
                config, DistributedDataParallelConfig(overlap_grad_reduce=True), self.gpt
            )
        self.positions = torch.arange(args.sequence, device="cuda")[None]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """The mean loss. Megatron does not shift labels; the work is the same."""
        positions = self.positions.expand(input_ids.shape[0], -1)
        return SimpleNamespace(loss=self.gpt(input_ids, positions, None, labels=labels).mean())

    def begin(self) -> None:
        """Of a step: data-parallel gradients are added up in buffers."""
        if hasattr(self.gpt, "zero_grad_buffer"):
            self.gpt.zero_grad_buffer()

    def finish(self) -> None:
        """After backward: wait until data-parallel gradients are summed."""
        if hasattr(self.gpt, "finish_grad_sync"):
            self.gpt.finish_grad_sync()


MAKERS: dict[str, Callable[[list[str], SimpleNamespace], nn.Module]] = {
    "dtplan": with_dtplan,
    "hand": with_hand_plan,
    "transformers": with_transformers,
    "fsdp2": with_fsdp,
    "megatron": Megatron,
}


class Mode:
    """The model of one mode, its batch, and a step."""

    def __init__(self, mode: str, args: SimpleNamespace) -> None:
        name, *tags = mode.split("+")
        words = name.split()
        if "cudnn" in tags:
            torch.backends.cuda.enable_flash_sdp(False)
        if "overlap" in tags:
            torch._inductor.config.reorder_for_compute_comm_overlap = True  # type: ignore[attr-defined]  # noqa: SLF001
        if "unsealed" in tags:
            fuse.seal = lambda *_: None
        self.model = MAKERS[words[0]](words, args).train()
        if "compile" in tags and words[0] == "dtplan":
            dtplan.compile_model(self.model)
        elif "compile" in tags:
            for layer in layers_of(self.model):
                layer.compile()
        self.graphed: Callable[..., torch.Tensor] | None = None
        if "graph" in tags and words[0] == "dtplan":
            self.graphed = dtplan.GraphedStep(self.model)
        elif "graph" in tags:
            recorded = Recorded(self.model, lambda **batch: self.model(**batch).loss)
            self.graphed = lambda **batch: recorded(batch, accumulate=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True) if "adamw" in tags else None
        sizes = degrees(words)
        self.data_ranks, self.vocabulary = sizes["replicate"] * sizes["shard"], SHAPES[args.model]["vocabulary"]
        self.data_rank = dist.get_rank() // sizes["tp"]
        self.rows = max(1, args.batch // self.data_ranks)
        self.read(args.sequence)

    def read(self, sequence: int) -> None:
        """The batch, of sequences of this length."""
        generator = torch.Generator().manual_seed(self.data_rank)
        self.tokens = self.rows * self.data_ranks * sequence
        self.ids = torch.randint(0, self.vocabulary, (self.rows, sequence), generator=generator).to(DEVICE)

    def longer(self, sequence: int) -> dict[str, Any] | None:
        """A round at another length, or None where the memory does not suffice (it does so on all ranks alike)."""
        if self.graphed is not None:
            return None  # recorded for one length
        self.read(sequence)
        try:
            return self.round(2, warm=1)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the step's activations, which others need
        for parameter in self.model.parameters():
            parameter.grad = None
        let_go()
        return None

    def step(self) -> torch.Tensor:
        """Forward and backward; gradients are dropped. Waits for nothing."""
        if self.graphed is not None:
            loss = self.graphed(input_ids=self.ids, labels=self.ids)
        else:
            if isinstance(self.model, Megatron):
                self.model.begin()
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            if isinstance(self.model, Megatron):
                self.model.finish()
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad = None
        return loss.detach()

    def round(self, steps: int, warm: int = 2) -> dict[str, Any]:
        """Seconds of each of some steps after ``warm`` that are not counted, peaks of memory, and the loss.

        ``peak_gib``: what tensors take at once; ``taken_gib``: what the allocator took from the GPU for that.
        """
        for _ in range(warm):
            loss = self.step()
        wait()
        forget_peak()
        seconds, host = [], []
        for _ in range(steps):
            dist.barrier()
            wait()
            start = time.perf_counter()
            self.step()
            host.append(time.perf_counter() - start)
            wait()
            seconds.append(time.perf_counter() - start)
        taken = torch.cuda.max_memory_reserved() / GIB if DEVICE == "cuda" else 0.0
        peak = torch.cuda.max_memory_allocated() / GIB if DEVICE == "cuda" else 0.0
        let_go()
        if self.graphed is not None:  # a graph keeps the memory of a step, which nothing allocates
            peak = taken
        found = {"peak_gib": peak, "taken_gib": taken, "loss": whole(loss), "tokens": self.tokens}
        return {"seconds": seconds, "host": host, **found}

    def profile(self) -> str:
        """Where the time of a step goes on the GPU: the kernels that take most of it, in ms."""
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as found:
            for _ in range(2):
                self.step()
            torch.cuda.synchronize()
        rows = [row for row in found.key_averages() if row.device_type == torch.autograd.DeviceType.CUDA]
        rows = sorted(rows, key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows)
        sent, hidden = beside(found.events())
        lines = [
            f"{total / 2e3:8.2f} ms in kernels (streams added up)",
            f"{sent / 2e3:8.2f} ms sending between GPUs, {hidden / 2e3:.2f} of them beside other kernels",
        ]
        lines += [f"{r.self_device_time_total / 2e3:8.2f} ms {r.count / 2:6.0f} x {r.key[:110]}" for r in rows[:28]]
        return "\n".join(lines)


def beside(events: Any) -> tuple[float, float]:
    """Time in which something is sent, and the part of it in which another kernel runs as well; in us."""
    edges = []
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("nccl:"):
            sends = any(word in event.name for word in ("nccl", "PtoP", "userbuffers"))
            kind = (1, 0) if sends else (0, 0 if "barrier" in event.name else 1)
            span = event.time_range
            edges += [(span.start, *kind), (span.end, -kind[0], -kind[1])]
    sending = working = sent = hidden = last = 0
    for at, sends, works in sorted(edges):
        sent += (at - last) * (sending > 0)
        hidden += (at - last) * (sending > 0 and working > 0)
        sending, working, last = sending + sends, working + works, at
    return sent, hidden


def wait() -> None:
    """Until the GPU is idle."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def forget_peak() -> None:
    """Measure the peak memory from here on."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def let_go() -> None:
    """Of memory that the other modes need."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def whole(loss: torch.Tensor) -> float:
    """The loss as a number."""
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def matrix_rate(size: int = 8192) -> float:
    """FLOP/s of a large bf16 matrix product on random data, measured here and now."""
    size = size if DEVICE == "cuda" else 256
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    wait()
    start = time.perf_counter()
    for _ in range(30):
        a @ b
    wait()
    rate = 30 * 2 * size**3 / (time.perf_counter() - start)
    del a, b
    let_go()
    return rate


def main() -> None:
    """Build the mode, then do what the parent asks for until it says `end`."""
    mode, port, settings = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    args = SimpleNamespace(**{key: int(value) if value.isdecimal() else value for key, value in _pairs(settings)})
    dtplan.init(tensor_parallel_degree=int(os.environ.get("WORLD_SIZE", "1")))
    parent = Client(("127.0.0.1", port), authkey=b"step") if dist.get_rank() == 0 else None
    talk = dist.new_group(backend="gloo")
    if parent is not None:
        parent.send(mode)
    built: Mode | None = None
    while True:
        asked = [parent.recv() if parent is not None else None]
        dist.broadcast_object_list(asked, src=0, group=talk)
        match asked[0]:
            case "build":
                built = Mode(mode, args)
                answer: Any = whole(built.step())
                built.step()
                let_go()
            case "rate":
                answer = matrix_rate()
            case ("sequence", int(sequence)):
                assert built is not None
                answer = built.longer(sequence)
            case "profile":
                assert built is not None
                answer = built.profile()
            case int(steps):
                assert built is not None
                answer = built.round(steps)
            case _:
                break
        if parent is not None:
            parent.send(answer)
    dist.destroy_process_group()


def _pairs(settings: list[str]) -> list[tuple[str, str]]:
    return [(key, value) for key, value in zip(settings[::2], settings[1::2], strict=True)]


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - told, then out
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a rank that waits for its communicators while it ends would keep the others waiting
