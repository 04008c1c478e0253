"""The laws that hold for every config, degree and layout, as properties.

Each runs in the cheapest world that can break it: binding needs no ranks, numbers need simulated ones, random numbers
need processes. Costly ones take a share of the profile's examples.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import dtplan
from dtplan.plan.library import builtin_plans
from dtplan.planner.collectives import Group, all_gather, chunk_sizes, own_part
from dtplan.planner.ledger import ledger
from dtplan.prove.counter import CollectiveCounter
from dtplan.prove.live import randomized
from dtplan.prove.oracle import BOUND, Outcome, errors, outcome, relative_error
from dtplan.prove.pool import GlooPool, Kept
from dtplan.prove.simulated import simulated_ranks
from dtplan.testing import assert_plan_equivalent, degrees, model_configs, plans, token_batches
from dtplan.testing.profiles import share
from dtplan.testing.strategies import on_meta
from tests.models import neox

ARCHS = ("llama", "gpt_neox")
COSTLY = settings(max_examples=share(0.3))
SWITCHES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"sequence_parallel": st.booleans(), "loss_parallel": st.booleans()}
)


@st.composite
def cases(draw: st.DrawFn, /, *, tp: tuple[int, ...] = (2, 4, 1), **axes: Any) -> tuple[Any, dict[str, Any]]:
    """A config of either architecture, and degrees at which its built-in plan binds."""
    config = draw(st.sampled_from(ARCHS).flatmap(model_configs).filter(lambda c: c.num_attention_heads % tp[0] == 0))
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    fitting = tuple(degree for degree in tp if heads % degree == 0)
    return config, draw(degrees(config, tp=fitting or (1,), **axes))


def live(config: Any) -> Any:
    """In float64, every parameter random, no dropout."""
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return randomized(model.double().eval(), seed=0)


def on_mesh(model: nn.Module, sizes: dict[str, Any], **options: Any) -> Any:
    """A copy of the model, sharded over the axes that are larger than 1, and tp."""
    fsdp = sizes["shard"] * sizes["replicate"] > 1
    axes = {n: sizes[n] for n in ("replicate", "shard", "tp") if n == "tp" or (fsdp and (sizes[n] > 1 or n == "shard"))}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return dtplan.parallelize(copy.deepcopy(model), mesh, **options)


def world(sizes: dict[str, Any]) -> int:
    return sizes["tp"] * sizes["shard"] * sizes["replicate"]


# --------------------------------------------------------------------------------------------------------- no ranks


def said(bound: dtplan.BoundPlan, **renamed: str) -> Any:
    """A bound plan without the places at which its rules were written, and with modules renamed."""
    text = bound.json_text()
    for old, new in renamed.items():
        text = re.sub(rf"\b{old}\b", new, text)
    data = json.loads(text)
    del data["plan"], data["digest"]
    for ruled in (*data["modules"], *data["te"]):
        del ruled["rule"]
    return data


@given(cases(), SWITCHES, st.data())
def test_binding_is_deterministic_and_independent_of_how_a_plan_is_written(
    case: tuple[Any, dict[str, Any]], switches: dict[str, Any], data: st.DataObject
) -> None:
    config, sizes = case
    plan = data.draw(plans(config.model_type))
    first, second = (dtplan.bind(on_meta(config), **sizes, **switches) for _ in range(2))
    assert first.json_text() == second.json_text()
    written_otherwise = dtplan.bind(on_meta(config), plan, **sizes, **switches)
    assert said(written_otherwise) == said(first)
    assert written_otherwise.digest == first.digest


@given(cases(), SWITCHES)
def test_live_and_meta_models_bind_alike(case: tuple[Any, dict[str, Any]], switches: dict[str, Any]) -> None:
    config, sizes = case
    model = AutoModelForCausalLM.from_config(config).to(next(on_meta(config).parameters()).dtype)
    assert dtplan.bind(model, **sizes, **switches).json_text() == (
        dtplan.bind(on_meta(config), **sizes, **switches).json_text()
    )


MODULES = {
    "llama": ("q_proj", "o_proj", "self_attn", "down_proj", "post_attention_layernorm", "embed_tokens", "rotary_emb"),
    "gpt_neox": ("query_key_value", "dense_4h_to_h", "dense", "final_layer_norm", "embed_in", "layers"),
}


def with_renamed_modules(model: nn.Module, old: str, new: str) -> nn.Module:
    """The same model, in which every module called ``old`` is called ``new``."""
    for module in list(model.modules()):
        module._modules = {new if name == old else name: child for name, child in module._modules.items()}
    return model


@given(st.data())
def test_a_renamed_module_under_a_renamed_rule_binds_alike(data: st.DataObject) -> None:
    config, sizes = data.draw(cases())
    old, new = data.draw(st.sampled_from(MODULES[config.model_type])), "renamed_here"
    plan = dtplan.parse_plan(re.sub(rf"\b{old}\b", new, builtin_plans()[config.model_type].read_text()))
    switches = data.draw(SWITCHES)
    renamed = dtplan.bind(with_renamed_modules(on_meta(config), old, new), plan, **sizes, **switches)
    bound = dtplan.bind(on_meta(config), **sizes, **switches)
    assert not re.search(rf"\b{old}\b", renamed.json_text())
    assert said(renamed) == said(bound, **{old: new})


# -------------------------------------------------------------------------------------------------- simulated ranks


@COSTLY
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_cut_then_gathered_is_the_identity(shape: list[int], tp: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    def on_rank(rank: int) -> tuple[int, bool]:
        group = Group.of(init_device_mesh("cpu", (tp,)).get_group())
        part = own_part(whole, dim, group)
        return part.shape[dim], torch.equal(all_gather(part, dim, group, shape[dim]), whole)

    found = simulated_ranks(tp, on_rank)
    assert [length for length, _ in found] == chunk_sizes(shape[dim], tp)
    assert sum(length for length, _ in found) == shape[dim]
    assert all(same for _, same in found)


@COSTLY
@given(cases(shard=(1, 2)))
def test_sharded_then_gathered_is_the_identity_and_local_shapes_add_up(case: tuple[Any, dict[str, Any]]) -> None:
    config, sizes = case
    model = live(config)
    bound = {name: tensor for _, name, tensor in dtplan.bind(model, **sizes).tensors()}

    def on_rank(rank: int) -> dict[str, tuple[int, torch.Size, bool]]:
        sharded = on_mesh(model, sizes)
        return {
            name: (p.to_local().numel(), p.to_local().shape, torch.equal(p.full_tensor(), model.get_parameter(name)))
            for name, p in sharded.named_parameters()
            if isinstance(p, DTensor)
        }

    ranks = simulated_ranks(world(sizes), on_rank)
    for name, parameter in model.named_parameters():
        assert all(found[name][2] for found in ranks)
        copies = sizes["tp"] if bound[name].placement.dim is None else 1
        assert sum(found[name][0] for found in ranks) == copies * parameter.numel()
        if sizes["shard"] == 1:
            assert ranks[0][name][1] == torch.Size(bound[name].local_shape)


@COSTLY
@given(cases(tp=(1,)), SWITCHES)
def test_tp_1_is_a_no_op(case: tuple[Any, dict[str, Any]], switches: dict[str, Any]) -> None:
    """To the bit, dropout included; the loss of logits that could be cut is rounded otherwise."""
    config, sizes = case
    config.attention_dropout = 0.5
    model = live(config).train()
    batch = {"input_ids": torch.arange(12).reshape(2, 6), "labels": torch.arange(12).reshape(2, 6)}

    def on_rank(rank: int) -> Outcome:
        sharded = on_mesh(model, sizes, **switches)
        torch.manual_seed(5)
        return outcome(sharded, batch)

    (found,) = simulated_ranks(1, on_rank)
    torch.manual_seed(5)
    truth = outcome(copy.deepcopy(model), batch)
    assert torch.equal(found.logits, truth.logits)
    assert max(errors(found, truth).values()) <= (BOUND if switches["loss_parallel"] else 0)


@COSTLY
@given(cases(tp=(2, 4)), SWITCHES, st.integers(0, 99))
def test_the_sharded_model_is_the_unsharded_one(
    case: tuple[Any, dict[str, Any]], switches: dict[str, Any], seed: int
) -> None:
    config, sizes = case
    assert_plan_equivalent(lambda: AutoModelForCausalLM.from_config(config), **sizes, **switches, seed=seed)


@COSTLY
@given(cases(shard=(1, 2)), st.data())
def test_the_gradient_norm_is_the_unsharded_one(case: tuple[Any, dict[str, Any]], data: st.DataObject) -> None:
    config, sizes = case
    batch = data.draw(token_batches(config.vocab_size, multiple_of=sizes["tp"]))
    batch["labels"] = batch["input_ids"]
    limit, sequence_parallel = data.draw(st.sampled_from((1e-3, 1e3))), data.draw(st.booleans())
    if batch["input_ids"].shape[1] < 2:
        batch = {key: value.repeat(1, 2) for key, value in batch.items()}
    model = live(config)

    def on_rank(rank: int) -> tuple[float, Tensor]:
        """Every data-parallel rank reads the same rows, so the mean over them is the gradient."""
        sharded = on_mesh(model, sizes, sequence_parallel=sequence_parallel)
        outcome(sharded, batch)
        norm = dtplan.clip_grad_norm_(sharded, limit).item()
        return norm, next(p.grad.full_tensor() for p in sharded.parameters())

    truth = copy.deepcopy(model)
    outcome(truth, batch)
    norm = torch.nn.utils.clip_grad_norm_(truth.parameters(), limit).item()
    for found, clipped in simulated_ranks(world(sizes), on_rank):
        assert found == pytest.approx(norm, rel=BOUND)
        assert relative_error(clipped, next(truth.parameters()).grad) <= BOUND


@COSTLY
@given(cases(tp=(2, 4)), SWITCHES)
def test_the_ledger_is_what_a_counter_sees(case: tuple[Any, dict[str, Any]], switches: dict[str, Any]) -> None:
    config, sizes = case
    model = live(config)
    ids = torch.arange(8).reshape(1, 8)
    book = ledger(dtplan.bind(model, **sizes, **switches), batch=1, sequence=8, dtype="float64")
    expected: dict[str, Any] = {}
    for (_, kind), count in book.counts().items():
        expected[kind] = expected.get(kind, 0) + count

    def on_rank(rank: int) -> dict[str, Any]:
        sharded = on_mesh(model, sizes, **switches)
        sharded(input_ids=ids)  # the first call compares batches over ranks: no part of a step
        with CollectiveCounter() as counter:
            sharded(input_ids=ids, labels=ids).loss.backward()
        return dict(counter.counts)

    assert simulated_ranks(sizes["tp"], on_rank) == [expected] * sizes["tp"]


@COSTLY
@given(st.data())
def test_a_checkpoint_that_went_through_two_degrees_has_the_same_bytes(data: st.DataObject) -> None:
    config, sizes = data.draw(cases(shard=(1, 2)))
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    other = data.draw(degrees(config, tp=[t for t in (2, 4, 1) if heads % t == 0], shard=(1, 2)))
    with TemporaryDirectory() as place:
        folder = Path(place)
        live(config).to(torch.float32).save_pretrained(folder / "given")
        for source, target, axes in (("given", "once", sizes), ("once", "twice", other)):
            simulated_ranks(world(axes), _resaved, config, axes, folder / source, folder / target)
        files = [file.name for file in sorted((folder / "once").iterdir())]
        assert "model.safetensors" in files
        for file in files:
            assert (folder / "once" / file).read_bytes() == (folder / "twice" / file).read_bytes()
        assert sorted(p.name for p in (folder / "twice").iterdir()) == files
        given_, twice = (load_file(folder / name / "model.safetensors") for name in ("given", "twice"))
        assert given_.keys() == twice.keys()
        assert all(torch.equal(twice[name], tensor) for name, tensor in given_.items())


def _resaved(rank: int, config: Any, sizes: dict[str, Any], source: Path, target: Path) -> None:
    model = on_mesh(on_meta(config), sizes)
    dtplan.load(model, source)
    dtplan.save(model, target)


# -------------------------------------------------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def pair(pool: GlooPool) -> Iterator[Kept]:
    """Two processes, each with a random generator of its own."""
    with pool.kept(ranks=2) as pair:
        yield pair


def dropped_errors(rank: int, config: Any, seed: int) -> dict[str, float]:
    model = live(config).train()
    ids = torch.arange(12).reshape(2, 6)
    found = []
    for given_ in (on_mesh(model, {"tp": 2, "shard": 1, "replicate": 1}), model):
        torch.manual_seed(seed)
        found.append(outcome(given_, {"input_ids": ids, "labels": ids}))
    return errors(*found)


@COSTLY
@given(
    config=model_configs("gpt_neox", num_attention_heads=st.sampled_from((2, 4)), hidden_size=32),
    p=st.floats(0.1, 0.9),
    seed=st.integers(0, 1 << 40),
)
def test_b97_the_same_seed_gives_the_unsharded_hidden_dropout(pair: Kept, config: Any, p: float, seed: int) -> None:
    config.hidden_dropout = p
    for found in pair.run(dropped_errors, config, seed):
        assert max(found.values()) <= BOUND


def attention_masks(rank: int, config: Any, seed: int) -> list[Tensor]:
    """Which weights of each [row, head] of each layer were kept, and the generator's next number."""
    model = on_mesh(live(config).train(), {"tp": 2, "shard": 1, "replicate": 1})
    torch.manual_seed(seed)
    weights = model(input_ids=torch.zeros(2, 24, dtype=torch.long), output_attentions=True).attentions
    lower = torch.ones(24, 24).tril().bool()
    return [*(layer[..., lower].flatten(0, 1) != 0 for layer in weights), torch.randint(1 << 40, (1,))]


