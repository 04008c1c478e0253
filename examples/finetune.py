"""Fine-tune a Hugging Face causal language model with tensor parallelism and FSDP2: the workflow to copy.

    torchrun --nproc-per-node 8 examples/finetune.py --tp 4 --model llama --data corpus.jsonl --output tuned

Ranks that tensor parallelism leaves over are FSDP2's; `--shard` says how many of them share parameters, the
rest hold replicas. Every choice of degrees trains on the same batches and gives the same losses. On several
hosts, start torchrun on each with --nnodes and --rdzv-endpoint, and keep the folders where all can see them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from corpus import IGNORED, InputError, pack, read_documents, schedule
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import dtplan


def finetune(args: argparse.Namespace) -> None:
    """Train and save as ``args`` say; every rank calls it."""
    state = dtplan.init(tensor_parallel_degree=args.tp, hybrid_shard_degree=args.shard, random_seed=args.seed)
    config, tokenizer = read_model_folder(args.model)
    ids, labels = pack(read_documents(args.data), tokenizer, args.sequence_length)
    if int(ids.max()) >= config.vocab_size:
        raise InputError(f"{args.model}: token {ids.max()} does not fit a vocabulary of {config.vocab_size}")
    steps = schedule(len(ids), args.batch_size, args.epochs, args.seed)
    batches = list(itertools.islice(steps, args.max_steps))

    with torch.device("meta"):  # no rank ever holds the whole model
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    dtplan.transform(
        model,
        sequence_parallel=args.sequence_parallel,
        loss_parallel=args.loss_parallel,
        mixed_precision=None if args.precision == "fp32" else args.precision,
        activation_checkpointing=args.activation_checkpointing,
    )
    optimizer = make_optimizer(model, args)
    decay = LambdaLR(optimizer, lambda step: learning_rate(step, len(batches), args.warmup_steps))
    checkpoints = dtplan.TrainingCheckpoints(Path(f"{args.output}-checkpoints"), model, optimizer, decay)
    order = {"blocks": len(ids), "batch_size": args.batch_size, "seed": args.seed}  # what the order of data rests on
    done = resume(checkpoints, order) if args.resume else 0
    if not done:
        dtplan.load(model, args.model)
    model.train()

    log = Log(args.metrics or Path(f"{args.output}.jsonl"), state.rank, len(batches), done)
    with log.bar, checkpoints:
        for step, rows in enumerate(batches[done:], done + 1):
            start = time.perf_counter()
            micro_batches = own_part(ids, labels, rows, args.micro_batch_size, state)
            num_items = int((labels[rows, 1:] != IGNORED).sum())  # over all ranks and micro-batches
            loss = backward(model, micro_batches, num_items, state)
            norm = dtplan.clip_grad_norm_(model, args.clip).item()
            lr = float(decay.get_last_lr()[0])
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            seconds = time.perf_counter() - start
            speed = len(rows) * args.sequence_length / seconds
            log.step(step=step, loss=loss, grad_norm=norm, lr=lr, tokens_per_s=speed, seconds=seconds)
            if args.save_every and step % args.save_every == 0:
                checkpoints.save(step, extra=order, asynchronous=True)
    dtplan.save(model, args.output, dtype=getattr(torch, args.save_dtype), tokenizer=tokenizer)
    log.write(f"saved {args.output}")
    if args.check:
        check_reload(model, tokenizer, args, state, log)


def resume(checkpoints: dtplan.TrainingCheckpoints, order: dict[str, int]) -> int:
    """Go on from the latest checkpoint, if there is one, at whatever degrees it was saved; the steps done."""
    found = checkpoints.resume()
    if found is None:
        return 0
    if found.extra != order:
        raise InputError(f"{found.folder} was saved with {found.extra} and not with {order}: the data would differ")
    return found.step


def read_model_folder(folder: Path) -> tuple[Any, Any]:
    """The configuration and the tokenizer."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json; --model takes the folder of a Hugging Face model")
    try:
        return AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: {error}") from None


def own_part(
    ids: Tensor, labels: Tensor, rows: list[int], size: int, state: dtplan.State
) -> list[tuple[Tensor, Tensor]]:
    """This rank's micro-batches of ``rows``, as many as any rank's; blocks that do not count fill them up."""
    missing = -len(rows) % (state.dp_size * size)
    ids = torch.cat([ids[rows], ids[:1].expand(missing, -1)])
    labels = torch.cat([labels[rows], torch.full_like(labels[:1], IGNORED).expand(missing, -1)])
    parts = [x[state.dp_rank :: state.dp_size].to(state.mesh.device_type).split(size) for x in (ids, labels)]
    return list(zip(*parts, strict=True))


# --------------------------------------------------------------------------------------------------- training


def backward(
    model: nn.Module, micro_batches: Sequence[tuple[Tensor, Tensor]], num_items: int, state: dtplan.State
) -> float:
    """Accumulate gradients of the mean loss over the ``num_items`` labels of all ranks; return that loss."""
    total = torch.zeros((), device=state.mesh.device_type)
    for number, (ids, labels) in enumerate(micro_batches, 1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(micro_batches))  # reduce once a step
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=num_items, use_cache=False).loss
        (loss * state.dp_size).backward()  # FSDP2 will take the mean over data-parallel ranks
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / state.tp_size  # the ranks of one tp group hold the same loss


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW that decays matrices, and no norms and biases."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trainable if p.dim() > 1], "weight_decay": args.weight_decay}
    others = {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, others], lr=args.lr, betas=(0.9, 0.95))


