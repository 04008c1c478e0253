"""examples/finetune.py on a tiny model: as torchrun starts it, and the same numbers however the work is divided."""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.models import build, llama

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))
corpus: Any = importlib.import_module("corpus")
finetune: Any = importlib.import_module("finetune")

WORDS = ["</s>", *(f"w{i}" for i in range(31))]
LENGTH, BATCH = 8, 4
BLOCKS = 7  # a whole batch and a part of one, and the last block is not full


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The folder of a tiny Llama with a tokenizer, and a text of 7 blocks but for three tokens."""
    folder = tmp_path_factory.mktemp("inputs")
    model: Any = build(llama(num_key_value_heads=2), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="</s>"))  # noqa: S106
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder / "model")  # noqa: S106
    draw = random.Random(0)  # noqa: S311
    documents = [" ".join(draw.choices(WORDS[1:], k=length)) for length in (20, 2, 28)]
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    (folder / "data.jsonl").write_text("".join(lines))
    return SimpleNamespace(model=folder / "model", data=folder / "data.jsonl", folder=folder)


def arguments(inputs: SimpleNamespace, output: Path, *options: str) -> list[str]:
    places = f"--model {inputs.model} --data {inputs.data} --output {output}"
    return f"{places} --sequence-length {LENGTH} --batch-size {BATCH} --warmup-steps 2".split() + list(options)


def called(rank: int, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Exit code and stderr of each command, in a rank of the pool."""
    results = []
    for command in commands:
        with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()):
            results.append((finetune.main(command), said.getvalue()))
    return results


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{output}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def train(pool, inputs, tmp_path_factory):
    """Losses and gradient norms of a run on so many ranks."""

    def run(ranks: int, *options: str) -> list[tuple[float, float]]:
        output = tmp_path_factory.mktemp("run") / "tuned"
        results = pool.run(called, [arguments(inputs, output, *options)], ranks=ranks)
        assert results == [[(0, "")]] * ranks
        return [(record["loss"], record["grad_norm"]) for record in records(output)]

    return run


@pytest.fixture(scope="module")
def alone(train):
    return train(1, "--epochs", "2", "--lr", "1e-3", "--micro-batch-size", "4")


# ---------------------------------------------------------------------------------------------- numbers

# float32 rounding; an error in the number of labels or ranks is larger by orders of magnitude.
CLOSE = 1e-5


@pytest.mark.parametrize(
    "ranks, options",
    [
        (1, "--micro-batch-size 1"),
        (2, "--tp 2 --micro-batch-size 4"),
        (2, "--tp 2 --micro-batch-size 1 --sequence-parallel --loss-parallel"),
        (2, "--micro-batch-size 2"),
        (2, "--shard 1 --micro-batch-size 1 --activation-checkpointing"),
        (4, "--tp 2 --micro-batch-size 1 --sequence-parallel"),
    ],
    ids=["accumulated", "tp", "sequence-and-loss-parallel", "shard", "replicas", "tp-and-shard"],
)
def test_every_division_of_the_work_gives_the_same_losses(train, alone, ranks, options):
    found = train(ranks, "--epochs", "2", "--lr", "1e-3", *options.split())
    assert len(found) == 4
    assert found == [pytest.approx(step, rel=CLOSE) for step in alone]


def test_a_run_goes_on_at_other_degrees(pool, inputs, alone, tmp_path):
    options = ["--epochs", "2", "--lr", "1e-3", "--micro-batch-size", "2"]
    first = arguments(inputs, tmp_path / "tuned", *options, "--save-every", "2")
    assert pool.run(called, [first], ranks=1) == [[(0, "")]]
    folder = tmp_path / "tuned-checkpoints"
    assert sorted(one.name for one in folder.iterdir()) == ["step-00000002", "step-00000004"]
    shutil.rmtree(folder / "step-00000004")  # as if the run had ended after step 3
    more = arguments(inputs, tmp_path / "tuned", *options, "--tp", "2", "--resume")
    other = [*more, "--tp", "1", "--seed", "1"]
    assert pool.run(called, [more], ranks=2) == [[(0, "")]] * 2
    found = records(tmp_path / "tuned")
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    assert [(record["loss"], record["grad_norm"]) for record in found] == [pytest.approx(s, rel=CLOSE) for s in alone]
    ((code, said),) = pool.run(called, [other], ranks=1)[0]
    assert (code, "the data would differ" in said) == (2, True)


