"""Gantt charts of planned iterations as one self-contained page (needs plotly)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from dynajax.balance.cost import short_text
from dynajax.balance.gantt import gantt_rows
from dynajax.balance.iteration import IterationPlan
from dynajax.errors import BalanceError

_ROWS = 400  # pipeline stages that a page can show
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#ff9da6", "#9d755d")


def write_html(path: str | Path, plans: Sequence[IterationPlan], facts: Mapping[str, str]) -> None:
    """One self-contained page: the facts, and a chart for each plan.

    Args:
        path: the file.
        plans: iterations to show.
        facts: what to say above them, name by name.

    Raises:
        BalanceError: plotly is not installed.
    """
    try:
        go: Any = import_module("plotly.graph_objects")
    except ImportError:
        raise BalanceError("--html needs plotly: pip install 'dynajax[viz]'") from None
    listed = "".join(f"<tr><th>{escape(name)}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
    charts = "".join(
        _figure(go, number, plan).to_html(full_html=False, include_plotlyjs="inline" if number == 0 else False)
        for number, plan in enumerate(plans)
    )
    Path(path).write_text(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>dynajax balance</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}"
        "th{text-align:left;padding-right:2em;font-weight:500;vertical-align:top}</style></head><body>"
        f"<h1>dynajax balance</h1><table>{listed}</table>{charts}</body></html>\n",
        encoding="utf-8",
    )


def _figure(go: Any, number: int, plan: IterationPlan) -> Any:
    """A plotly figure: a row for each pipeline stage, a colour for each micro-batch, backwards paler."""
    named = gantt_rows(plan)[:_ROWS]
    figure = go.Figure()
    for backward, name, opacity in ((False, "forward", 1.0), (True, "backward", 0.55)):
        bars = [(label, task) for label, tasks in named for task in tasks if task.backward == backward]
        figure.add_bar(
            name=name,
            orientation="h",
            y=[label for label, _ in bars],
            x=[task.end - task.start for _, task in bars],
            base=[task.start for _, task in bars],
            opacity=opacity,
            marker_color=[_COLOURS[task.microbatch % len(_COLOURS)] for _, task in bars],
            customdata=[task.microbatch for _, task in bars],
            hovertemplate=f"%{{y}}, micro-batch %{{customdata}}, {name}<br>%{{base:.0f}} ms, takes %{{x:.0f}} ms",
        )
    hidden = len(gantt_rows(plan)) - len(named)
    figure.update_layout(
        title=f"Iteration {number}: {short_text(plan.strategy)}, {plan.ms:.0f} ms, {plan.idle_share:.1%} idle"
        + (f" (the first {len(named)} of {len(named) + hidden} pipeline stages)" if hidden else ""),
        barmode="overlay",
        height=160 + 22 * len(named),
        xaxis_title="ms",
        yaxis={"autorange": "reversed", "type": "category"},
    )
    return figure