def learning_rate(step: int, num_steps: int, warmup: int) -> float:
    """The factor at step 0, 1, ...: a line up over ``warmup`` steps, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


class Log:
    """What rank 0 tells: a line a step, the same as JSON in a file, and a progress bar on a terminal."""

    def __init__(self, file: Path, rank: int, num_steps: int, done: int = 0) -> None:
        self.file = file
        self.console = Console(highlight=False, soft_wrap=True, markup=False, quiet=rank != 0)
        self.bar = Progress(console=self.console, disable=rank != 0 or not self.console.is_terminal)
        self.task = self.bar.add_task("training", total=num_steps, completed=done)
        if rank == 0:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                lines = file.read_text().splitlines(keepends=True) if done and file.exists() else []
                file.write_text("".join(line for line in lines if json.loads(line).get("step", done + 1) <= done))
            except OSError as error:
                raise InputError(f"cannot write {file}: {error}") from None

    def step(self, **values: float) -> None:
        """Tell of one step of the optimizer."""
        self.bar.advance(self.task)
        self.write("  ".join(f"{name} {value:.6g}" for name, value in values.items()), values)

    def write(self, text: str, record: dict[str, Any] | None = None) -> None:
        """A line on the terminal; a line of JSON if there is a ``record``."""
        self.console.print(text)
        if record and not self.console.quiet:
            with self.file.open("a") as file:
                file.write(json.dumps(record) + "\n")


@torch.no_grad()
def check_reload(model: nn.Module, tokenizer: Any, args: argparse.Namespace, state: dtplan.State, log: Log) -> None:
    """Plain transformers must give the sharded model's logits; rank 0 needs room for the whole model."""
    prompt = tokenizer(args.check, return_tensors="pt").to(state.mesh.device_type)
    length = prompt.input_ids.shape[1]
    ids = nn.functional.pad(prompt.input_ids, (0, -length % state.tp_size))  # sequence_parallel cuts evenly
    sharded = model.eval()(input_ids=ids, use_cache=False).logits
    sharded = (sharded.full_tensor() if args.loss_parallel else sharded)[:, :length].float()
    if state.rank != 0:
        return
    dtype = torch.float32 if args.precision == "fp32" else torch.bfloat16
    plain = AutoModelForCausalLM.from_pretrained(args.output, dtype=dtype).to(state.mesh.device_type)
    logits = plain(**prompt).logits.float()
    error = ((sharded - logits).abs().max() / logits.abs().max()).item()
    text = tokenizer.decode(plain.generate(**prompt, max_new_tokens=16, do_sample=False)[0])
    record = {"check": args.check, "logits_error": error, "completion": text}
    log.write(f"reloaded: logits differ by {error:.1e} of the largest; {text!r}", record)
    if error > (1e-4 if (args.precision, args.save_dtype) == ("fp32", "float32") else 5e-2):
        sys.exit(f"finetune.py: {args.output} does not give the logits of the model that was saved")


# -------------------------------------------------------------------------------------------------- arguments


class Parser(argparse.ArgumentParser):
    """Raises what argparse has to say, so that not every rank prints it."""

    def error(self, message: str) -> NoReturn:
        """Replace print and exit."""
        raise InputError(f"{message} (--help lists the arguments)")


def at_least(least: float, kind: type = int) -> Callable[[str], float]:
    """The type of an argument that has a lower bound."""

    def number(text: str) -> float:
        if not (value := kind(text)) >= least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(description="Fine-tune a model that dtplan has a plan for.", formatter_class=formatter)
    add = parser.add_argument
    some, count = at_least(1), at_least(0)
    add("--model", type=Path, required=True, help="folder with config, tokenizer and safetensors")
    add("--data", type=Path, required=True, nargs="+", help="text files, or .jsonl files with a field `text`")
    add("--output", type=Path, required=True, help="folder to write the tuned model to")
    add("--metrics", type=Path, help="JSONL file with a record a step; OUTPUT.jsonl if not given")
    add("--tp", type=some, default=1, help="tensor_parallel_degree: ranks that share every layer")
    add("--shard", type=count, default=0, help="hybrid_shard_degree: ranks that share parameters; 0 is all")
    add("--sequence-parallel", action="store_true", help="cut what flows between layers along the sequence")
    add("--loss-parallel", action="store_true", help="keep the logits cut along the vocabulary")
    add("--activation-checkpointing", action="store_true", help="recompute each layer in backward")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="to compute in; parameters are float32")
    add("--save-dtype", choices=["float32", "bfloat16"], default="float32", help="of the saved weights")
    add("--sequence-length", type=at_least(2), default=1024, help="tokens a block")
    add("--batch-size", type=some, default=32, help="blocks a step, over all ranks")
    add("--micro-batch-size", type=some, default=1, help="blocks a forward of one rank; the rest accumulates")
    add("--epochs", type=some, default=1, help="passes over the data")
    add("--max-steps", type=some, help="end after so many steps")
    add("--lr", type=at_least(0, float), default=1e-5, help="highest learning rate")
    add("--warmup-steps", type=count, default=10, help="steps up to it, before it falls to a tenth")
    add("--weight-decay", type=at_least(0, float), default=0.1, help="of all but norms and biases")
    add("--clip", type=at_least(0, float), default=1.0, help="highest gradient norm")
    add("--seed", type=count, default=0, help="of the order of the data")
    add("--save-every", type=count, default=0, help="steps between training checkpoints; 0 is none")
    add("--resume", action="store_true", help="go on from the latest of OUTPUT-checkpoints, at any degrees")
    add("--check", metavar="PROMPT", help="reload with plain transformers, compare logits, complete PROMPT")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit code."""
    logging.disable_progress_bar()
    try:
        finetune(parse(arguments))
    except dtplan.DtplanError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"finetune.py: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # torchrun ends all ranks when the first has ended: let rank 0 speak before
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