@COSTLY
@given(
    config=st.sampled_from(ARCHS).flatmap(
        lambda arch: model_configs(arch, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=8)
    ),
    seed=st.integers(0, 1 << 40),
)
def test_b98_every_head_of_every_rank_has_a_mask_of_its_own(pair: Kept, config: Any, seed: int) -> None:
    config.attention_dropout = 0.5
    first, second = pair.run(attention_masks, config, seed)
    assert torch.equal(first.pop(), second.pop())
    heads = [tuple(head.tolist()) for layer in (*first, *second) for head in layer]
    assert len(heads) == 2 * 4 * config.num_hidden_layers
    assert len(set(heads)) == len(heads)
    assert [m.tolist() for m in pair.run(attention_masks, config, seed)[0][:-1]] == [m.tolist() for m in first]


def test_the_laws_are_drawn_from_both_architectures_and_uneven_sizes() -> None:
    """What the laws run on is not one corner: over 60 draws every kind comes."""
    seen: set[str] = set()

    @settings(max_examples=60, derandomize=True, database=None)
    @given(cases())
    def look(case: tuple[Any, dict[str, Any]]) -> None:
        config, sizes = case
        seen.update((config.model_type, f"tp {sizes['tp']}"))
        seen.add("uneven" if config.vocab_size % sizes["tp"] else "even")
        seen.add("tied" if config.tie_word_embeddings else "untied")

    look()
    assert seen == {*ARCHS, "tp 1", "tp 2", "tp 4", "uneven", "even", "tied", "untied"}
    assert neox().model_type in seen
