"""Hypothesis profiles for properties that run ranks; a user's own profile stays as it is until one is loaded."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

_EXAMPLES = {"default": 10, "ci": 25, "nightly": 500}
"""Examples of a property that needs no ranks or few; costly ones take a share of it."""


def _register() -> None:
    for name, examples in _EXAMPLES.items():
        settings.register_profile(
            f"dtplan-{name}",
            max_examples=examples,
            deadline=None,  # ranks start, kernels warm up
            derandomize=name == "ci",  # a red build is a change's doing
            print_blob=True,
            phases=[phase for phase in Phase if phase is not Phase.explain],  # it traces all of torch
            suppress_health_check=[HealthCheck.too_slow],
        )


_register()


def load_profile(name: str) -> None:
    """Make ``dtplan-default``, ``dtplan-ci`` or ``dtplan-nightly`` the profile of this run, by its last word.

    Raises:
        ValueError: there is no such profile.
    """
    if name not in _EXAMPLES:
        raise ValueError(f"dtplan has no Hypothesis profile {name!r}; profiles are {', '.join(_EXAMPLES)}")
    settings.load_profile(f"dtplan-{name}")


def share(part: float) -> int:
    """That part of the examples which the loaded profile gives, at least 2: for properties that are costly."""
    return max(2, round(settings().max_examples * part))
