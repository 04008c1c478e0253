"""All mutants of the plans of which CI judges a part: `PYTHONPATH=. python tests/mutants.py [NAME]...` scores them."""

from __future__ import annotations

import sys

from tests.test_prove_mutants import EQUIVALENT, SAMPLED, of_family


def main(names: list[str]) -> None:
    """A row of the table in docs/prove.md for each, and under it what was proved, with the reason."""
    for name in names or SAMPLED:
        plan, config = SAMPLED[name]
        ends: dict[str, list[str]] = {}
        for label, verdict in of_family(plan, config()):
            ends.setdefault(verdict, []).append(label)
        refused, refuted, proved = (len(ends.get(end, ())) for end in ("refused", "refuted", "proved"))
        found = refused + refuted
        explained = EQUIVALENT.get(name, {})
        left = [f"    {label}: {explained.get(label, 'NOT FOUND')}" for label in ends.get("proved", ())]
        left += [f"    {label}: NOT RUN" for label in ends.get("not run", ())]
        unexplained = sum(label not in explained for label in ends.get("proved", ()))
        row = f"| `{name}` | {found + unexplained} | {found} | {refused} | {refuted} | {proved} |"
        print("\n".join([row, *left]), flush=True)  # noqa: T201 - a script


if __name__ == "__main__":
    main(sys.argv[1:])
