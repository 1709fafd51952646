"""``dynajax plan`` through its options: what machines read, what people see, and what is refused."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest

from dynajax.cli import main
from dynajax.cli.plan import PlanOptions, run
from dynajax.cli.plan_page import layer_shares
from dynajax.cli.plan_state import JobState, StateParts
from dynajax.errors import BudgetError, DynajaxError, StrategyError, TopologyError
from dynajax.meshes import Strategy, Topology
from dynajax.planner import Granularity, build_plan

PROMISED = {
    "model", "from", "to", "devices", "bytes_total", "bytes_retained", "bytes_moved", "bytes_lower_bound",
    "bytes_inter_node", "bytes_inter_node_lower_bound", "busiest_device_bytes", "peak_bytes", "budget_bytes", "stages",
    "rounds", "predicted_s", "plan_s", "roles", "digest", "verified",
}  # fmt: skip


def answer(capsys, **options):
    assert run(PlanOptions(json=True, **options)) == 0
    return json.loads(capsys.readouterr().out)


def test_the_default_is_a_70b_switch_that_moves_half_of_its_state(capsys):
    said = answer(capsys, verify=True)
    assert set(said) >= PROMISED
    assert said["devices"] == [32, 64]
    assert said["bytes_total"] == pytest.approx(828e9, rel=0.001)
    assert said["bytes_moved"] == said["bytes_lower_bound"] == pytest.approx(414e9, rel=0.01)
    assert said["bytes_inter_node"] == said["bytes_inter_node_lower_bound"]
    assert said["busiest_device_bytes"] == pytest.approx(13.0e9, rel=0.01)
    assert said["bytes_retained"] + said["bytes_moved"] == pytest.approx(828e9, rel=0.001)
    assert said["peak_extra_bytes"] <= said["budget_bytes"] == 2**31
    assert said["predicted_s"] < 2
    assert said["verified"] is True


def test_fixed_roles_move_what_the_published_systems_would(capsys):
    said = answer(capsys, roles="fixed")
    assert said["bytes_moved"] == pytest.approx(724e9, rel=0.01)
    assert said["busiest_device_bytes"] == pytest.approx(26.1e9, rel=0.01)
    assert said["verified"] is None


def test_the_same_question_has_the_same_digest(capsys):
    one, two = (answer(capsys, model="llama-7b", source="tp8", target="dp2.tp4")["digest"] for _ in range(2))
    assert one == two
    assert one != answer(capsys, model="llama-7b", source="tp8", target="dp2.tp4", budget="1GB")["digest"]


def test_a_target_that_names_devices_is_planned_as_written(capsys):
    options = {"model": "gpt3-xl", "source": "tp4.pp2"}
    there = answer(capsys, target="tp4.pp2@8-15", verify=True, **options)
    assert there["bytes_retained"] == 0
    assert there["bytes_moved"] == there["bytes_lower_bound"] >= there["bytes_total"]
    reversed_ranks = answer(capsys, target="tp4.pp2@7-0", **options)
    assert reversed_ranks["bytes_retained"] == 0
    back = answer(capsys, model="gpt3-xl", source="tp4.pp2@8-15", target="tp4.pp2@8-15")
    assert back["bytes_moved"] == 0
    # Without names ranks go where the state is, which is not among the first devices.
    assert answer(capsys, model="gpt3-xl", source="tp4.pp2@8-15", target="tp4.pp2")["bytes_moved"] == 0


def test_a_list_of_targets_may_name_devices(capsys):
    said = answer(capsys, model="gpt3-xl", source="tp4", target="tp4@0,2,4,6, 2*tp2 ,tp2|dp1@7,5-6")
    assert {r["to"] for r in said["ranking"]} == {"tp4@0,2,4,6", "tp2|tp2", "tp2|dp1@7,5-6"}


@pytest.mark.parametrize("ends", [("tp4.pp2", "tp4|2*tp2"), ("tp4|pp2.tp2", "tp4.pp2"), ("tp4|2*tp2", "pp2.tp2|tp4")])
def test_unlike_pipelines_on_either_side(capsys, ends):
    options = {"model": "gpt3-xl", "moments": "replicated", "weights": True, "verify": True}
    said = answer(capsys, source=ends[0], target=ends[1], **options)
    assert said["devices"] == [8, 8]
    assert said["bytes_moved"] == said["bytes_lower_bound"] > 0
    assert said["verified"] is True
    total, pipelines = said["bytes_total"], ends[1].count("|") + ends[1].count("*") + 1
    flat = total * 4 // 14  # of 4 + 8 + 2 bytes a parameter the master alone is shared by pipelines
    needed = flat + (total - flat) * pipelines
    assert said["bytes_retained"] + said["bytes_moved"] == pytest.approx(needed, rel=0.1)


def test_several_targets_are_ranked(capsys):
    said = answer(capsys, source="tp8.pp4.dp2", target="tp4.pp4.dp4,tp8.pp2.dp4", saves=0.01, steps=100)
    assert [r["to"] for r in said["ranking"]] == ["tp8.pp2.dp4", "tp4.pp4.dp4"]
    assert said["to"] == "tp8.pp2.dp4"
    assert said["worth_it"] is True
    assert answer(capsys, saves=1e-6, steps=10)["worth_it"] is False


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter"),
    [
        ({}, 12),
        ({"moments": "none"}, 4),
        ({"weights": True}, 14),
        ({"gradients": True}, 16),
        ({"master": "none", "moments": "none", "weights": True}, 2),
        ({"moments": "replicated"}, 12),
    ],
)
def test_the_state_is_what_the_options_say(capsys, options, bytes_a_parameter):
    said = answer(capsys, model="gpt3-xl", source="tp4.pp2", target="tp4.pp2.dp2", verify=True, **options)
    assert said["bytes_total"] == pytest.approx(1.315e9 * bytes_a_parameter, rel=0.01)


def test_people_see_the_same_figures(capsys):
    run(PlanOptions(model="gpt3-xl", source="tp4.pp2", target="tp4.pp2.dp2", verify=True))
    shown = capsys.readouterr().out
    for words in (
        "kept",
        "moved",
        "across nodes",
        "peak of a device",
        "predicted",
        "infiniband",
        "all hold",
        "assumed",
    ):
        assert words in shown


def test_the_page_is_self_contained_and_has_all_charts(tmp_path, capsys):
    page = tmp_path / "plan.html"
    run(PlanOptions(model="gpt3-xl", source="tp4.pp2", target="tp4.pp2.dp2", html=str(page), json=True))
    capsys.readouterr()
    text = page.read_text()
    for title in ("Traffic", "Links", "Memory", "Who holds what before", "Who holds what after", "Assumed"):
        assert f"<h2>{title}</h2>" in text
    assert text.count("Plotly.newPlot(") >= 5
    for axis in ("to device", "from device", "device", "layer", "stage", "GB"):
        assert f'"title":{{"text":"{axis}"}}' in text
    assert "width=device-width" in text
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)


def test_the_page_knows_who_holds_which_layer():
    state = JobState.of("gpt3-xl", StateParts())
    ends = [state.layout(Strategy.parse(s)) for s in ("tp4.pp2", "tp4.pp2.dp2")]
    plan = build_plan(ends[0], ends[1], 2**31, topology=Topology.load("h100", 16), granularity=Granularity.PACKED)
    places = np.arange(16)
    before, columns = layer_shares(plan, "before", places)
    after, _ = layer_shares(plan, "after", places)
    assert columns == [*map(str, range(24)), "rest"]
    assert before[:4, :12].min() == pytest.approx(0.25, rel=0.01)
    assert before[4:].sum() == pytest.approx(before[4:8].sum())
    assert before[:4, 12:24].sum() == 0
    for share in (before, after):
        assert share.sum(axis=0)[:-1] == pytest.approx(1, rel=0.01)
        assert 1 <= share.sum(axis=0)[-1] < 1.2  # positions are on every rank of a tensor parallel group


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"target": "tp8.pp8.dp4"}, TopologyError, "256 devices are asked for"),
        ({"topology": "pcie4"}, TopologyError, "64 devices are asked for"),
        ({"topology": "nowhere"}, TopologyError, "there is no topology"),
        ({"target": "tp8@0-6"}, StrategyError, "tp8 needs 8 devices and is put on 7"),
        ({"target": "tp8|pp81", "topology": "h100"}, StrategyError, "pp81 for 80 layers"),
        ({"target": "pp81", "topology": "h100"}, StrategyError, "pp81 for 80 layers; choose pp80 or less"),
        ({"target": "tp8.pp4/ep2"}, StrategyError, "has no experts"),
        ({"model": "qwen3-30b-a3b", "target": "ep128.tp2", "topology": "h100"}, None, ""),
        ({"model": "qwen3-30b-a3b", "target": "ep256", "topology": "h100"}, StrategyError, "ep256 for 128 experts"),
        ({"master": "none", "moments": "none"}, DynajaxError, "nothing is left to move"),
        ({"budget": "1KB"}, BudgetError, "the smallest budget that does is"),
        ({"budget": "2 apples"}, DynajaxError, "is not a size"),
    ],
)
def test_impossible_asks_are_one_clear_line(options, error, words, capsys):
    if error is None:
        assert run(PlanOptions(json=True, **options)) == 0
        capsys.readouterr()
        return
    with pytest.raises(error, match=words) as caught:
        run(PlanOptions(**options))
    assert "\n" not in str(caught.value)


ISLANDS = """
nodes = 4
[[tiers]]
name = "memory"
devices = 1
gigabytes_per_second = 900
[[tiers]]
name = "nvlink"
devices = 8
gigabytes_per_second = 200
"""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--from", "tp8", "--to", "tp8.dp2", "--topology", "{islands}"], "the topology has no link to device 8"),
        (["--from", "tp8", "--to", "tp8.dp8", "--topology", "{islands}"], "64 devices are asked for"),
        (["--from", "tp8", "--to", "tp8.dp2", "--budget", "1KB"], "the smallest budget that does is"),
        (
            ["--from", "tp8", "--to", "tp8.dp2", "--budget", "1KB", "--memory", "shards"],
            "the smallest budget that does is",
        ),
        (["--from", "tp8", "--to", "tp8.pq2"], "'pq2' is not an axis with its size"),
        (["--from", "tp8", "--to", "tp32"], "tp32 for 16 heads; choose tp16 or less"),
        (["--from", "tp8", "--to", "tp8.dp2", "--html", "{islands}/page.html"], "the page cannot be written"),
    ],
)
def test_the_command_says_in_one_line_why_not_and_exits_with_2(flags, words, tmp_path, capsys):
    islands = tmp_path / "islands.toml"
    islands.write_text(ISLANDS)
    assert main(["plan", "--model", "gpt3-xl", *(f.format(islands=islands) for f in flags)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.startswith("dynajax: ")
    assert said.err.count("\n") == 1


def test_the_budget_that_is_named_is_enough(capsys):
    with pytest.raises(BudgetError) as caught:
        run(PlanOptions(model="gpt3-xl", source="tp4.pp2", target="tp4.pp2.dp2", budget="1KB"))
    named = re.search(r"budget that does is (\d+) bytes", str(caught.value))
    assert named is not None
    said = answer(capsys, model="gpt3-xl", source="tp4.pp2", target="tp4.pp2.dp2", budget=named[1], verify=True)
    assert said["peak_extra_bytes"] <= int(named[1])


def test_shards_that_are_freed_whole_can_be_planned_too(capsys):
    said = answer(capsys, model="gpt3-xl", source="tp4.pp2", target="tp2.pp4", memory="shards", verify=True)
    assert said["peak_extra_bytes"] <= said["budget_bytes"]


def test_a_flag_for_every_option_has_help():
    import ast
    from pathlib import Path

    import dynajax.cli.plan as module

    tree = ast.parse(Path(module.__file__).read_text())
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "PlanOptions").body
    documented = sum(isinstance(n, ast.Expr) for n in body) - 1
    assert documented == len(fields(PlanOptions))
