"""The pytest plugin: a pool of gloo ranks as a fixture, and Hypothesis profiles by option.

It is imported in every pytest run on a machine that has dtplan, so it imports nothing of dtplan, torch or Hypothesis
until a test or an option asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dtplan.prove.pool import GlooPool, Kept

_PROFILES = ("default", "ci", "nightly")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--dtplan-profile``, ``DTPLAN_PROFILE``, and the ini value ``dtplan_gloo_ranks``."""
    group = parser.getgroup("dtplan")
    group.addoption(
        "--dtplan-profile",
        choices=_PROFILES,
        default=None,
        help="Hypothesis profile of dtplan to load (default: the environment's DTPLAN_PROFILE, or none).",
    )
    parser.addini("dtplan_gloo_ranks", "The most gloo ranks that a test may ask of the fixture gloo_pool.", default="4")


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile that was asked for, and none if none was."""
    name = config.getoption("--dtplan-profile") or os.environ.get("DTPLAN_PROFILE")
    if not name:
        return
    if name not in _PROFILES:
        raise pytest.UsageError(f"DTPLAN_PROFILE={name}: profiles are {', '.join(_PROFILES)}")
    from dtplan.testing.profiles import load_profile

    load_profile(name)


@pytest.fixture(scope="session")
def gloo_pool(pytestconfig: pytest.Config) -> Iterator[GlooPool]:
    """Processes that talk over gloo: ``gloo_pool.run(fn, *args, ranks=2)`` calls ``fn(rank, *args)`` on each."""
    from dtplan.prove.pool import GlooPool

    with GlooPool(int(pytestconfig.getini("dtplan_gloo_ranks"))) as pool:
        yield pool


@pytest.fixture(scope="session")
def gloo_pair(gloo_pool: GlooPool) -> Iterator[Kept]:
    """Two gloo ranks that are kept warm from call to call, for properties: ``gloo_pair.run(fn, *args)``."""
    with gloo_pool.kept(ranks=2) as pair:
        yield pair
