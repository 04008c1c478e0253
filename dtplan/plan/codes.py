"""Every diagnostic code, with what it means; a code once given is never given another meaning.

``python -m dtplan.plan.codes > docs/diagnostics.md`` renews the page that lists them.
"""

from __future__ import annotations

import sys

CODES: dict[str, str] = {
    "DTP101": "The plan cannot be read: no such file or built-in plan, a folder, or no permission.",
    "DTP102": "The file is not UTF-8 text.",
    "DTP103": "The file holds no plan.",
    "DTP104": "The file is not YAML.",
    "DTP105": "A key stands twice in one mapping.",
    "DTP106": "YAML anchors, aliases and tags are not part of the plan language.",
    "DTP107": "The file is too large or nested too deep to be a plan.",
    "DTP201": "A key that the plan language does not have.",
    "DTP202": "A value of the wrong kind.",
    "DTP203": "A required key is missing.",
    "DTP204": "The plan was written for another version of the language.",
    "DTP205": "A word that is not one of those allowed here.",
    "DTP206": "A path pattern that is not well formed.",
    "DTP207": "A layout that is not well formed.",
    "DTP301": "Two rules name the same module, parameter or buffer.",
    "DTP302": "A unit that the plan does not declare.",
    "DTP303": "`extends` names a plan that cannot be found, or leads back to itself.",
    "DTP304": "Fields of one rule contradict each other, or say nothing.",
    "DTP305": "A TransformerEngine layer names a module that no rule covers, or lacks a part.",
    "DTP306": "A tie names fewer than two parameters, or one that no rule covers.",
    "DTP307": "A rule is still `todo`.",
    "DTP308": "A unit that no rule uses.",
    "DTP401": "A rule that names nothing in the model.",
    "DTP402": "Two rules fall on the same module of the model.",
    "DTP403": "A module that owns parameters or buffers has no rule.",
    "DTP404": "A style does not apply to this class of module.",
    "DTP405": "The tensor parallel degree does not divide a unit.",
    "DTP406": "A unit's config field is missing or is not a positive number.",
    "DTP407": "The plan does not serve this architecture, or no plan does.",
    "DTP408": "A dim that the tensor does not have, or one that is not a whole number of units.",
    "DTP409": "Tied parameters have different placements.",
    "DTP410": "Nothing is sharded although the degree is larger than 1.",
    "DTP411": "Something the plan says cannot be applied yet. (Nothing at present.)",
    "DTP412": "An input, output or attribute that the module does not have.",
    "DTP413": "An FSDP unit that names nothing, or units of mixed dtype.",
    "DTP414": "A layout that no collective can reach from where the value is.",
    "DTP415": "A whole parameter among cut ones: the rule must say whether its gradient is a partial sum.",
    "DTP416": "Sequence parallelism is asked for, and the plan says that the model's residual stream cannot be cut.",
}

_AREAS = {
    "DTP1": "The file",
    "DTP2": "The words of the language",
    "DTP3": "The plan as a whole",
    "DTP4": "The plan and the model",
}
_INTRODUCTION = """\
# Diagnostics

<!-- Made by `python -m dtplan.plan.codes > docs/diagnostics.md`. -->

Every finding has a place (`file:line:column`, with the line and a caret), a code, what was given, what is
allowed, and after `=` what to do next:

```
plan.yaml:4:3: DTP302 `model.layers.*.mlp.up_proj` uses the unit `fnn`, which is not declared
    4 |   model.layers.*.mlp.up_proj: {style: colwise, unit: fnn}
      |   ^
      = did you mean 'ffn'?
```

A code keeps its meaning for good. `dtplan explain DTP205` prints it; `dtplan lint --format json` and
`--format github` print findings for programs. `dtplan lint` finds what begins with 1, 2 and 3, without a
model; what begins with 4 needs one, and comes from `dtplan show`, `dtplan.bind` and `dtplan.parallelize`.
"""


def markdown() -> str:
    """The page of all codes."""
    parts = [_INTRODUCTION]
    for prefix, title in _AREAS.items():
        rows = [f"| {code} | {meaning} |" for code, meaning in CODES.items() if code.startswith(prefix)]
        parts.append("\n".join([f"## {title}", "", "| code | meaning |", "| --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(markdown())
