"""`dtplan report`: one HTML file, well-formed, without any request, that says what the bound plan does.

What only a browser can show (painting, console, keyboard) is in `benchmarks/report.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from torch import nn

from dtplan.cli import cli
from dtplan.plan.read import load_plan, parse_plan
from dtplan.plan.spec import R, S
from dtplan.planner.bind import bind
from dtplan.planner.bound import BoundPlan, BoundTensor
from dtplan.planner.ledger import ledger
from dtplan.report.diff import diff
from dtplan.report.page import page
from dtplan.report.page.facts import facts
from dtplan.report.page.glyph import glyph
from dtplan.report.page.mesh import mesh
from dtplan.report.page.proofs import ProofError, proof_view
from dtplan.report.page.source import files
from dtplan.report.page.tree import ranges, tree
from dtplan.report.page.view import view
from dtplan.report.page.words import few, percent
from tests import families
from tests.test_cli import LLAMA_70B

VOID = {"meta", "link", "input", "br", "img"}
ROLES = {"treegrid", "row", "gridcell", "columnheader", "img", "search", "group"}
UNWANTED = {"img", "iframe", "object", "embed", "form", "audio", "video", "base", "source"}


class Parsed(HTMLParser):
    """Tags with their attributes in order, the text of each element kind, and what is not well-formed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.faults: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        self.faults += [f"<{tag}> has {name} twice" for name in set(names) if names.count(name) > 1]
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing, near line {self.getpos()[0]}")

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    def all(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.tags if attribute in attributes]

    def rows(self) -> list[dict[str, str]]:
        return [attributes for _, attributes in self.tags if attributes.get("role") == "row" and "id" in attributes]


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def bound_llama(layers: int = 80, **settings: Any) -> BoundPlan:
    config = transformers.LlamaConfig(**{**LLAMA_70B, "num_hidden_layers": layers})
    with torch.device("meta"):
        return bind(transformers.LlamaForCausalLM(config), "llama", **settings)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    return str(file)


@pytest.fixture(scope="module")
def big() -> BoundPlan:
    return bound_llama(tp=8, shard=8)