def test_every_step_is_the_mean_over_its_labels(train, inputs):
    """At a learning rate of 0 plain transformers gives each loss and norm, the last and smaller step's too."""
    found = train(1, "--lr", "0", "--micro-batch-size", "1")
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    ids, labels = corpus.pack(corpus.read_documents([inputs.data]), tokenizer, LENGTH)
    assert (len(ids), int((labels == corpus.IGNORED).sum())) == (BLOCKS, 3)
    model: Any = AutoModelForCausalLM.from_pretrained(inputs.model)
    expected = []
    for rows in corpus.schedule(len(ids), BATCH, 1, 0):
        logits = model(ids[rows]).logits[:, :-1]
        model.zero_grad()
        loss = F.cross_entropy(logits.flatten(0, 1), labels[rows, 1:].flatten())
        loss.backward()
        expected.append((loss.item(), nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()))
    assert found == [pytest.approx(step, rel=CLOSE) for step in expected]


# ---------------------------------------------------------------------------------------------- torchrun


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    script = str(EXAMPLES / "finetune.py")
    return subprocess.run(
        [*launcher, script, *command], capture_output=True, text=True, check=False, env=environment, timeout=120
    )


def test_torchrun_trains_saves_and_reloads(inputs, tmp_path):
    output = tmp_path / "new" / "tuned"
    run = torchrun(*arguments(inputs, output, "--tp", "2", "--sequence-parallel", "--check", "w1 w2 w3"))
    assert run.returncode == 0, run.stderr
    *steps, check = records(output)
    assert [list(step) for step in steps] == [["step", "loss", "grad_norm", "lr", "tokens_per_s", "seconds"]] * 2
    assert [step["step"] for step in steps] == [1, 2]
    assert all(isinstance(value, float | int) for step in steps for value in step.values())
    assert check["logits_error"] < CLOSE
    assert check["completion"].startswith("w1 w2 w3")
    said = [line.split()[0] for line in run.stdout.splitlines() if line]
    assert said == ["step", "step", "saved", "reloaded:"]  # of one rank only
    tuned = AutoModelForCausalLM.from_pretrained(output).state_dict()
    before = AutoModelForCausalLM.from_pretrained(inputs.model).state_dict()
    assert tuned.keys() == before.keys()
    assert not any(torch.equal(tuned[name], before[name]) for name in before)
    assert AutoTokenizer.from_pretrained(output)("w1 w2 w3").input_ids == [2, 3, 4]


def test_torchrun_hears_of_an_error_once(inputs, tmp_path):
    run = torchrun(*arguments(inputs, tmp_path / "tuned", "--tp", "3"))
    assert run.returncode != 0
    assert run.stderr.count("finetune.py: tensor_parallel_degree=3 does not divide the 2 ranks") == 1
    assert "in finetune" not in run.stderr  # no traceback of the script
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_gives_other_logits_fails_the_check(inputs, tmp_path):
    """What ``--check`` must find, planted: the folder is not the model that was trained."""
    model: Any = AutoModelForCausalLM.from_pretrained(inputs.model)
    log = finetune.Log(tmp_path / "log.jsonl", 0, 1)
    state = SimpleNamespace(mesh=SimpleNamespace(device_type="cpu"), tp_size=1, rank=0)
    args = finetune.parse(arguments(inputs, inputs.model, "--check", "w1 w2"))
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    finetune.check_reload(model, tokenizer, args, state, log)
    with torch.no_grad():
        model.lm_head.weight[5] += 0.1
    with pytest.raises(SystemExit, match="does not give the logits of the model that was saved"):
        finetune.check_reload(model, tokenizer, args, state, log)


# ---------------------------------------------------------------------------------------------- bad input


