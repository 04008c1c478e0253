"""The parts of a dim that is cut: their sizes, and how many ranks keep each, from a plan and the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtplan.plan.read import config_field
from dtplan.plan.spec import Section
from dtplan.planner.bound import BoundUnit
from dtplan.planner.units import copies_of


class SectionsError(ValueError):
    """The sections do not make up the dim; ``hint`` is what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def section_sizes(
    size: int, sections: tuple[Section, ...], units: Mapping[str, BoundUnit], config: Any
) -> tuple[int, ...]:
    """Rows of each section of a dim of ``size`` rows, in order; empty where a unit has no count (reported elsewhere).

    Sections without a ``width`` have units of one width, the one that fills the dim.

    Raises:
        SectionsError: they do not make up the dim.
    """
    if any(section.unit is not None and section.unit not in units for section in sections):
        return ()
    counts = [section.count or units[section.unit or ""].count for section in sections]
    widths = [_width(section, config) for section in sections]
    named = sum(count * width for count, width in zip(counts, widths, strict=True) if width is not None)
    shared = sum(count for count, width in zip(counts, widths, strict=True) if width is None)
    rest = size - named
    if (rest % shared or rest <= 0) if shared else rest:
        parts = " + ".join(_spell(s, c, w) for s, c, w in zip(sections, counts, widths, strict=True))
        raise SectionsError(
            f"is not made of {parts} units{' of one width' if shared else ''}",
            "name a section for each part of the dim, in order",
        )
    return tuple(c * (rest // shared if w is None else w) for c, w in zip(counts, widths, strict=True))


def section_copies(sections: tuple[Section, ...], units: Mapping[str, BoundUnit], tp: int) -> tuple[int, ...]:
    """How many neighbouring ranks keep each section; () where each is cut over all of them.

    Raises:
        SectionsError: ``tp`` does not divide one that is cut.
    """
    copies = tuple(tp if section.whole else copies_of(units[section.unit or ""], tp) for section in sections)
    for section, number in zip(sections, copies, strict=True):
        if number == 0:
            raise SectionsError(
                f"has a section of {units[section.unit or ''].count} units, which degree {tp} does not divide",
                "choose another degree, or keep the module whole with `replicate`",
            )
    return copies if any(number > 1 for number in copies) else ()


def _width(section: Section, config: Any) -> int | None:
    if section.width is None:
        return None
    value = config_field(config, section.width)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SectionsError(
            f"has a section whose width is `{section.width}`, and the config has {value!r} there",
            "name the config field that holds the features of one unit",
        )
    return value


def _spell(section: Section, count: int, width: int | None) -> str:
    return f"{section.unit or 'whole'} {count}" + (f" x {width}" if width else "")