@pytest.fixture(scope="module")
def report(config: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("report") / "report.html"
    done = run("report", "--model", config, "--tp", "8", "--shard", "8", "--te", "-o", str(out))
    assert done.exit_code == 0, done.output
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed(report: str) -> Parsed:
    return Parsed(report)


# --- the file


def test_it_is_well_formed_and_weighs_less_than_500_kb(report, parsed):
    assert parsed.faults == []
    assert len(report.encode()) < 500_000


def test_the_parser_sees_what_is_wrong():
    assert Parsed("<p><b>x</p></b>").faults
    assert Parsed("<p>").faults
    assert Parsed('<p id="a" id="b"></p>').faults
    assert Parsed('<p id="a">x<br></p>').faults == []


def test_nothing_in_it_asks_for_anything(report, parsed):
    links = parsed.all("href") + parsed.all("src") + parsed.all("xlink:href") + parsed.all("action")
    assert [link for link in links if not link.startswith("#") and link != "data:,"] == []
    assert {tag for tag, _ in parsed.tags} & UNWANTED == set()
    style, script = parsed.texts["style"][0], parsed.texts["script"][-1]
    assert not any(word in style for word in ("url(", "@import", "//"))
    assert not any(word in script for word in ("http", "fetch", "XMLHttpRequest", "import(", "innerHTML", "eval"))


def test_the_policy_allows_its_own_code_and_nothing_else(parsed):
    (policy,) = [a["content"] for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind, text in (("style-src", parsed.texts["style"][0]), ("script-src", parsed.texts["script"][-1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    names = {name for _, attributes in parsed.tags for name in attributes}
    assert [name for name in names if name == "style" or name.startswith("on")] == []


def test_ids_are_unique_and_what_points_at_one_finds_it(parsed):
    ids = parsed.all("id")
    assert len(ids) == len(set(ids))
    aims = [link[1:] for link in parsed.all("href") if link.startswith("#")] + parsed.all("for")
    aims += parsed.all("data-parent")
    assert set(aims) - set(ids) == set()
    assert any(aim.startswith("p0-") for aim in aims), "no rule leads to its line of the plan"


def test_roles_levels_and_labels(parsed):
    assert set(parsed.all("role")) <= ROLES
    rows = {row["id"]: row for row in parsed.rows()}
    for row in rows.values():
        above = rows.get(row.get("data-parent", ""))
        assert int(row["aria-level"]) == (1 if above is None else int(above["aria-level"]) + 1)
        closed = above is not None and (above["aria-expanded"] == "false" or "hidden" in above)
        assert ("hidden" in row) == closed
    assert [row["tabindex"] for row in rows.values()].count("0") == 1
    pictures = [a for tag, a in parsed.tags if tag == "svg"]
    assert all(a.get("aria-hidden") == "true" or a.get("aria-label") for a in pictures)


def test_the_bound_plan_is_inside(report, parsed, big):
    (text,) = [t for t in parsed.texts["script"] if t.startswith("{")]
    assert text == big.json_text()
    assert json.loads(text) == big.to_json()


def test_names_from_outside_stay_text():
    evil = "<img src=x onerror=alert(1)>&</script>"
    model = type("Net<b>", (nn.Module,), {})()
    model.a = nn.Linear(2, 2)
    model._modules[evil] = nn.Linear(2, 2)
    bound = bind(model, parse_plan("dtplan: 1\nname: <i>\nrules: {'*': replicate}"), tp=1)
    text = page(bound, ledger(bound), model=evil)
    found = Parsed(text)
    assert found.faults == []
    assert {tag for tag, _ in found.tags} & {"img", "b>", "b&gt;"} == set()
    (inside,) = [t for t in found.texts["script"] if t.startswith("{")]
    assert json.loads(inside) == bound.to_json()
    assert evil in json.dumps(bound.to_json(), ensure_ascii=False)
    assert any(evil in said for said in found.texts["span"])


# --- what it says


def test_layers_that_are_alike_are_one_row(big):
    rows = [[row.path for row in tree(bound).walk()] for bound in (bound_llama(8, tp=8, shard=8), big)]
    assert rows[0] == rows[1]
    assert "model.layers.*.self_attn.q_proj" in rows[1]


def test_the_bytes_of_the_tree_are_those_of_the_bound_plan(big):
    root = tree(big)
    assert (root.held.model, root.held.rank) == big.parameter_bytes()
    for row in root.walk():
        if row.children and row.module is None:
            assert row.held.rank == sum(child.held.rank for child in row.children)


def test_layers_of_two_kinds_are_two_rows_and_two_pictures():
    config = families._deepseek_v3()
    assert isinstance(config, transformers.DeepseekV3Config)
    config.num_hidden_layers = 3
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    bound = bind(model, families.FOLDER / "deepseek_v3.yaml", tp=2)
    shown = view(bound, ledger(bound))
    kinds = [row.row for row in shown.rows if row.is_unit]
    assert [(row.label, row.count, row.numbers) for row in kinds] == [("layers.0", 1, "0"), ("layers.*", 2, "1-2")]
    assert [[lane.name for lane in layer.lanes] for layer in shown.layers] == [["self_attn", "mlp"]] * 2
    assert [branch.name for branch in shown.layers[1].lanes[1].branches] == ["experts", "shared_experts"]
    assert [floor.layer for floor in ledger(bound).floors] == ["model.layers.0", "model.layers.{1..2}"]


def test_a_layer_s_picture_has_what_enters_and_what_leaves(big):
    (layer,) = view(big, ledger(big)).layers
    told = [
        (
            lane.name,
            [move.backward for move in lane.enter],
            [m.name for m in lane.branches[0].first],
            [m.name for m in lane.branches[0].second],
            [move.forward for move in lane.leave],
        )
        for lane in layer.lanes
    ]
    assert told == [
        ("self_attn", ["all-reduce"], ["q_proj", "k_proj", "v_proj"], ["o_proj"], ["all-reduce"]),
        ("mlp", ["all-reduce"], ["gate_proj", "up_proj"], ["down_proj"], ["all-reduce"]),
    ]


def test_a_region_in_a_region_has_moves_of_its_own():
    config = transformers.MixtralConfig(**families._GQA, **families._EXPERTS)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    bound = bind(model, "mixtral", tp=2, sequence_parallel=True)
    (layer,) = view(bound, ledger(bound)).layers
    mlp = layer.lanes[1]
    assert [(m.src, m.dst, m.forward) for m in mlp.enter] == [("S(1)", "R", "all-gather")]
    (experts,) = mlp.branches
    assert [m.what for m in experts.enter] == ["hidden_states", "top_k_weights"]
    assert [m.name for m in (*experts.first, *experts.second)] == ["gate_up_proj", "down_proj"]
    assert [(m.src, m.dst) for m in (*experts.leave, *mlp.leave)] == [("P", "R"), ("R", "S(1)")]


def test_norms_over_cut_dims_send_between_the_matrices():
    with torch.device("meta"):
        model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**families._TINY))
    bound = bind(model, "olmo2", tp=2)
    book = ledger(bound)
    (layer,) = view(bound, book).layers
    sums = layer.lanes[0].branches[0].between
    assert [(m.what, m.forward, m.backward, m.bytes) for m in sums] == [
        (name, "all-reduce", "all-reduce", 4 * book.sequence) for name in ("q_norm", "k_norm")
    ]
    moves = [m for lane in layer.lanes for m in (*lane.enter, *lane.leave, *lane.branches[0].between)]
    (floor,) = book.floors
    assert (sum(bool(m.forward) for m in moves), sum(bool(m.backward) for m in moves)) == (
        floor.forward,
        floor.backward,
    )


def test_the_first_screen(big):
    found = facts(big, ledger(big), mesh(big, 8), None)
    assert found.essence[0] == (
        "Each rank holds 1/8 of 99.998 % of the parameters, and FSDP2 leaves 1/8 of that between steps."
    )
    assert found.essence[1].replace("\u00a0", " ") == "A layer makes 2 + 2 all-reduces: the floor."
    assert (found.model_bytes, found.rank_bytes) == big.parameter_bytes()
    assert found.tp_bytes == bound_llama(tp=8).parameter_bytes()[1]
    assert found.warnings == ()
    whole = bound_llama(1)
    assert facts(whole, ledger(whole), mesh(whole, 8), None).essence == ("Every rank holds the whole model.",)


def test_what_is_above_the_floor_is_said_first(tmp_path):
    plan = tmp_path / "dear.yaml"
    plan.write_text("dtplan: 1\nextends: llama\nrules:\n  model.layers.*.self_attn: {input: residual}\n")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA_70B, "num_hidden_layers": 2}))
    bound = bind(model, plan, tp=2)
    book = ledger(bound)
    found = facts(bound, book, mesh(bound, 8), None)
    assert found.kinds[0].above
    assert [line.replace("\u00a0", " ") for line in found.warnings] == [
        "2 layers make 2 + 4 all-reduces, above the floor of 2 + 2",
        *book.floors[0].excess,
    ]
    text = page(bound, book, difference=diff(bind(model, "llama", tp=2), bound))
    assert "above the floor" in text
    assert "+3 all-reduces a layer backward" in text