def test_bad_input_is_one_clear_error(pool, inputs, tmp_path):
    files = {
        "words.jsonl": '{"text": "w1"}\n\nw2\n',
        "field.jsonl": '{"body": "w1"}\n',
        "number.jsonl": '{"text": 1}\n',
        "list.jsonl": "[1]\n",
        "empty.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "file").write_text("")
    cases = {
        "--tp 0": "argument --tp: 0 is below 1",
        "--batch-size x": "argument --batch-size: invalid number value: 'x'",
        "--lr -1": "argument --lr: -1 is below 0",
        "--lr nan": "argument --lr: nan is below 0",
        "--precision fp8": "argument --precision: invalid choice: 'fp8'",
        "--learning-rate 1": "unrecognized arguments: --learning-rate",
        f"--model {tmp_path}": f"{tmp_path} has no config.json; --model takes the folder of a Hugging Face model",
        f"--data {tmp_path}/none.txt": "No such file",
        f"--data {tmp_path}/words.jsonl": "words.jsonl:3: not JSON",
        f"--data {tmp_path}/field.jsonl": "field.jsonl:1: must be an object with a string in the field `text`",
        f"--data {tmp_path}/number.jsonl": "number.jsonl:1: must be an object",
        f"--data {tmp_path}/list.jsonl": "list.jsonl:1: must be an object",
        f"--data {tmp_path}/empty.txt": "the data holds no text",
        f"--data {tmp_path}/binary.txt": "binary.txt: 'utf-8' codec can't decode",
        f"--output {tmp_path}/file/tuned": "cannot write",
        "--tp 4": "tensor_parallel_degree=4 does not divide the 1 ranks",
    }
    commands = [arguments(inputs, tmp_path / "tuned", *options.split()) for options in cases]
    (results,) = pool.run(called, commands, ranks=1)
    for (options, expected), (code, said) in zip(cases.items(), results, strict=True):
        assert (code, said[:13], said.count("\n")) == (2, "finetune.py: ", 1), (options, said)
        assert expected in said, options


def test_a_token_outside_the_vocabulary_is_an_error(pool, inputs, tmp_path):
    small: Any = build(llama(vocab_size=20), dtype=torch.float32)
    small.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(inputs.model).save_pretrained(tmp_path / "model")
    command = arguments(inputs, tmp_path / "tuned", "--model", str(tmp_path / "model"))
    ((result,),) = pool.run(called, [command], ranks=1)
    assert result == (2, f"finetune.py: {tmp_path}/model: token 31 does not fit a vocabulary of 20\n")


# ---------------------------------------------------------------------------------------------- parts


def test_lines_of_json_end_at_newlines_only(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\u2028line"}\n{"text": "two"}', encoding="utf-8")
    (tmp_path / "b.txt").write_text("three")
    assert corpus.read_documents([tmp_path / "a.jsonl", tmp_path / "b.txt"]) == ["one\u2028line", "two", "three"]


def test_an_epoch_takes_every_block_once_in_an_order_of_its_own():
    steps = list(corpus.schedule(10, 4, 2, 7))
    first, second = ([row for step in epoch for row in step] for epoch in (steps[:3], steps[3:]))
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert list(corpus.schedule(10, 4, 2, 7)) == steps
    assert list(corpus.schedule(10, 4, 2, 8)) != steps


def test_ranks_share_a_step_without_gap_or_overlap():
    ids = torch.arange(5).unsqueeze(1).expand(-1, 3)
    states = [SimpleNamespace(dp_rank=rank, dp_size=2, mesh=SimpleNamespace(device_type="cpu")) for rank in (0, 1)]
    parts = [finetune.own_part(ids, ids, [4, 1, 3], 2, state) for state in states]
    assert [[len(micro_ids) for micro_ids, _ in part] for part in parts] == [[2], [2]]
    seen = [row for part in parts for _, labels in part for row in labels[:, 0].tolist()]
    assert sorted(seen) == [corpus.IGNORED, 1, 3, 4]


def test_the_learning_rate_rises_and_falls():
    factors = [finetune.learning_rate(step, 10, 4) for step in range(10)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert 0.1 < factors[-1] < 0.2
    assert finetune.learning_rate(10, 10, 4) == pytest.approx(0.1)


def test_norms_and_biases_have_no_weight_decay():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    model[0].weight.requires_grad_(False)
    optimizer = finetune.make_optimizer(model, SimpleNamespace(lr=1e-3, weight_decay=0.1))
    decayed, others = optimizer.param_groups
    assert (decayed["params"], decayed["weight_decay"]) == ([], 0.1)
    assert (len(others["params"]), others["weight_decay"]) == (3, 0.0)
