"""Text and JSONL files as blocks of tokens, in an order that depends on a seed and on nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dtplan

IGNORED = -100  # the label of a token that does not count, for torch and transformers alike


class InputError(dtplan.DtplanError):
    """An argument or a data file cannot be used."""


def read_documents(files: Sequence[Path]) -> list[str]:
    """Every text file, and the field `text` of every line of a .jsonl file."""
    documents = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {file}: {error}") from None
        if file.suffix != ".jsonl":
            documents.append(text)
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                documents.append(read_line(line, f"{file}:{number}"))
    return documents


def read_line(line: str, where: str) -> str:
    """The text in one line of JSON."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{where}: must be an object with a string in the field `text`: {{"text": "..."}}')
    return text


def pack(documents: Sequence[str], tokenizer: Any, length: int) -> tuple[Tensor, Tensor]:
    """Documents one after the other, cut into blocks: token ids and labels, [blocks, length] each.

    The last block is filled up with tokens that do not count; they come last, so no other attends to them.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for document in documents:
        stream += tokenizer(document, add_special_tokens=False, verbose=False).input_ids + end
    if len(stream) < 2:
        raise InputError("the data holds no text")
    missing = -len(stream) % length
    ids = torch.tensor(stream + missing * [0]).view(-1, length)
    labels = torch.tensor(stream + missing * [IGNORED]).view(-1, length)
    return ids, labels


def schedule(num_blocks: int, batch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """The blocks of each step, over all ranks: a new order every epoch, from the seed alone."""
    for epoch in range(epochs):
        order = list(range(num_blocks))
        random.Random(f"{seed} {epoch}").shuffle(order)  # noqa: S311 - no cryptography
        yield from (order[i : i + batch_size] for i in range(0, num_blocks, batch_size))
