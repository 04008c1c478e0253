"""The error tree and the diagnostics that carry positions.

One root, one subclass per cause; each is also the built-in that a caller would expect to catch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One finding about a plan file: a stable code, a place, what is wrong, and what to do next.

    ``line`` and ``column`` count from 1; 0 means that the finding concerns the file as a whole.
    """

    code: str
    message: str
    hint: str = ""
    file: str = "<plan>"
    line: int = 0
    column: int = 0
    source: str = ""
    """The text of the line, for the caret; empty when the file could not be decoded."""

    @property
    def where(self) -> str:
        """``file:line:column``, or the file alone."""
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def render(self) -> str:
        """The finding as text: the place, the message, the line with a caret, the next step."""
        lines = [f"{self.where}: {self.code} {self.message}"]
        if self.source.strip() and self.line:
            gutter = f"{self.line:>5} | "
            first = max(0, self.column - 120)  # of a long line, the part around the column
            text = self.source.rstrip().replace("\t", " ")[first : first + 160]
            lines += [gutter + text, " " * (len(gutter) - 2) + "| " + " " * (self.column - 1 - first) + "^"]
        if self.hint:
            lines.append(f"      = {self.hint}")
        return "\n".join(lines)


class DtplanError(Exception):
    """Root of every error that dtplan raises on purpose; ``exit_code`` is what the CLI returns for it."""

    exit_code = 2


class FindingsError(DtplanError, ValueError):
    """An error that carries ``diagnostics``: every finding of one run, each with its place."""

    exit_code = 1

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(d.render() for d in self.diagnostics))

    def __reduce__(self) -> tuple[type[FindingsError], tuple[tuple[Diagnostic, ...]]]:
        # Worker processes send errors home by pickle, which would call __init__ with the text.
        return type(self), (self.diagnostics,)


class PlanError(FindingsError):
    """A plan file is wrong."""


class BindError(FindingsError):
    """A plan does not fit a model or the degrees."""


class DegreesError(DtplanError, ValueError):
    """Degrees, world size and mesh do not fit together."""


class ApplyError(DtplanError, RuntimeError):
    """A bound plan cannot be applied to this live model, or is used in a way that it does not allow."""


class WeightsError(DtplanError, ValueError):
    """A checkpoint is missing, broken, or does not fit the model."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the closest allowed spelling, or an empty string."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""
