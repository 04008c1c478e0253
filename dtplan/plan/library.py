"""Where plans are: those shipped with the package, and files."""

from __future__ import annotations

import os
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from dtplan._errors import Diagnostic, PlanError, did_you_mean


def builtin_plans() -> dict[str, Path]:
    """Name -> file of every plan that is shipped, by name."""
    return {item.name.removesuffix(".yaml"): Path(str(item)) for item in _files()}


def _files() -> list[Traversable]:
    package = resources.files("dtplan")
    shipped = package / "plans"
    # In a source tree the plans lie beside the package; the wheel has them inside (pyproject.toml).
    folder = shipped if shipped.is_dir() else Path(str(package)).parent / "plans"
    return sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)


def locate(plan: str | Path, beside: Path | None = None) -> tuple[Path, str]:
    """The file of a plan and how to show it: a path (relative to ``beside``'s folder), or a built-in's name.

    Raises:
        PlanError: DTP101, neither a file nor a built-in plan; the text lists the built-in ones.
    """
    builtin = builtin_plans()
    text = str(plan)
    if isinstance(plan, str) and text in builtin:
        return builtin[text], f"{text}.yaml"
    path = (beside.parent if beside else Path()) / text
    if os.path.exists(path):  # noqa: PTH110 - Path.exists raises for names that are too long
        return path, str(path)
    what = "file" if text.endswith((".yaml", ".yml")) or "/" in text else "built-in plan"
    message = f"there is no {what} `{text[:100]}`"
    others = f"built-in plans: {', '.join(builtin)}; or give the path of a plan file"
    hint = did_you_mean(text.removesuffix(".yaml"), builtin) or others
    raise PlanError([Diagnostic(code="DTP101", file=text, message=message, hint=hint)])
