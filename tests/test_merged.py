"""A compiled step by its data flow: what kernels read and write, what is held, and all of it beside measured steps."""

from __future__ import annotations

import copy
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, PretrainedConfig

import dtplan
from dtplan.planner.memory import Precision
from dtplan.sizing.flow import Flow
from dtplan.sizing.gpus import GPUS
from dtplan.sizing.merged import merged
from dtplan.sizing.peak import peak
from dtplan.sizing.roofline import estimate
from dtplan.sizing.schedule import Links
from dtplan.sizing.traced import Traced, cut_model, gpu_attention, traced_step
from dtplan.sizing.watch import Segment
from tests.models import batch, build, llama, neox, on_meta

BF16 = Precision.of("bfloat16")
ROWS, WIDTH = 64, 128
SIZE = ROWS * WIDTH * 4
"""Bytes of one activation below."""


class Block(nn.Module):
    """Two products, and ``between`` them."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], *, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(2))
        self.weight = nn.Parameter(torch.ones(WIDTH, device="meta")) if norm else None
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Of rows."""
        inner = self.first(x)
        inner = inner if self.weight is None else inner * self.weight
        out: Tensor = self.second(self.between(x, inner))
        return out


def steps(block: nn.Module, region: Callable[[str], str] = str, after: Callable[[Tensor], Any] = str) -> list[Segment]:
    """Forward and backward of ``block``, which alone is compiled; ``after`` is eager code that is given its output."""
    x = torch.zeros(ROWS, WIDTH, device="meta", requires_grad=True)
    flow = Flow([x, *block.parameters()])
    flow.named((f"block.{name}".rstrip("."), module) for name, module in block.named_modules())
    with flow:
        flow.begin("forward", "block")
        out = block(x)
        after(out)
        flow.begin("backward", "block")
        out.sum().backward()
        flow.end()
    return merged(flow, lambda module: region("block") if module else "")


def moved(segment: Segment) -> float:
    """Activations that merged kernels read and write."""
    return sum(op.bytes for op in segment.ops if op.kind == "merged") / SIZE


def chain(_: Tensor, a: Tensor) -> Tensor:
    return a.sin().mul(2).exp().add(1)


# ------------------------------------------------------------------------------------------------------------- kernels


def test_a_chain_between_products_reads_its_input_and_writes_its_output_once() -> None:
    forward, backward = steps(Block(chain))
    assert moved(forward) == 2
    assert moved(backward) == 3  # the gradient and what the chain began with; its own gradient
    assert [op.kind for op in forward.ops] == ["matrix", "merged", "matrix"]


def test_parts_of_what_is_read_are_read_with_it() -> None:
    """As in rope, which adds a tensor and its swapped halves."""
    half = WIDTH // 2
    swapped = Block(lambda _, a: a + torch.cat((a[:, half:].neg(), a[:, :half]), -1))
    assert moved(steps(swapped)[0]) == 2


def test_what_only_merged_kernels_read_is_not_held() -> None:
    """Of sin, mul and exp autograd saves three; the kernel of backward begins again with the product's output."""
    forward, eager = steps(Block(chain))[0], steps(Block(chain), lambda _: "")[0]
    assert forward.change == 3 * SIZE  # both products' outputs, and what the second product reads
    assert eager.change == 4 * SIZE


def test_what_was_used_last_is_freed_though_a_variable_names_it() -> None:
    """`Block.forward` names the first product's output while the second product runs."""
    block = Block(lambda _, a: a + 1)
    assert steps(block)[0].above == 2 * SIZE
    assert steps(block, lambda _: "")[0].above == 3 * SIZE


def test_a_gradient_stays_though_it_was_read() -> None:
    """As a hook reads it, before it is added to the parameter's."""

    def hook(grad: Tensor) -> None:
        grad.cos()

    def between(x: Tensor, a: Tensor) -> Tensor:
        x.register_hook(hook)
        return chain(x, a)

    assert steps(Block(between))[1].change == steps(Block(chain))[1].change


