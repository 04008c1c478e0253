"""The page as text: one HTML file that asks the network for nothing, and is not allowed to."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dtplan import __version__
from dtplan.report.page.view import View
from dtplan.report.page.words import chip, dims, few, percent
from dtplan.report.words import size


def render(view: View) -> str:
    """The HTML of ``view``. Names in a model or a plan are data: they are escaped wherever they stand."""
    style, script = _asset("style.css"), _asset("page.js")
    return (
        _environment()
        .get_template("page.html")
        .render(
            view=view,
            version=__version__,
            style=style,
            script=script,
            policy=_policy(style, script),
            bound_json=_inside_a_script(view.bound.json_text()),
        )
    )


def _policy(style: str, script: str) -> str:
    """Nothing from anywhere, and no code but ours."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return (resources.files("dtplan.report.page") / "templates" / name).read_text(encoding="utf-8")


def _inside_a_script(text: str) -> str:
    """JSON that cannot end the element that it stands in; it reads as the same data."""
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("dtplan.report.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(size=size, dims=dims, percent=percent, chip=chip, few=few, json=_json, tint=_tint)
    return made


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _tint(layout: str) -> str:
    """The class that gives a layout its colour: whole, term of a sum, or the dim that is cut."""
    if not layout.startswith("S"):
        return f"l{layout}"
    dim = layout[2:-1]
    return f"lS{dim}" if dim in ("0", "1") else "lS2"
