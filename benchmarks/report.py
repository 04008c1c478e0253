"""Whether a browser opens `dtplan report` as promised: Llama 2 70B at tp 8 x shard 8, in headless Chromium.

    python benchmarks/report.py [--rounds 5] [--proof proof.json] [--shots FOLDER]

The file is made by the command line, from a config alone. Promises, each checked, exit code 1 when one is not kept: it
weighs under 500 kB; a window of 1280 px has painted it within a second of the request, the median of the rounds; the
console says nothing; nothing is requested, and code in the page that tries is refused by the page's policy; at 400 px
nothing sticks out; the tree, the search and the theme follow the keyboard; the JSON inside is the bound plan's. With
--shots, screenshots in light and dark. Needs Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from browser import Page, page

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
DEGREES = ["--tp", "8", "--shard", "8"]
FOCUS = "document.activeElement.querySelector?.('.path')?.textContent"
SHOWN = "document.querySelectorAll('.tree .row:not(.head):not([hidden])').length"


def make(folder: Path, proof: str | None) -> tuple[Path, dict[str, Any]]:
    """The report, and the bound plan as `dtplan show` tells it."""
    (folder / "llama-2-70b").mkdir()
    (folder / "llama-2-70b" / "config.json").write_text(json.dumps(LLAMA_70B), encoding="utf-8")
    model, out = ["--model", str(folder / "llama-2-70b")], folder / "report.html"
    dtplan = [sys.executable, "-m", "dtplan.cli"]
    extra = [] if proof is None else ["--proof", proof]
    subprocess.run([*dtplan, "report", *model, *DEGREES, "--te", *extra, "-o", str(out)], check=True)
    shown = subprocess.run([*dtplan, "show", *model, *DEGREES, "--json"], check=True, capture_output=True, text=True)
    return out, json.loads(shown.stdout)


def keys(tab: Page) -> dict[str, bool]:
    """What the keyboard does."""
    found = {}
    rows = tab.run(SHOWN)
    tab.press("/", *"q_proj")
    found["/ and words search"] = 0 < tab.run(SHOWN) < rows + 5 and tab.run("found.textContent").startswith("1 of")
    tab.press("Escape")
    found["Escape shows all again"] = tab.run(SHOWN) == rows
    tab.run("document.querySelector('.tree .row[tabindex=\"0\"]').focus()")
    tab.press("Home", "ArrowDown", "ArrowDown", "ArrowDown")
    found["arrows move"] = tab.run(FOCUS) == "layers.*"
    tab.press("ArrowRight")
    found["right opens a layer"] = tab.run(SHOWN) > rows
    tab.press("ArrowRight", "ArrowRight", "ArrowDown")
    found["right goes in"] = tab.run(FOCUS) == "q_proj"
    tab.press("Enter")
    found["Enter tells more"] = tab.run("document.activeElement.querySelector('.detail').hidden") is False
    tab.press("ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowLeft")
    found["left goes out and closes"] = tab.run(FOCUS) == "layers.*" and tab.run(SHOWN) == rows
    tab.run("document.getElementById('theme').focus()")
    tab.press("Enter", "Enter")
    found["the theme turns dark"] = tab.run("getComputedStyle(document.documentElement).colorScheme") == "dark"
    tab.press("Enter")
    found["and follows the system again"] = tab.run("document.documentElement.style.colorScheme") == ""
    return found


def mouse(tab: Page, folder: Path, bound: dict[str, Any]) -> dict[str, bool]:
    """What clicks do."""
    found = {}
    tab.run("document.querySelector('.cell[data-rank=\"19\"]').dispatchEvent(new MouseEvent('click'))")
    found["a rank shows its part"] = tab.run("document.querySelector('.slice.held').dataset.tp") == "3"
    found["and its group"] = tab.run("document.querySelectorAll('.cell.m-tp').length") == 7
    tab.run("document.querySelector('.legend [data-layout=s1]').click()")
    found["a letter filters"] = tab.run("found.textContent").startswith("2 of")
    tab.run("document.querySelector('.lane .matrix').click()")
    tab.run("new Promise(done => setTimeout(done, 50))")
    found["a matrix leads to its row"] = tab.run(FOCUS) == "q_proj"
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    tab.run("document.getElementById('download').click()")
    tab.run("new Promise(done => setTimeout(done, 1000))")
    (written,) = folder.glob("*.json")
    found["the button writes the bound plan"] = json.loads(written.read_text(encoding="utf-8")).items() <= bound.items()
    return found


def check(file: Path, bound: dict[str, Any], rounds: int, shots: Path | None) -> dict[str, bool]:
    """Every promise and whether it is kept."""
    with page() as tab:
        tab.size(1280, 800)
        times = [tab.open(file) for _ in range(rounds)]
        weight = file.stat().st_size
        print(f"{weight / 1000:.0f} kB; painted in {statistics.median(times):.0f} ms, the slowest of {rounds} rounds "
              f"{max(times):.0f} ms")  # fmt: skip
        kept = {"under 500 kB": weight < 500_000, "painted within a second": statistics.median(times) < 1000}
        inside = tab.run("document.getElementById('bound-plan').textContent")
        kept["the JSON inside is the bound plan's"] = json.loads(inside).items() <= bound.items()
        kept |= keys(tab) | mouse(tab, file.parent, bound)
        for width, dark in ((1280, False), (1280, True), (400, False), (400, True)):
            tab.size(width, 800, dark=dark)
            tab.open(file)
            name = f"{width}-{'dark' if dark else 'light'}"
            kept[f"{name}: nothing in the console"] = not tab.errors()
            kept[f"{name}: no request"] = not tab.requests()
            kept[f"{name}: nothing sticks out"] = tab.run("document.documentElement.scrollWidth") == width
            if shots is not None:
                tab.shot(shots / f"{name}.png")
                tab.shot(shots / f"{name}-whole.png", whole=True)
        tab.run("fetch('http://127.0.0.1:9/').catch(() => 0)")
        kept["the policy refuses a request"] = any("Content Security Policy" in said for said in tab.errors())
        return kept


def main() -> int:
    """Print every promise; 1 if one is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--proof", help="the JSON of a proof, shown in the report")
    parser.add_argument("--shots", type=Path, help="a folder for screenshots")
    options = parser.parse_args()
    if options.shots is not None:
        options.shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = check(*make(Path(folder), options.proof), options.rounds, options.shots)
    for promise, holds in kept.items():
        print(f"{'ok ' if holds else 'NOT'} {promise}")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
