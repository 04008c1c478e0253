"""What a step takes: the traced step against real ones, the peak, the estimate, and `dtplan fit` as a user meets it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, OPTConfig, PretrainedConfig

import dtplan
from dtplan.cli import cli
from dtplan.plan.read import parse_plan
from dtplan.planner.ledger import ledger
from dtplan.planner.memory import Precision
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.report.timeline import chrome_trace
from dtplan.sizing.fit import Ask, Fit, FitError, fit
from dtplan.sizing.gpus import GPUS
from dtplan.sizing.peak import WORKSPACE, peak
from dtplan.sizing.schedule import Links
from dtplan.sizing.traced import Cut, Traced, TraceError, cut_model, traced_step
from dtplan.sizing.watch import Segment, Watch, local_tensors, watched_storages, watched_units
from dtplan.te.choose import choose
from dtplan.te.rebind import rebound
from tests.models import batch, build, drawing, llama, neox, on_meta

GEMMA2 = Gemma2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
)
GEMMA2._attn_implementation = "eager"
MODELS: dict[str, PretrainedConfig] = {
    "llama": llama(num_key_value_heads=2),
    "neox": neox(),
    "gemma2": GEMMA2,
}
BF16 = Precision.of("bfloat16")


def traced(config: PretrainedConfig, *, tp: int = 1, rows: int = 2, sequence: int = 16, **options: Any) -> Traced:
    """A rank's step on meta."""
    model = on_meta(config).to(torch.bfloat16)
    cut = cut_model(model, dtplan.bind(model, tp=tp))
    return traced_step(cut, "auto", tp=tp, rows=rows, sequence=sequence, dtype=torch.bfloat16, **options)


def followed(model: nn.Module, ids: torch.Tensor) -> list[Segment]:
    """A step that is really computed, segment by segment."""
    watch = Watch(local_tensors([ids, *model.parameters(), *model.buffers()]), device="cpu")
    watch.named(model.named_modules())  # hooks keep arguments a little longer, here as there
    units = [(name, model.get_submodule(name)) for name in dtplan.applied(model).bound.fsdp_units]
    with watch, watched_units(watch, units):
        watch.begin("forward", "before")
        loss = model(input_ids=ids, labels=ids).loss
        watch.begin("backward", "after")
        loss.backward()
        watch.end()
    return watch.segments


