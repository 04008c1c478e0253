"""Words that several views share: sizes, and the spelling of many names as one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence


def size(number: int) -> str:
    """Bytes with a binary prefix."""
    value = float(number)
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {prefix}" if prefix == "B" else f"{value:.2f} {prefix}"
        value /= 1024
    return f"{value:.2f} TiB"


def braced(names: Sequence[str]) -> str:
    """Several names of siblings as the plan language has them: ``{q,k,v}_proj``."""
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*map(reversed, names), strict=False))
    _, low, rest = "".join(letters[0] for letters in alike)[::-1].partition("_")
    end = low + rest
    if any(name == end for name in names):
        end = ""
    return "{" + ",".join(name.removesuffix(end) for name in names) + "}" + end


def spelled(names: Sequence[str]) -> str:
    """Names that are all combinations of some segments as one, ``layers.{0..3,7}.mlp``; others one after another."""
    segments = [name.split(".") for name in names]
    if len({len(each) for each in segments}) == 1:
        words = [list(dict.fromkeys(each)) for each in zip(*segments, strict=True)]
        if math.prod(map(len, words)) == len(names) and list(map(list, itertools.product(*words))) == segments:
            return ".".join(each[0] if len(each) == 1 else "{" + ",".join(_ranges(each)) + "}" for each in words) or "."
    return ", ".join(name or "." for name in names)


def unspelled(text: str) -> list[str]:
    """The names that ``spelled`` took together."""
    return [name for part in text.split(", ") for name in _names("" if part == "." else part)]


def _names(text: str) -> Iterator[str]:
    pieces = re.split(r"\{(.*?)\}", text)  # literal, inside of braces, literal, ...
    options = [_words(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
    yield from map("".join, itertools.product(*options))


def _words(inside: str) -> Iterator[str]:
    """``0..3,7`` as ``0, 1, 2, 3, 7``."""
    for word in inside.split(","):
        first, dots, last = word.partition("..")
        yield from map(str, range(int(first), int(last) + 1)) if dots else [word]


def _ranges(words: Sequence[str]) -> list[str]:
    """``0, 1, 2, 3, 7`` as ``0..3, 7``; words that are no numbers as they are."""
    if not all(word.isdigit() and str(int(word)) == word for word in words):
        return list(words)
    runs: list[list[int]] = []
    for number in map(int, words):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
