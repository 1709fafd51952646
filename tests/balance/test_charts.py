"""Gantt charts as rows, text and a page."""

import pytest
from balance.price_lists import KINDS

from dynajax.balance.gantt import gantt_rows, gantt_text
from dynajax.balance.html import write_html
from dynajax.balance.iteration import Planner
from dynajax.meshes import Strategy

PLAN = Planner([Strategy.parse("tp1|tp4.pp3")], KINDS).plan([2000, 900, 900, 800, 400, 50, 50, 20])


def test_rows_hold_every_micro_batch_of_every_stage():
    named = gantt_rows(PLAN)
    assert [label for label, _ in named] == ["0 tp1", *(f"1 tp4.pp3 stage {stage}" for stage in range(3))]
    for (_, tasks), p in zip(named, [PLAN.pipelines[0], *[PLAN.pipelines[1]] * 3], strict=True):
        assert len(tasks) == 2 * len(p.microbatches)
        assert sum(e.end - e.start for e in tasks) == pytest.approx(sum(mb.ms for mb in p.microbatches))
        assert max(e.end for e in tasks) <= p.ms + 1e-9


def test_text_shows_work_and_idle_time_to_scale():
    lines = gantt_text(PLAN, width=50).splitlines()
    assert len(lines) == 4
    for line, (_, tasks) in zip(lines, gantt_rows(PLAN), strict=True):
        bar = line.split("|")[1]
        assert len(bar) == 50
        busy = sum(e.end - e.start for e in tasks) / PLAN.ms
        assert (50 - bar.count("·")) / 50 == pytest.approx(busy, abs=0.02 * (1 + len(tasks)))
    assert gantt_text(PLAN, most=2).splitlines()[-1] == "… and 2 more"


def test_an_empty_plan_is_idle():
    empty = Planner([Strategy.parse("tp1")], KINDS).plan([])
    assert gantt_text(empty, width=8).endswith("|········|")


def test_the_page_is_self_contained(tmp_path):
    write_html(tmp_path / "page.html", [PLAN, PLAN], {"profile": "<mine>"})
    page = (tmp_path / "page.html").read_text()
    assert "&lt;mine&gt;" in page
    assert "<mine>" not in page
    assert 'src="http' not in page
    assert page.count("plotly-graph-div") == 2