def test_a_model_that_no_plan_serves():
    bound = bind(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "auto", tp=1)
    found = Parsed(page(bound, ledger(bound)))
    assert found.faults == []
    assert len(found.rows()) == 1
    assert "There are no rules." in found.texts["section"][1]


def test_a_rule_stands_beside_the_modules_that_it_is_at_work_on(big):
    (file,) = files(load_plan("llama"), list(tree(big).walk()))
    used = {line.text.split(":")[0].strip(): line.uses for line in file.lines if line.uses}
    assert [(use.path.rpartition(".")[2], use.count, use.layouts) for use in used["self_attn.{k,v}_proj"]] == [
        ("k_proj", 80, ("S(0)",)),
        ("v_proj", 80, ("S(0)",)),
    ]
    assert [use.path for use in used["lm_head"]] == ["lm_head"]


def test_a_file_that_says_something_else_by_now_is_not_shown(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("dtplan: 1\nrules:\n  a: replicate\n")
    plan = load_plan(path)
    assert [file.name for file in files(plan, [])] == [str(path)]
    path.write_text("dtplan: 1\nrules:\n  b: replicate\n")
    assert files(plan, []) == ()


# --- pictures


def degrees(replicate: int, shard: int, tp: int) -> BoundPlan:
    return bound_llama(1, replicate=replicate, shard=shard, tp=tp)


@pytest.mark.parametrize(
    ("replicate", "shard", "tp", "gpus", "hosts", "crosses"),
    [
        (1, 8, 8, 8, 8, False),
        (2, 4, 2, 8, 2, False),
        (2, 2, 4, 4, 4, False),
        (1, 2, 8, 4, 4, True),
        (1, 1, 2, 8, 1, False),
    ],
)
def test_every_rank_is_in_the_mesh_once_and_every_host_has_a_frame(replicate, shard, tp, gpus, hosts, crosses):
    found = mesh(degrees(replicate, shard, tp), gpus)
    assert [cell.rank for cell in found.cells] == list(range(replicate * shard * tp))
    assert [(cell.replicate * shard + cell.shard) * tp + cell.tp for cell in found.cells] == [
        cell.rank for cell in found.cells
    ]
    assert len({(cell.x, cell.y) for cell in found.cells}) == len(found.cells)
    assert (found.host_count, found.crosses) == (hosts, crosses)
    for host in found.hosts:
        inside = {
            cell.host
            for cell in found.cells
            if host.x <= cell.x < host.x + host.width and host.y <= cell.y < host.y + host.height
        }
        assert len(inside) == 1
    assert found.notes == ()
    assert found.width <= 360


def test_a_large_mesh_says_what_it_leaves_out():
    found = mesh(degrees(8, 32, 8), 8)
    assert found.notes == ("4 more replicas like these", "24 more tp groups in each replica")
    assert len(found.cells) == 4 * 8 * 8


def tensor(shape: tuple[int, ...], placement: Any, sections: tuple[int, ...] = (), **more: Any) -> BoundTensor:
    given = {"name": "weight", "dtype": "float32", "local_shape": shape, **more}
    return BoundTensor(shape=shape, placement=placement, sections=sections, **given)


def held(shape: tuple[int, ...], placement: Any, sections: tuple[int, ...] = (), **more: Any) -> tuple[float, int]:
    """The share of the picture that rank 0 holds, and in how many pieces."""
    drawn = glyph(tensor(shape, placement, sections, **more), 4, largest=max(shape), pixels=100)
    mine = [s for s in drawn.slices if s.tp == 0]
    return sum(s.width * s.height for s in mine) / (drawn.width * drawn.height), len(mine)


@pytest.mark.parametrize(
    ("shape", "placement", "sections", "pieces"),
    [
        ((64, 64), S(0), (), 1),
        ((64, 16), S(1), (), 1),
        ((96, 64), S(0), (32, 32, 32), 3),
        ((64,), S(0), (), 1),
        ((4, 64, 32), S(0), (), 1),
        ((4, 64, 32), S(1), (32, 32), 8),
        ((4, 64, 32), S(2), (), 4),
    ],
)
def test_a_picture_fills_the_part_of_a_rank(shape, placement, sections, pieces):
    share, found = held(shape, placement, sections)
    assert share == pytest.approx(1 / 4, abs=0.01)
    assert found == pieces


def test_rows_that_several_ranks_keep_are_drawn_on_each():
    share, pieces = held((96, 64), S(0), (64, 32), copies=(1, 4))
    assert share == pytest.approx((64 / 4 + 32) / 96, abs=0.01)
    assert pieces == 2
    share, _ = held((96, 64), S(0), (64, 32), copies=(1, 2))
    assert share == pytest.approx((64 / 4 + 32 / 2) / 96, abs=0.01)


def test_what_is_whole_has_no_parts():
    assert glyph(tensor((8, 8), R), 4, largest=8, pixels=10).slices == ()


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (1.0, "100 %"), (0.987, "98.7 %"), (0.99998, "99.998 %"), (1 - 1e-9, "99.999 %"), (1e-9, "0.001 %")],
)
def test_a_percentage_says_all_and_none_of_all_and_none_only(share, text):
    assert percent(share) == text


