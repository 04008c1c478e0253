"""docs/cookbook.md: every command on it, run in order, prints what the page says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.pages import check, steps


def test_the_cookbook_s_commands_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    told = list(steps("cookbook.md", tmp_path))
    for command, output in told:
        check(command, output, tmp_path)
    assert len(told) == 16
