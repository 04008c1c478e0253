"""Golden texts: what users are told, compared to the letter. ``DTPLAN_RENEW=1 pytest`` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def assert_golden(file: str, texts: dict[str, str]) -> None:
    """Compare texts by their names with those in a file of ``tests/golden``; all of them, and no other."""
    path = FOLDER / file
    if os.environ.get("DTPLAN_RENEW"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(f"### {name}\n{text}\n" for name, text in texts.items()), encoding="utf-8")
    assert texts == _read(path), f"renew tests/golden/{file} with DTPLAN_RENEW=1, and read the difference"


def _read(path: Path) -> dict[str, str]:
    sections = path.read_text(encoding="utf-8").split("### ")[1:]
    named = (section.partition("\n") for section in sections)
    return {name: text.rstrip("\n") for name, _, text in named}
