"""Cases under *Saving, resuming, changing the mesh*, as far as weights go: `dtplan.save`, and transformers after it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import dtplan
from dtplan import ApplyError, WeightsError
from dtplan.prove.oracle import whole
from dtplan.prove.pool import GlooPool
from dtplan.prove.simulated import simulated_ranks
from dtplan.weights.save import save_checkpoint
from tests.cases import ids_of, model_of, t0
from tests.models import llama


def sharded(model: Any, shard: int = 2, tp: int = 2, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (shard, tp), mesh_dim_names=("shard", "tp"))
    return dtplan.parallelize(model, mesh, **options)


def some_ranks_save(rank: int, folder: str) -> dict[tuple[int, ...], tuple[str, float]]:
    """What a save says to ranks 0, and 0 and 1, which call it alone; then all do."""
    defaults: Any = save_checkpoint.__kwdefaults__
    defaults["meet_seconds"] = 1.0  # half a minute for users
    model = sharded(model_of(t0()))
    said: dict[tuple[int, ...], tuple[str, float]] = {}
    for callers in ((0,), (0, 1)):
        dist.barrier()
        started = time.monotonic()
        if rank in callers:
            with pytest.raises(WeightsError) as caught:
                dtplan.save(model, folder)
            said[callers] = str(caught.value), time.monotonic() - started
    dist.barrier()
    dtplan.save(model, folder)
    return said


def test_b79_b88_a_save_on_some_ranks_says_so_and_the_job_goes_on(pool: GlooPool, tmp_path: Path) -> None:
    """B79: rank 0 alone; B88: the ranks of one data-parallel rank."""
    said = pool.run(some_ranks_save, str(tmp_path / "saved"))
    assert [len(one) for one in said] == [2, 1, 0, 0]
    for one in said:
        for callers, (text, took) in one.items():
            assert "all 4 ranks must call it" in text
            # A caller that has given up already is named as well.
            named = text.partition("and ranks ")[2].partition(" did not")[0].split(", ")
            assert {*map(str, range(4))} - {*map(str, callers)} <= {*named}
            assert took < 30
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_b80_save_pretrained_names_the_right_call_and_that_call_works(tmp_path: Path) -> None:
    reference = model_of(t0())

    def on_rank(rank: int) -> str:
        model = sharded(model_of(t0()), 1, 2)
        with pytest.raises(ApplyError) as caught:
            model.save_pretrained(tmp_path / "refused")
        dtplan.save(model, tmp_path / "saved")
        return str(caught.value)

    (text,) = set(simulated_ranks(2, on_rank))
    assert "dtplan.save(model, folder)" in text
    assert not (tmp_path / "refused").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert torch.equal(again(ids_of(t0())).logits, reference(ids_of(t0())).logits)


def test_b81_all_of_the_weights_are_saved(tmp_path: Path) -> None:
    model_of(t0()).save_pretrained(tmp_path / "source")

    def on_rank(rank: int) -> None:
        model = sharded(model_of(t0(), meta=True), 1, 2)
        dtplan.load(model, tmp_path / "source")
        dtplan.save(model, tmp_path / "saved")

    simulated_ranks(2, on_rank)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("source", "saved")]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("vocab", [5, 33])
def test_b83_full_tensors_are_those_of_the_source(tmp_path: Path, vocab: int) -> None:
    """A guard for each torch version: the order of two cuts of one dim."""
    config = t0(vocab_size=vocab)
    reference = model_of(config)
    reference.save_pretrained(tmp_path)

    def on_rank(rank: int) -> None:
        model = sharded(model_of(config, meta=True))
        dtplan.load(model, tmp_path)
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter.detach()), reference.get_parameter(name)), name

    simulated_ranks(4, on_rank)


def mixed(meta: bool = False) -> Any:
    """T0 in bfloat16 with one norm in float32."""
    model = model_of(t0(), meta=meta).bfloat16()
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    return model


def test_b92_a_float32_norm_among_bfloat16_weights_stays_so_in_the_files(tmp_path: Path) -> None:
    reference = mixed()
    (tmp_path / "source").mkdir()
    save_file(dict(reference.state_dict()), tmp_path / "source" / "model.safetensors", {"format": "pt"})

    def on_rank(rank: int) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(mixed(meta=True), 2, 1, mixed_precision=policy)
        dtplan.load(model, tmp_path / "source")
        dtplan.save(model, tmp_path / "saved")
        dtplan.save(model, tmp_path / "narrow", dtype=torch.bfloat16)

    simulated_ranks(2, on_rank)
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in after.items()} == {
        name: tensor.dtype for name, tensor in reference.state_dict().items()
    }
    assert after["model.norm.weight"].dtype == torch.float32
    assert all(torch.equal(after[name], value) for name, value in reference.state_dict().items())
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {tensor.dtype for tensor in narrow.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"


# ------------------------------------------------------------------------------ embeddings resized; what is beside


def test_resized_embeddings_are_saved_and_loaded_with_their_new_size(tmp_path: Path) -> None:
    config = t0(tie_word_embeddings=True)
    reference = model_of(config)
    reference.resize_token_embeddings(41, mean_resizing=False)
    values = {name: value.clone() for name, value in reference.state_dict().items()}

    def on_rank(rank: int) -> None:
        model = model_of(config)
        model.resize_token_embeddings(41, mean_resizing=False)
        model.load_state_dict(values)
        dtplan.save(sharded(model), tmp_path / "saved")
        again = sharded(model_of(type(config).from_pretrained(tmp_path / "saved"), meta=True))
        assert again.lm_head.out_features == 41
        dtplan.load(again, tmp_path / "saved")
        assert all(torch.equal(whole(p.detach()), values[name]) for name, p in again.named_parameters())

    simulated_ranks(4, on_rank)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert plain.config.vocab_size == 41
    assert torch.equal(plain.lm_head.weight, values["lm_head.weight"])


def test_what_transformers_needs_beside_the_weights_is_saved(tmp_path: Path) -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=_words(), eos_token="</s>")  # noqa: S106 - a token, no password

    def on_rank(rank: int) -> tuple[str, ...]:
        model = sharded(model_of(llama()), 1, 2)
        model.generation_config = GenerationConfig(max_new_tokens=7, do_sample=False)
        return dtplan.save(model, tmp_path / "saved", max_shard_bytes=30_000, tokenizer=words).files

    files = simulated_ranks(2, on_rank)[0]
    assert len(files) > 1
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [*files]
    for name in files:
        with safe_open(tmp_path / "saved" / name, "pt") as file:
            held = {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118 - it is no dict
        assert sum(held.values()) <= 30_000 or len(held) == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token == "</s>"  # noqa: S105
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.generation_config.max_new_tokens == 7
    assert again.config.architectures == ["LlamaForCausalLM"]


def _words() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"))  # noqa: S106 - a token, no password