def test_what_a_product_reads_in_backward_is_held() -> None:
    """The gradient of the second weight reads it; without such a gradient it is let go."""
    block = Block(chain)
    block.second.weight.requires_grad = False
    assert steps(block)[0].change == 2 * SIZE
    assert steps(Block(chain))[0].change == 3 * SIZE


def test_what_eager_code_reads_is_held() -> None:
    """Nothing is merged over the border of what is compiled."""
    block = Block(chain)
    block.forward = lambda x: block.first(x).sin()  # type: ignore[method-assign]
    assert moved(steps(block, after=torch.cos)[0]) == 2


def test_what_two_kernels_read_is_written_by_one_and_read_by_the_other() -> None:
    """A residual stream: the sum goes on to the norm, in registers, and to the last addition, through memory."""

    class Residual(Block):
        def forward(self, x: Tensor) -> Tensor:
            stream = x + self.first(x) + self.second(x)
            return stream + self.second(stream.sin())

    assert moved(steps(Residual(chain))[0]) == 5 + 3  # x, two products -> stream, sine; stream, product -> sum


def test_what_can_wait_is_computed_where_it_is_read() -> None:
    """Sine and power could run before the first product, whose output is added, and would be written and read again."""

    def late(x: Tensor, a: Tensor) -> Tensor:
        sine = x.sin()
        return sine.exp() + a + sine

    assert moved(steps(Block(late))[0]) == 3


def test_a_sum_over_rows_reads_again() -> None:
    """The gradient of a norm's weight has another size than that of its input, and comes from a kernel of its own."""
    plain, with_weight = steps(Block(chain))[1], steps(Block(chain, norm=True))[1]
    row = 1 / ROWS
    assert moved(plain) == 3
    assert moved(with_weight) == pytest.approx(3 + 2 + 3 * row, abs=row)


def test_a_value_of_another_call_is_not_computed_again() -> None:
    """One module that is called twice is two kernels, though they have one name."""

    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(x.cos()).sin()

    block = Twice(chain)
    x = torch.zeros(ROWS, WIDTH, device="meta", requires_grad=True)
    flow = Flow([x, *block.parameters()])
    flow.named([("block", block)])
    with flow:
        for _ in range(2):
            flow.begin("forward", "block")
            x = block(x)
        flow.begin("forward", "after")
        assert x.exp().requires_grad
    found = merged(flow, lambda module: module)
    assert [moved(segment) for segment in found] == [4, 4, 0]


def test_where_nothing_is_compiled_the_figures_are_those_of_the_watch() -> None:
    """Also where a kernel allocates for itself, as flash attention's backward."""
    config = llama(attn_implementation="sdpa", num_key_value_heads=2)
    model, ids = on_meta(config).to(torch.bfloat16), torch.zeros(2, 16, dtype=torch.long, device="meta")
    query = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    flow = Flow([ids, query, *model.parameters(), *model.buffers()])
    with flow, gpu_attention():
        flow.begin("forward", "")
        loss = model(input_ids=ids, labels=ids).loss
        flow.begin("backward", "")
        loss.backward()
        flow.begin("after", "")
        F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        flow.end()
    found = merged(flow, lambda _: "")
    assert found == flow.segments
    assert found[2].above > 64 * 2 * 64 * (4 + 4 * 2)  # queries in float32, and four tensors


# --------------------------------------------------------------------------------------------------------- traced step


def compiled(config: PretrainedConfig, *, tp: int = 1, rows: int = 2, sequence: int = 64, **options: Any) -> Traced:
    """A rank's step on meta."""
    model = on_meta(config).to(torch.bfloat16)
    cut = cut_model(model, dtplan.bind(model, tp=tp))
    options = {"compiled": True, **options}
    return traced_step(cut, "auto", tp=tp, rows=rows, sequence=sequence, dtype=torch.bfloat16, **options)


SDPA = {"attn_implementation": "sdpa", "num_hidden_layers": 3}