def test_numbers_of_layers_are_ranges():
    assert ranges(["0", "1", "2", "5", "7", "8"]) == "0-2, 5, 7-8"
    assert few("0, 2, 4, 6, 8") == "0, 2, ... 8"


# --- a proof


def proof(of: BoundPlan, **changes: Any) -> dict[str, Any]:
    """As `dtplan prove --json` prints it."""
    leg = {"tp": of.tp, "shard": 1, "replicate": 1, "sequence_parallel": False, "loss_parallel": False}
    return {
        "schema_version": 1,
        "verdict": "proved",
        "plan": of.plan,
        "digest": of.digest,
        "architecture": of.architecture,
        "bound": 1e-12,
        "choices": [{"field": "hidden_size", "real": 8192, "used": 256}],
        "versions": {"torch": "2.13.0"},
        "measure": "per tensor",
        "replay": "dtplan prove llama",
        "legs": [
            {
                "leg": {**leg, "world": "simulated ranks"},
                "mesh": {"tp": of.tp},
                "ranks": of.tp,
                "verdict": "proved",
                "tensors": 44,
                "steps": 3,
                "largest_error": 1e-15,
                "largest_at": "logits",
                "reason": "",
                "findings": [],
            }
        ],
        **changes,
    }


def test_a_proof_s_own_json_is_read(big):
    from dtplan.prove.result import Leg, LegResult, Proof

    leg = LegResult(leg=Leg(tp=8), verdict="proved", tensors=3, steps=3, largest_error=2e-15, largest_at="loss")
    made = Proof(
        plan="llama",
        digest=big.digest,
        model="m",
        architecture=big.architecture,
        seed=0,
        bound=1e-12,
        batch=(4, 16),
        versions={"torch": "2"},
        choices=(),
        legs=(leg,),
    )
    found = proof_view(made.to_json(), big)
    assert (found.verdict, found.of_this_plan, found.covers) == ("proved", True, True)
    assert (found.legs[0].name, found.legs[0].error, found.legs[0].here) == ("tp 8", "2.0e-15", True)
    assert found.bound_at == pytest.approx(30)