# ------------------------------------------------------------------------------------------------------ traced step


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as one of two ranks whose collectives do nothing; what they would check goes unchecked."""
    for check in ("check_same_model", "check_same_weights", "check_same_inputs"):
        monkeypatch.setattr(f"dtplan.planner.apply.{check}", lambda *_: None)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"checkpointing": True}], ids=str)
@pytest.mark.usefixtures("one_of_two")
def test_a_traced_step_takes_what_a_real_one_takes(name: str, options: dict[str, bool]) -> None:
    config = changed_config(MODELS[name], num_hidden_layers=2)
    model = build(config, dtype=torch.bfloat16)
    ids = batch(config, rows=2, length=16)["input_ids"]
    switches: dict[str, Any] = {
        "loss_parallel": True,
        "sequence_parallel": options.get("sequence_parallel", False),
        "activation_checkpointing": options.get("checkpointing", False),
    }
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    real = {(s.phase, s.name): s for s in followed(dtplan.parallelize(model, mesh, **switches).train(), ids)}
    dist.destroy_process_group()
    found = traced(config, tp=2, loss_parallel=True, **options)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    segments = [*found.forward.values(), *found.backward.values()]
    assert len(segments) == 8  # before and after the units, and two of them, each way
    for segment in segments:
        its = real[segment.phase, segment.name]
        assert (segment.start, segment.peak) == (its.start, its.peak), segment.name
        assert kernels(segment) == kernels(its)


def kernels(segment: Segment) -> list[str]:
    """What works on more than one number: a number that a forward writes down is made by other operators on meta."""
    return [op.name for op in segment.ops if op.bytes > 16]


def changed_config(config: PretrainedConfig, **changes: Any) -> PretrainedConfig:
    changed = copy.deepcopy(config)
    for key, value in changes.items():
        setattr(changed, key, value)
    if getattr(changed, "layer_types", None):
        changed.layer_types = changed.layer_types[: changed.num_hidden_layers]
    return changed


@pytest.mark.parametrize("config", [llama(attn_implementation="sdpa"), llama(), neox()], ids=["sdpa", "eager", "neox"])
def test_what_is_alive_after_forward_is_what_autograd_saved(config: PretrainedConfig) -> None:
    model, ids = build(config, dtype=torch.bfloat16), batch(config)["input_ids"]
    known = [ids, *model.parameters(), *model.buffers()]
    before = {tensor.untyped_storage()._cdata for tensor in known}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage())._cdata not in before:
            saved[storage._cdata] = storage
        return tensor

    watch = Watch(known, device="cpu")
    with watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.dim() == 0
    the_loss = 512  # the allocator's smallest block
    assert watch.live == sum(-(-storage.nbytes() // 512) * 512 for storage in saved.values()) + the_loss


def test_flash_attention_keeps_what_the_gpu_keeps() -> None:
    config = llama(attn_implementation="sdpa", num_key_value_heads=2, hidden_size=64)
    flash, eager = traced(config, sequence=64), traced(llama(num_key_value_heads=2, hidden_size=64), sequence=64)
    ops = [op for op in flash.forward["model.layers.0"].ops if op.kind == "attention"]
    assert [op.name for op in ops] == ["_scaled_dot_product_flash_attention"]
    assert ops[0].flops == 2 * 2 * 64 * 64 * 64  # causal: half of 4 x rows x sequence^2 x features
    assert flash.forward["model.layers.0"].change < eager.forward["model.layers.0"].change


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", [llama(num_hidden_layers=7), GEMMA2], ids=["llama", "gemma2"])
def test_few_layers_stand_for_all(config: PretrainedConfig, *, checkpointing: bool) -> None:
    model = on_meta(config).to(torch.bfloat16)
    bound = dtplan.bind(model, tp=2)
    cut = cut_model(model, bound)
    assert len(set(cut.stands_for.values())) == (3 if config is not GEMMA2 else 4)  # of two kinds of attention
    assert len(model.get_submodule("model.layers")) == config.num_hidden_layers
    whole = Cut(model=model, stands_for={name: name for name in bound.fsdp_units})
    peaks = []
    for one in (cut, whole):
        options: dict[str, Any] = {"tp": 2, "rows": 1, "sequence": 16, "dtype": torch.bfloat16}
        step = traced_step(one, "auto", checkpointing=checkpointing, **options)
        peaks.append(peak(step, bound, BF16))
    assert peaks[0].held == peaks[1].held
    assert peaks[0].activations == peaks[1].activations
    assert peaks[0].total == pytest.approx(peaks[1].total, abs=2048)


FUSED = {"attn_implementation": "sdpa", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5}


@pytest.mark.parametrize("layers", ["torch", "te", "fp8"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "SP"])
@pytest.mark.parametrize("make", [llama, neox])
def test_collectives_of_the_trace_are_those_of_the_ledger(
    make: Callable[..., PretrainedConfig], layers: str, *, sequence_parallel: bool
) -> None:
    """Calls and bytes, also of fused layers: those gather twice what they normed, in FP8 with a byte a number."""
    config = make(**FUSED, **({"hidden_act": "gelu_new"} if make is neox else {}))
    options: dict[str, Any] = {"tp": 2, "sequence_parallel": sequence_parallel, "loss_parallel": True}
    model = on_meta(config).to(torch.bfloat16)
    bound, fp8 = dtplan.bind(model, **options), layers == "fp8"
    if layers != "torch":
        choice = choose(model, bound, fp8=fp8)
        assert not choice.kept
        bound = rebound(bound, choice.fused)
    step = traced(config, by_unit=True, te=layers != "torch", fp8=fp8, **options)
    numbers = Counter(step.units)
    found: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for segment in (*step.forward.values(), *step.backward.values()):
        for op in segment.ops:
            if op.kind == "collective":
                key = (segment.phase, op.name.removesuffix("_tensor").removesuffix("_into"))
                found[key] += numbers.get(segment.name, 1)
                size[key] += numbers.get(segment.name, 1) * op.bytes
    book = ledger(bound, batch=2, sequence=16, checkpointing=True, fp8=fp8)
    assert found == book.counts()
    said: Counter[tuple[str, str]] = Counter()
    for entry in book.entries:
        said[entry.direction, entry.kind] += entry.count * entry.bytes
    assert size == said


def test_a_model_without_a_plan_is_sized_at_tp_1() -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=4, num_attention_heads=4, word_embed_proj_dim=32
    )
    ask = Ask(gpus=2, memory=8 << 30, gpu=GPUS["a100"], sequence=16, batch=2)
    found = fit(on_meta(config), "auto", ask)
    assert "no built-in plan serves" in found.refused[2]
    numbers = sum(p.numel() for p in on_meta(config).parameters())
    whole = found.rows[-1]
    assert (whole.tp, whole.shard, whole.held.parameters) == (1, 1, 2 * numbers)
    assert found.rows[0].held.parameters < 0.6 * whole.held.parameters
    assert {variant.switches.layers for variant in found.others} == {"torch"}


def test_a_process_with_ranks_is_refused() -> None:
    with pytest.raises(TraceError, match="without a process group"):
        simulated_ranks(1, lambda rank: traced(llama()))


# ------------------------------------------------------------------------------------------------------------- peak


def fsdp_peak(rank: int, config: LlamaConfig, options: dict[str, Any]) -> int:
    """On a gloo rank: how far a step under FSDP2 rises above what is held between steps.

    The least of three: on a busy machine gloo's threads may hold what they sent a little longer.
    """
    with drawing(seed=0):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
    model = dtplan.parallelize(model, mesh, loss_parallel=True, **options)
    ids = batch(config, rows=1, length=64)["input_ids"]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    found = []
    for _ in range(3):
        watch = Watch(local_tensors([ids, *model.parameters(), *model.buffers()]), device="cpu")
        watch.begin("step", "step")
        with watch, watched_storages(watch):
            model(input_ids=ids, labels=ids).loss.backward()
        found.append(watch.segments[0].above)
        model.zero_grad()
    return min(found)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_under_fsdp_is_that_of_real_ranks(pool: GlooPool, *, checkpointing: bool) -> None:
    config = llama(hidden_size=128, intermediate_size=256, vocab_size=256, num_hidden_layers=5)
    real = pool.run(fsdp_peak, config, {"activation_checkpointing": checkpointing}, ranks=2)[0]
    step = traced(config, rows=1, sequence=64, loss_parallel=True, checkpointing=checkpointing, by_unit=True)
    bound = dtplan.bind(on_meta(config).to(torch.bfloat16), shard=2, loss_parallel=True)
    found = peak(step, bound, BF16, "sgd")
    assert found.total - found.held.parameters - WORKSPACE == pytest.approx(real, rel=0.01)


def test_micro_batches_add_gradients_to_those_that_are_there() -> None:
    config = llama(num_hidden_layers=5)
    for shard in (1, 2):
        bound = dtplan.bind(on_meta(config).to(torch.bfloat16), shard=shard)
        step = traced(config, by_unit=shard > 1)
        once, twice = (peak(step, bound, BF16, times=times) for times in (1, 2))
        assert once.total < twice.total <= once.total + once.held.gradients
        assert once.held == twice.held


def test_fp8_keeps_quantised_weights_unless_fsdp_gathers_them_again() -> None:
    config = llama(attn_implementation="sdpa", num_hidden_layers=3, hidden_size=64, intermediate_size=128)
    te = {"te": True, "loss_parallel": True}
    plain, fused = traced(config, loss_parallel=True), traced(config, **te)
    fp8, under_fsdp = traced(config, fp8=True, **te), traced(config, fp8=True, by_unit=True, **te)
    kept = {name: step.forward["model.layers.1"].change for name, step in
            {"plain": plain, "fused": fused, "fp8": fp8, "fsdp": under_fsdp}.items()}  # fmt: skip
    weights = 4 * 64 * 64 + 3 * 64 * 128
    assert kept["fused"] < kept["plain"]
    assert kept["fp8"] - kept["fsdp"] == 2 * weights  # one byte each, and once more transposed
    assert kept["fsdp"] < kept["fused"]
    assert {op.kind for op in fp8.backward["model.layers.1"].ops} >= {"fp8", "attention", "other"}
    for other in (neox(attn_implementation="sdpa", hidden_act="gelu_new"), config):
        for options in ({"sequence_parallel": True}, {"checkpointing": True}):
            step = traced(other, tp=2, fp8=True, **te, **options)
            assert step.backward["before" if "before" in step.backward else "after"].ops


# --------------------------------------------------------------------------------------------------------- estimate


def test_matrix_work_is_six_flop_a_weight_and_token() -> None:
    config = llama(num_hidden_layers=5)
    model = on_meta(config)
    step = traced(config, rows=3, sequence=16)
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    scores = 5 * 4 * 16 * 16 * 8 * 2  # of the two products in eager attention: layers, heads, rows, columns, width
    numbers = Counter(step.units)
    segments = (*step.forward.values(), *step.backward.values())
    products = [(s, op) for s in segments for op in s.ops if op.kind == "matrix"]
    # Some releases of transformers make the angles of positions by a product, too.
    work = sum(op.flops * numbers.get(s.name, 1) for s, op in products if "rotary_emb" not in op.module)
    assert work == 6 * 48 * weights + 3 * 3 * 2 * scores


def test_links_know_who_shares_a_host() -> None:
    gpu = GPUS["h200"]
    links = Links(gpu, {"tp": 4, "shard": 4, "replicate": 2}, per_host=8)
    assert (links.within("tp"), links.within("shard"), links.within("replicate")) == (True, False, False)
    assert links.rate("tp") == gpu.link
    assert links.rate("shard") == 2 * gpu.network  # two ranks of the axis in each host, each with its adapter
    assert links.rate("replicate") == gpu.network
    assert Links(gpu, {"tp": 1, "shard": 64, "replicate": 1}, per_host=8).rate("shard") == gpu.link
    assert links.seconds("all_reduce", 0, "tp") == 0
    assert links.seconds("all_reduce", 10**9, "tp") == pytest.approx(gpu.latency + 1.5e9 / gpu.link)


# -------------------------------------------------------------------------------------------------------------- fit

SMALL = LlamaConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    architectures=["LlamaForCausalLM"],
)


@pytest.fixture(scope="module")
def fitted() -> Fit:
    """On four GPUs with two in a host."""
    ask = Ask(gpus=4, memory=4 << 30, reserve=0, gpu=GPUS["h100"], sequence=2048, batch=8, per_host=2)
    return fit(on_meta(SMALL), "auto", ask)


def test_all_layouts_are_there_and_the_smallest_is_the_fastest_at_its_degree(fitted: Fit) -> None:
    assert [(r.tp, r.shard, r.replicate) for r in fitted.rows] == [
        (1, 4, 1),
        (1, 2, 2),
        (1, 1, 4),
        (2, 2, 1),
        (2, 1, 2),
    ]
    assert "hosts of 2" in fitted.refused[4]
    assert [row.times for row in fitted.rows] == [2, 2, 2, 4, 4]
    assert {str(v.switches) for v in fitted.rows[3].variants} == {"plain", "SP", "CKPT", "SP+CKPT"}
    choice = fitted.smallest
    assert choice is not None
    row, variant = choice
    fits = [v for r in fitted.rows if r.tp == row.tp for v in r.fitting(fitted.ask.usable)]
    assert variant.estimate.seconds == min(v.estimate.seconds for v in fits)
    assert not any(r.fitting(fitted.ask.usable) for r in fitted.rows if r.tp < row.tp)
    assert {v.switches.layers for v in fitted.others} == {"torch", "te", "fp8"}


def test_terms_add_up_and_lanes_are_consistent(fitted: Fit) -> None:
    for row in fitted.rows:
        for variant in row.variants:
            assert variant.estimate.seconds == pytest.approx(sum(t.exposed for t in variant.estimate.terms))
            assert all(0 <= t.exposed <= t.seconds * (1 + 1e-9) for t in variant.estimate.terms)
    plain, ckpt = ({str(v.switches): v for v in fitted.rows[0].variants}[kind] for kind in ("plain", "CKPT"))
    assert ckpt.peak.activations < plain.peak.activations
    assert ckpt.estimate.seconds > plain.estimate.seconds


def test_a_plan_whose_stream_stays_whole_has_no_rows_with_sequence_parallelism() -> None:
    plan = parse_plan("dtplan: 1\nextends: llama\nresidual: {sequence_parallel: R}\n")
    ask = Ask(gpus=2, memory=40 << 30, gpu=GPUS["h200"], sequence=512, batch=2, tp=2)
    found = fit(on_meta(SMALL), plan, ask)
    assert {str(v.switches) for row in found.rows for v in row.variants} == {"plain", "CKPT"}
    assert not any(v.switches.sequence_parallel for v in found.others)


def test_a_length_that_fp8_cannot_take_is_sized_without_it() -> None:
    ask = Ask(gpus=2, memory=40 << 30, gpu=GPUS["h200"], sequence=511, batch=2)
    found = fit(on_meta(SMALL), "auto", ask)
    assert {v.switches.layers for v in found.others} == {"torch", "te"}


def test_sequence_parallelism_that_cannot_be_is_refused() -> None:
    plan = parse_plan("dtplan: 1\nextends: llama\nresidual: {sequence_parallel: R}\n")
    for given, sequence, why in ((plan, 512, "DTP416"), ("auto", 511, "does not divide 511 tokens")):
        ask = Ask(gpus=2, memory=1 << 30, gpu=GPUS["h200"], sequence=sequence, batch=2, tp=2, sequence_parallel=True)
        with pytest.raises(FitError, match=why):
            fit(on_meta(SMALL), given, ask)


def test_the_table_has_the_calls_and_bytes_of_the_schedule() -> None:
    """With all kinds of layers; recomputation repeats calls, which the table leaves out."""
    ask = Ask(gpus=2, memory=40 << 30, gpu=GPUS["h200"], sequence=512, batch=1, tp=2)
    found = fit(on_meta(SMALL), "auto", ask)
    kept = [variant for variant in found.others if not variant.switches.checkpointing]
    assert len(kept) == 6
    for variant in kept:
        entries = variant.book.entries
        calls, sent = sum(e.count for e in entries), sum(e.wire_bytes(2) for e in entries)
        told = next(term.told for term in variant.estimate.terms if term.name == "collectives on tp")
        assert told.startswith(f"{calls} calls, {sent / 1e9:.2f} GB sent a rank"), str(variant.switches)


def test_less_memory_asks_for_more_tp_and_then_says_what_is_short(fitted: Fit) -> None:
    leanest = {tp: min(v.peak.total for r in fitted.rows if r.tp == tp for v in r.variants) for tp in (1, 2)}
    assert leanest[2] < leanest[1]
    between = dataclasses.replace(fitted.ask, memory=(leanest[1] + leanest[2]) // 2)
    choice = dataclasses.replace(fitted, ask=between).smallest
    assert choice is not None
    assert choice[0].tp == 2
    none = dataclasses.replace(fitted, ask=dataclasses.replace(between, memory=leanest[2] - 1))
    assert none.smallest is None
    assert none.nearest[1].peak.total == leanest[2]


def test_a_timeline_names_modules_and_ends_with_the_step(fitted: Fit) -> None:
    row = next(row for row in fitted.rows if (row.tp, row.shard) == (2, 2))
    variant = next(v for v in row.variants if str(v.switches) == "SP")
    trace = json.loads(json.dumps(chrome_trace(variant, fitted.ask)))
    assert "estimate" in trace["otherData"]["note"]
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    mine = [event for event in events if event["pid"] == 0]
    lanes = {event["args"]["name"]: event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert set(lanes) == {"kernels", "collectives on tp", "FSDP2's collectives"}
    names = {event["name"] for event in mine}
    assert {"model.layers.7.mlp.down_proj", "model.layers.0 backward", "all-gather model.layers.3"} <= names
    assert {"reduce_scatter_tensor model.layers.5.self_attn.o_proj", "optimizer step"} <= names
    gathered = [e["ts"] + e["dur"] for e in mine if e["name"] == "all-gather model.layers.3"]
    copied = [e["ts"] for e in mine if e["name"] == "copy out model.layers.3"]
    assert len(gathered) == len(copied) == 2  # forward, backward
    assert all(end <= start + 0.01 for end, start in zip(gathered, copied, strict=True))
    for tid in (1, 2):
        lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["tid"] == tid)
        assert all(end <= start + 0.01 for (_, end), (start, _) in itertools.pairwise(lane))
    optimizer = next(t.seconds for t in variant.estimate.terms if t.name == "optimizer")
    once = (variant.estimate.seconds - optimizer) / row.times
    ends = max(event["ts"] + event["dur"] for event in mine)
    assert ends == pytest.approx((once + optimizer) * 1e6, rel=1e-6)


# ------------------------------------------------------------------------------------------------------ command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    SMALL.save_pretrained(folder)
    return str(folder)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["fit", *args])


def test_the_command_prints_tables_and_writes_a_trace(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    options = (
        "--gpus",
        "2",
        "--memory",
        "8GiB",
        "--reserve",
        "1GiB",
        "--seq",
        "512",
        "--explain",
        "--trace",
        str(file),
    )
    result = run("--model", folder, *options)
    assert result.exit_code == 0, result.output
    for text in (
        "0.16 billion parameters",
        "Smallest tp that fits: tp 1",
        "matrix products",
        "dtplan.init(",
        "GB sent",
    ):
        assert text in result.output
    assert json.loads(file.read_text())["traceEvents"]


def test_compiled_takes_less_and_says_how(folder: str) -> None:
    options = ("--gpus", "2", "--tp", "2", "--memory", "8GiB", "--seq", "512", "--te", "--no-checkpointing")
    output = run("--model", folder, *options, "--compiled").output
    assert "TransformerEngine bf16; compiled" in output
    assert output.endswith("model = dtplan.compile_model(model)\n")
    peaks = [json.loads(run("--model", folder, *options, *more, "--json").output) for more in ((), ("--compiled",))]
    assert [data["compiled"] for data in peaks] == [False, True]
    before, after = (data["rows"][0]["variants"][0]["peak_bytes"] for data in peaks)
    assert after < before


def test_the_json_says_the_same(folder: str) -> None:
    result = run("--model", folder, "--gpus", "2", "--tp", "2", "--memory", "8GiB", "--seq", "512", "--fp8", "--json")
    data = json.loads(result.output)
    assert data["smallest"]["tp"] == 2
    (row,) = data["rows"]
    assert [v["fits"] for v in row["variants"]] == [v["peak_bytes"] <= data["usable_bytes"] for v in row["variants"]]
    assert row["variants"][0]["layers"] == "fp8"
    calls = row["variants"][0]["collectives"]["tp"]
    assert calls["calls"] > 0
    assert math.isclose(sum(t["exposed_seconds"] for t in row["variants"][0]["terms"]), row["variants"][0]["seconds"])


def test_what_does_not_fit_is_told_with_what_would_help(folder: str) -> None:
    result = run("--model", folder, "--gpus", "1", "--memory", "1GiB", "--reserve", "0GiB", "--no-checkpointing")
    assert result.exit_code == 1
    assert "Nothing fits. The leanest layout is tp 1 x shard 1 x replicate 1: it is " in result.output
    assert "  - --optimizer momentum" in result.output
    assert "  - more GPUs" in result.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--gpus", "8", "--batch", "12", "--tp", "1"), "do not divide a batch of 12\n  = give --batch 8 or 16"),
        (("--gpus", "8", "--tp", "3"), "tp 3: does not divide 8 GPUs"),
        (("--gpus", "64", "--tp", "32"), "tensor_parallel_degree 32 does not divide"),
    ],
)
def test_wrong_requests_say_what_is_right(folder: str, options: tuple[str, ...], told: str) -> None:
    result = run("--model", folder, *options)
    assert isinstance(result.exception, FitError)
    assert told in str(result.exception)


@pytest.mark.parametrize(("option", "told"), [(("--memory", "80 stone"), "80GiB or 141GB"), (("--gpu", "v1"), "h200")])
def test_wrong_options_say_what_is_allowed(folder: str, option: tuple[str, str], told: str) -> None:
    result = run("--model", folder, "--gpus", "1", *option)
    assert result.exit_code == 2
    assert told in result.output