def test_fused_layers_are_not_compiled_and_what_lies_between_them_is() -> None:
    config = llama(**SDPA, hidden_size=64, intermediate_size=128)
    step = compiled(config, te=True, loss_parallel=True)
    layer = "model.layers.1"
    for segment in (step.forward[layer], step.backward[layer]):
        kinds: dict[str, set[str]] = defaultdict(set)
        for op in segment.ops:
            part = op.module.removeprefix(layer)
            kinds[".self_attn" if part == ".self_attn.q_proj" else part].add(op.kind)  # it hands out a part
        assert kinds[".self_attn"] == {"attention", "merged"}  # rope
        assert all("merged" not in kinds[part] for part in (".self_attn.te_qkv_proj", ".self_attn.o_proj", ".mlp", ""))
    whole = compiled(config, loss_parallel=True)
    for segment in (whole.forward[layer], whole.backward[layer]):
        assert {op.kind for op in segment.ops} == {"attention", "matrix", "merged"}


def test_the_loss_reads_logits_three_times_and_writes_them_once() -> None:
    step = compiled(llama(**SDPA, vocab_size=4096), loss_parallel=True)
    logits = 2 * 64 * 4096 * 2
    for segment, times in ((step.forward["after"], 2), (step.backward["after"], 2)):
        size = sum(op.bytes for op in segment.ops if op.module.startswith("loss."))
        assert size == pytest.approx(times * logits, rel=0.01)
    assert step.backward["after"].above < 1.3 * logits  # their gradient, and that of the head


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("options", [{"tp": 1}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("config", [llama(**SDPA), llama(), neox(**SDPA)], ids=["llama", "eager attention", "neox"])
def test_compiled_takes_less_and_does_the_same_products(
    config: PretrainedConfig, options: dict[str, Any], *, checkpointing: bool
) -> None:
    options = {**options, "loss_parallel": True, "checkpointing": checkpointing}
    eager, step = (compiled(config, **options, compiled=on) for on in (False, True))
    for phase in ("forward", "backward"):
        for one, other in zip(getattr(eager, phase).values(), getattr(step, phase).values(), strict=True):
            assert [op for op in one.ops if op.flops] == [op for op in other.ops if op.flops]
            assert sum(op.bytes for op in other.ops) <= sum(op.bytes for op in one.ops)
            assert max(other.start, other.end) <= other.peak <= one.peak + 2**14  # an input is held once more
    assert sum(s.change for s in step.forward.values()) <= sum(s.change for s in eager.forward.values())


def kept(config: PretrainedConfig, rows: int, sequence: int) -> int:
    """Bytes that a layer keeps for backward if torch compiles it, by torch's own partitioner."""
    model = build(config, dtype=torch.bfloat16).train()
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        shared = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        known.update(tensor.untyped_storage()._cdata for tensor in shared)  # masks, angles: of all layers
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return inner(x, *args, **kwargs)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    layer: Any = model.get_submodule(dtplan.bind(model).fsdp_units[1])
    layer.compile(backend=backend, dynamic=False)
    inner, layer._compiled_call_impl = layer._compiled_call_impl, call
    ids = batch(config, rows=rows, length=sequence)["input_ids"]
    loss = model(input_ids=ids, labels=ids).loss  # while it lives, so do they
    assert loss.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize(
    "config", [llama(**SDPA), llama(num_hidden_layers=3), neox(**SDPA)], ids=["llama", "eager attention", "neox"]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # a compiler asks a layer's input for it
def test_a_layer_keeps_what_torchs_partitioner_keeps(config: PretrainedConfig) -> None:
    """Its input is the output of the layer before."""
    rows, sequence = 8, 64
    expected = kept(copy.deepcopy(config), rows, sequence)
    step = compiled(config, rows=rows, sequence=sequence)
    change = step.forward["model.layers.1" if "model.layers.1" in step.forward else "gpt_neox.layers.1"].change
    assert change == pytest.approx(expected, rel=0.03)


# -------------------------------------------------------------------------------------------------------- measurements

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ONE = (RESULTS / "step-llama2-7b-8layers-1xH200.txt").read_text()
PEERS = json.loads((RESULTS / "step-llama2-7b-16layers-2xH200-peers.json").read_text())
EARLIER = json.loads((RESULTS / "step-llama2-7b-16layers-2xH200-fused-2.json").read_text())
LONG = json.loads((RESULTS / "sequences-llama2-7b-8layers-2xH200.json").read_text())


def on_h200s(mode: str, *, ranks: int, layers: int, rows: int, sequence: int) -> tuple[float, float]:
    """Predicted GiB and ms of a compiled step of Llama 2 7B, as `benchmarks/step.py` names its modes."""
    words = mode.split()
    config = LlamaConfig(intermediate_size=11008, num_hidden_layers=layers, max_position_embeddings=sequence)
    alone, ours = words[0] == "fsdp2", words[0] == "dtplan"
    rows, tp = (max(1, rows // ranks), 1) if alone else (rows, ranks)
    options: dict[str, Any] = {"sequence_parallel": "sp" in words, "loss_parallel": ours}
    layer_kinds = {"te": "te" in words, "fp8": "fp8" in words, "by_unit": alone}
    step = compiled(config, tp=tp, rows=rows, sequence=sequence, **options, **layer_kinds)
    degrees = {"replicate": 1, "shard": ranks // tp, "tp": tp}
    bound = dtplan.bind(on_meta(config).to(torch.bfloat16), tp=tp, shard=ranks // tp, **options)
    found, links = peak(step, bound, BF16, "sgd"), Links(GPUS["h200"], degrees, per_host=8)
    seconds = estimate(step, bound, found.held, links, optimizer=None, precision=BF16).seconds
    return found.total / 2**30, seconds * 1e3


@pytest.mark.parametrize("mode", ["dtplan", "dtplan te bf16", "dtplan te fp8 delayed"])
def test_compiled_steps_of_one_h200(mode: str) -> None:
    seen = re.search(rf"^{mode}\+compile +([\d.]+) ms.* ([\d.]+) GiB", ONE, re.MULTILINE)
    assert seen is not None
    memory, time = on_h200s(mode, ranks=1, layers=8, rows=2, sequence=4096)
    assert memory == pytest.approx(float(seen[2]), rel=0.002 if mode == "dtplan" else 0.012)
    assert time == pytest.approx(float(seen[1]), rel=0.07)


@pytest.mark.parametrize(
    "mode", ["dtplan", "dtplan te bf16", "dtplan te bf16 sp", "dtplan te fp8 delayed", "hand plan", "fsdp2"]
)
def test_compiled_steps_of_two_h200s(mode: str) -> None:
    seen = next(row for row in (*PEERS["rows"], *EARLIER["rows"]) if row["mode"] == f"{mode}+compile")
    memory, time = on_h200s(mode, ranks=2, layers=16, rows=2, sequence=4096)
    assert memory == pytest.approx(seen["peak_gib"], rel=0.012 if "te" in mode else 0.002)
    assert time == pytest.approx(seen["ms"], rel=0.13 if mode == "fsdp2" else 0.07)  # it waits more than it should


@pytest.mark.parametrize("sequence", [16384, 32768, 65536])
@pytest.mark.parametrize("mode", ["dtplan te bf16 sp", "dtplan te fp8 delayed sp", "hand plan sp", "fsdp2"])
def test_compiled_steps_of_long_sequences(mode: str, sequence: int) -> None:
    name = f"{mode}+compile"
    longer = LONG["longer"].get(str(sequence), {})
    seen = longer[name] if longer else next(row for row in LONG["rows"] if row["mode"] == name)
    took = seen.get("ms") or statistics.median(seen["seconds"]) * 1e3
    memory, time = on_h200s(mode, ranks=2, layers=8, rows=1, sequence=sequence)
    assert memory == pytest.approx(seen["peak_gib"], rel=0.013 if "te" in mode else 0.002)
    assert time == pytest.approx(took, rel=0.07)
