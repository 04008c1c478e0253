"""Weights without a checkpoint: the model's own distributions, the same at every degree (B72, B76, B77, B97)."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, GPT2Config

import dtplan
from dtplan import WeightsError
from dtplan.prove.oracle import whole
from dtplan.prove.simulated import simulated_ranks
from dtplan.te import engine
from dtplan.weights import initialize
from tests.cases import ids_of, t0
from tests.models import drawing, llama, neox, on_meta
from tests.te_standin import ENGINE

Shape = tuple[int, int, int]
GPT2 = GPT2Config(
    vocab_size=33, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False
)


def mesh_of(shape: Shape) -> Any:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))


def wholes(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, in the layout of checkpoints."""
    found: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value, fused = whole(tensor.detach()).clone(), dtplan.applied(model).stored.get(name)
        found |= {name: value} if fused is None else fused.split(value)
    return found


def drawn(rank: int, config: Any, shape: Shape, plan: str, seed: int, **options: Any) -> dict[str, Tensor]:
    model = dtplan.parallelize(on_meta(config), mesh_of(shape), plan, **options)
    dtplan.initialize(model, seed)
    return wholes(model)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


FAMILIES = {
    "llama-uneven": (llama(vocab_size=33), "auto"),
    "neox-tied": (neox(tie_word_embeddings=True), "auto"),
    "gpt2-fused": (GPT2, "gpt2"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_b97_the_same_seed_gives_the_same_weights_at_every_mesh(family: str) -> None:
    config, plan = FAMILIES[family]
    (truth,) = simulated_ranks(1, drawn, config, (1, 1, 1), plan, 0)
    (other,) = simulated_ranks(1, drawn, config, (1, 1, 1), plan, 1)
    assert not same(truth, other)
    for shape in ((1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 2)):
        world = shape[0] * shape[1] * shape[2]
        assert all(same(found, truth) for found in simulated_ranks(world, drawn, config, shape, plan, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_are_those_of_transformers(family: str) -> None:
    """GPT-2's output projections are narrower: the init of the modules around them says so."""
    config, plan = FAMILIES[family]
    (found,) = simulated_ranks(1, drawn, config, (1, 1, 1), plan, 0)
    with drawing(0):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    for name, tensor in model.named_parameters():
        mean, deviation = tensor.mean().item(), tensor.std().item()
        # Of n numbers, the deviation is known to within 1 / sqrt(2 n) of itself; the vectors are constants.
        assert found[name].mean().item() == pytest.approx(mean, abs=6 * deviation / tensor.numel() ** 0.5)
        assert found[name].std().item() == pytest.approx(deviation, rel=6 / tensor.numel() ** 0.5)
    for name, buffer in model.named_buffers():
        assert torch.equal(found[name], buffer), "B72: rotary tables are computed again"
    if family == "gpt2-fused":
        narrow, wide = found["transformer.h.0.mlp.c_proj.weight"], found["transformer.h.0.mlp.c_fc.weight"]
        assert narrow.std().item() == pytest.approx(wide.std().item() / 2, rel=0.1)


class Pair(nn.Module):
    """Two layers that are built alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


PAIR = "dtplan: 1\nrules: {'{first,second}': {style: colwise}}\n"


def _pair(rank: int, shape: Shape, offload: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.device("meta"):
        model = Pair()
    dtplan.parallelize(model, mesh_of(shape), dtplan.parse_plan(PAIR), cpu_offload=offload)
    before = torch.get_rng_state()
    dtplan.initialize(model, 3)
    assert torch.equal(torch.get_rng_state(), before), "the process' own stream is not drawn from"
    values = [whole(p.detach()) for p in model.parameters()]
    return values[0], values[1], values[2], values[3]


@pytest.mark.parametrize("offload", [False, True], ids=["", "cpu-offload"])
def test_b76_ranks_draw_different_halves_and_layers_differ(offload: bool) -> None:
    (alone,) = simulated_ranks(1, _pair, (1, 1, 1), offload)
    for first, bias, second, other_bias in simulated_ranks(2, _pair, (1, 1, 2), offload):
        assert torch.equal(first, alone[0])
        assert not torch.equal(first[:4], first[4:])
        assert not torch.equal(first, second)
        # torch's own reset_parameters, since the model's init leaves biases alone
        assert bias.abs().max() <= 8**-0.5
        assert not torch.equal(bias, other_bias)


class Scale(nn.Module):
    """A parameter that no init knows (B77)."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))


class Forgetful(Pair):
    """A model with one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()


def _forgetful(rank: int) -> str:
    with torch.device("meta"):
        model = Forgetful()
    dtplan.parallelize(model, mesh_of((1, 1, 2)), dtplan.parse_plan(PAIR[:-1].replace("}}", "}, scale: replicate}")))
    with pytest.raises(WeightsError) as caught:
        dtplan.initialize(model)
    return str(caught.value)


def test_b77_a_parameter_that_no_init_knows_is_named() -> None:
    (text,) = set(simulated_ranks(2, _forgetful))
    assert "1 tensors are left without a value: scale.factor;" in text


@pytest.mark.parametrize("config", [llama(), neox()], ids=["llama", "neox"])
def test_b77_fused_layers_are_drawn_as_the_modules_that_they_replace(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for TransformerEngine: transformers would fill its LayerNormLinear with ones, as a norm."""
    (truth,) = simulated_ranks(1, drawn_in_double, config, (1, 1, 1))
    monkeypatch.setattr(engine, "find", lambda: ENGINE)
    for found in simulated_ranks(4, drawn_in_double, config, (1, 2, 2)):
        assert found.pop("fused")
        assert same(found, {name: tensor for name, tensor in truth.items() if name != "fused"})


def drawn_in_double(rank: int, config: Any, shape: Shape) -> dict[str, Any]:
    model = dtplan.parallelize(on_meta(config).double(), mesh_of(shape))
    dtplan.initialize(model)
    return {**wholes(model), "fused": any(".te_" in name for name, _ in model.named_modules())}


def test_no_rank_holds_more_than_one_whole_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """B73, of initialisation: what is alive of whole values, whenever one more is made."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    peaks: list[int] = []
    blank = initialize._Draw._blank

    def counted(self: Any, name: str, parameter: Any) -> Any:
        made = blank(self, name, parameter)
        if made is not None and not made.is_meta:
            alive.add(made)
            peaks.append(sum(one.nbytes for one in alive))
        return made

    monkeypatch.setattr(initialize._Draw, "_blank", counted)
    config = llama(num_hidden_layers=6)
    simulated_ranks(1, drawn, config, (1, 1, 1), "auto", 0)
    layer = sum(p.nbytes for p in on_meta(config).model.layers[0].parameters())
    everything = sum(p.nbytes for p in on_meta(config).parameters())
    assert layer <= max(peaks) <= 1.01 * layer < everything / 5


def _stepped(rank: int, config: Any, shape: Shape) -> dict[str, Tensor]:
    model = dtplan.parallelize(on_meta(config).double(), mesh_of(shape))
    dtplan.initialize(model)
    ids = ids_of(config)
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return wholes(model)


def test_a_model_that_was_initialised_trains_and_stays_equal() -> None:
    config = t0()
    (truth,) = simulated_ranks(1, _stepped, config, (1, 1, 1))
    for shape in ((1, 1, 2), (1, 2, 1)):
        for found in simulated_ranks(2, _stepped, config, shape):
            assert all(torch.allclose(found[name], truth[name], rtol=0, atol=1e-7) for name in truth)
