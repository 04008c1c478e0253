"""What a user installs: the wheel, its dependencies, light imports, modules of a readable size."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PLANS = sorted((ROOT / "plans").glob("*.yaml"))
MODULES = sorted((ROOT / "dtplan").rglob("*.py"))
INSTALLED = packages_distributions()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command; a non-zero exit fails the test with everything that the command printed."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel as released: built from the source distribution, so that both must be complete."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_every_file_of_the_package_and_every_plan(wheel):
    assert PLANS
    sources = {p for p in (ROOT / "dtplan").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    expected = {p.relative_to(ROOT).as_posix() for p in sources} | {f"dtplan/plans/{p.name}" for p in PLANS}
    with ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("dtplan/")} == expected
        for plan in PLANS:
            assert archive.read(f"dtplan/plans/{plan.name}") == plan.read_bytes()


def test_an_installed_wheel_finds_its_plans_without_the_repository(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    code = (
        "import json, dtplan; from dtplan.plan.library import builtin_plans; "
        "plans = {name: [str(p), p.read_text(encoding='utf-8')] for name, p in builtin_plans().items()}; "
        "print(json.dumps([dtplan.__file__, plans]))"
    )
    package, plans = json.loads(run(sys.executable, "-c", code, cwd=elsewhere, PYTHONPATH=str(site)).stdout)
    assert Path(package).is_relative_to(site), "the test imported the repository and not the wheel"
    assert {name: text for name, (_, text) in plans.items()} == {p.stem: p.read_text("utf-8") for p in PLANS}
    assert all(Path(path).is_relative_to(site) for path, _ in plans.values())


def third_party(source: str) -> set[str]:
    """The distributions that a module imports, at any depth, under their normalised names."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    tops = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"dtplan"}
    return {canonicalize_name(dist) for top in tops for dist in INSTALLED.get(top, [top])}


def declared(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def test_what_the_package_imports_is_what_it_declares():
    imported = set().union(*(third_party(path.read_text(encoding="utf-8")) for path in MODULES))
    needed = declared(PROJECT["dependencies"])
    for_users = set(PROJECT["optional-dependencies"]) - {"test", "docs"}
    optional = declared(line for extra in for_users for line in PROJECT["optional-dependencies"][extra])
    assert imported - needed - optional == set(), "imported and not declared"
    assert needed - imported == set(), "declared and not imported"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os, dtplan.plan, yaml", {"pyyaml"}),
        ("def later():\n    from torch.nn import Module", {"torch"}),
        ("import transformer_engine.pytorch as te", {"transformer-engine"}),
        ("from . import sibling", set()),
    ],
)
def test_the_import_check_sees(source, found):
    assert third_party(source) == found


HEAVY = {"hypothesis", "numpy", "torch", "transformer_engine", "transformers"}
REPORT = f"""
import atexit, sys
atexit.register(lambda: print("heavy:", *sorted({HEAVY} & set(sys.modules)), file=sys.stderr))
"""


def heavy_modules(code: str) -> set[str]:
    """The slow packages that a fresh interpreter has loaded by the time the code has run and exited."""
    label, *names = run(sys.executable, "-c", REPORT + code).stderr.splitlines()[-1].split()
    assert label == "heavy:"
    return set(names)


def dtplan(*arguments: str) -> str:
    """The console script's own lines, as code."""
    return f"sys.argv[1:] = {list(arguments)}\nfrom dtplan.cli import main\nsys.exit(main())"


LIGHT = {
    "import": "import dtplan",
    "help": dtplan("--help"),
    "lint": dtplan("lint", "plans/llama.yaml"),
    "list": dtplan("list"),
}


@pytest.mark.parametrize("code", LIGHT.values(), ids=LIGHT)
def test_light_commands_load_no_torch(code):
    assert heavy_modules(code) == set()


@pytest.mark.parametrize("code", ["import torch", "__import__('torch')\nsys.exit(0)"])
def test_the_light_check_sees_torch(code):
    assert "torch" in heavy_modules(code)


def test_the_light_check_sees_a_failing_command():
    with pytest.raises(AssertionError, match="exited 3"):
        heavy_modules("sys.exit(3)")


def test_console_script_is_installed():
    script = Path(sys.executable).parent / "dtplan"
    assert run(script, "--help").stdout.startswith("Usage: dtplan ")


def test_modules_fit_a_reader():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES}
    assert {path: length for path, length in lengths.items() if length > 400} == {}