def doubts(bound: BoundPlan, data: dict[str, Any]) -> tuple[str, ...]:
    return facts(bound, ledger(bound), mesh(bound, 8), proof_view(data, bound)).warnings


def test_a_proof_of_something_else_is_said_to_be(big):
    assert doubts(big, proof(big)) == ()
    (line,) = doubts(big, proof(big, digest="0" * 64))
    assert line.startswith("The proof is of another plan or model")
    (line,) = doubts(big, proof(bound_llama(2, tp=4)))
    assert line == "The proof has no leg at this tp degree and these switches"
    (line,) = doubts(big, proof(big, verdict="refuted"))
    assert line == "The proof says: refuted"


def test_a_refutation_comes_with_its_cause_once(big):
    data = proof(big, verdict="refuted")
    finding = {
        "name": "model.norm.weight",
        "what": "gradient",
        "kind": "partial sum",
        "says": "each rank holds a term",
        "rule": "llama.yaml:27:3",
        "advice": "write `grad: sum`",
        "tried": "with this, the leg is proved",
    }
    leg = {**data["legs"][0], "verdict": "refuted", "largest_error": "inf", "findings": [finding]}
    data["legs"] = [leg, leg]
    found = proof_view(data, big)
    assert [len(f.legs) for f in found.findings] == [2]
    assert found.legs[0].at == 100
    text = page(big, ledger(big), proof=data)
    assert Parsed(text).faults == []
    assert text.count("each rank holds a term") == 1


def broken_proofs(bound: BoundPlan) -> Iterator[dict[str, Any]]:
    yield proof(bound, schema_version=7)
    yield proof(bound, legs=[{}])
    yield proof(bound, legs=3)
    yield proof(bound, bound="x")
    yield proof(bound, choices=["x"])


def test_a_broken_proof_is_one_error(big):
    for data in broken_proofs(big):
        with pytest.raises(ProofError, match="dtplan prove --json"):
            proof_view(data, big)


# --- the command


def test_the_command_takes_a_proof_and_something_to_compare_with(config, big, tmp_path):
    given, other, out = tmp_path / "proof.json", tmp_path / "before.json", tmp_path / "r.html"
    given.write_text(json.dumps(proof(big)))
    other.write_text(bound_llama(tp=4, shard=8).json_text())
    common = ("report", "--model", config, "--tp", "8", "--shard", "8", "-o", str(out))
    done = run(*common, "--proof", str(given), "--against", str(other))
    assert done.exit_code == 0, done.output
    assert f"{out}: " in done.output
    text = out.read_text()
    found = Parsed(text)
    assert found.faults == []
    assert {"proof", "difference"} <= set(found.all("id"))
    assert "8.03 GiB" in text, "a rank's parameters at tp 4, before"
    done = run(*common, "--against", "llama")
    assert done.exit_code == 0, done.output
    assert "there is none" in out.read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--proof", "missing.json"), "cannot read the proof missing.json"),
        (("--against", "missing.json"), "missing.json"),
        (("--against", "lama"), "there is no built-in plan `lama`"),
        (("-o", "missing/r.html"), "cannot write missing/r.html"),
    ],
)
def test_what_is_wrong_is_told(config, args, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("report", "--model", config, "--tp", "8", *args)
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)


@pytest.mark.parametrize("text", ["{", "[]", '{"verdict": "proved"}'])
def test_a_file_that_is_no_proof(config, text, tmp_path):
    file = tmp_path / "proof.json"
    file.write_text(text)
    done = run("report", "--model", config, "--proof", str(file), "-o", str(tmp_path / "r.html"))
    assert isinstance(done.exception, ProofError)
    assert "dtplan prove --json" in str(done.exception)
