"""What `test_jobs.py` runs under torchrun on two GPUs: the main job, against the same model unsharded.

Needs no pytest, so that it runs on a machine that has only torch and transformers:
    torchrun --nproc-per-node 2 tests/gpu/main_job.py
Where the ranks share one GPU, FSDP2 is left out, which gloo does not carry there.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_gpu import begin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

import dtplan

CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=1001,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
    "neox": GPTNeoXConfig(
        vocab_size=1001, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8
    ),
}


def whole(tensor: Any) -> torch.Tensor:
    """The global tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build(config: Any, dtype: torch.dtype) -> Any:
    """The same live model on every rank."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype)


def gaps(model: Any, reference: Any, data: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of loss, gradient norm and the worst gradient."""
    loss = model(**data).loss
    loss.backward()
    truth = reference(**data).loss
    truth.backward()
    worst = 0.0
    for name, parameter in reference.named_parameters():
        found = whole(model.get_parameter(name).grad)
        wanted = parameter.grad.to(found.device)
        worst = max(worst, ((found - wanted).abs().max() / wanted.abs().max()).item())
    norm = dtplan.clip_grad_norm_(model, 1.0).item()
    true_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
    return {"loss": abs(loss.item() / truth.item() - 1), "norm": abs(norm / true_norm - 1), "worst gradient": worst}


def exactness() -> None:
    """tp 2 in float64, every switch; torch's float32 casts inside the models bound the error near 1e-7."""
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 1001, (2, 64), generator=generator).cuda()
    data = {"input_ids": ids, "labels": ids}
    for name, sequence_parallel, loss_parallel in itertools.product(CONFIGS, (False, True), (False, True)):
        model = build(CONFIGS[name], torch.float64)
        reference = copy.deepcopy(model)
        sharded = dtplan.parallelize(model, mesh, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
        found = gaps(sharded, reference, data)
        report(f"{name} tp2 sp={sequence_parallel} lp={loss_parallel} float64", found, 1e-5)


def composed() -> None:
    """FSDP2 over two ranks, bf16 compute; against the same bf16 run unsharded the error is that of bf16."""
    for axes, options in (
        ((2, 1), {"mixed_precision": "bf16"}),
        ((1, 2), {"mixed_precision": "bf16", "sequence_parallel": True, "activation_checkpointing": True}),
        ((2, 1), {"cpu_offload": True}),
    ):
        mesh = init_device_mesh("cuda", axes, mesh_dim_names=("shard", "tp"))
        ids = torch.randint(0, 1001, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()
        model = build(CONFIGS["llama"], torch.float32)
        reference = copy.deepcopy(model)
        sharded = dtplan.parallelize(model.cpu() if "cpu_offload" in options else model, mesh, **options)
        found = gaps(sharded, reference, {"input_ids": ids, "labels": ids})
        report(f"llama shard{axes[0]} tp{axes[1]} {options}", found, 1e-4 if "cpu_offload" in options else 5e-2)


def weights() -> None:
    """Meta, load, save: bytes equal, and the loaded model computes what the saved one does."""
    folder = Path(tempfile.gettempdir()) / "dtplan-gpu-main-job"
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("shard", "tp"))
    source = build(CONFIGS["llama"], torch.float32)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        source.save_pretrained(folder / "source")
    dist.barrier()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    sharded = dtplan.parallelize(model, mesh)
    dtplan.load(sharded, folder / "source")
    ids = torch.arange(32).reshape(1, 32).cuda()
    with torch.no_grad():
        gap = (sharded(ids).logits - source(ids).logits).abs().max().item()
    dtplan.save(sharded, folder / "saved")
    again = AutoModelForCausalLM.from_pretrained(folder / "saved")
    same = all(torch.equal(p, source.get_parameter(n).cpu()) for n, p in again.named_parameters())
    report("load and save", {"logits": gap, "bytes differ": float(not same)}, 1e-4)


def report(what: str, found: dict[str, float], bound: float) -> None:
    """Print on rank 0; fail on every rank that is over the bound."""
    if dist.get_rank() == 0:
        print(what, {key: f"{value:.1e}" for key, value in found.items()}, flush=True)
    assert max(found.values()) < bound, (what, found, bound)


if __name__ == "__main__":
    shared = begin()
    assert dtplan.get_state().tp_size == 2
    exactness()
    if not shared:
        composed()
    weights()
    if dist.get_rank() == 0:
        print("main job: passed on", torch.cuda.get_device_name(), "torch", torch.__version__)
    dist.destroy_process_group()
