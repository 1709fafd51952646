"""A planned switch as one self-contained page (needs plotly): traffic, links, memory, who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from dynajax.bytesize import format_bytes
from dynajax.errors import DynajaxError
from dynajax.planner import Plan, Price
from dynajax.planner.stages.live_ranges import live_bytes
from dynajax.types import Floats, Ints
from dynajax.vps.tiling import Tiling, segment_sum

_MOST_ROWS = 256
"""Devices that a chart shows one by one; beyond, it shows nodes."""
_GB = 2**30
"""As everywhere on the screen, see ``bytesize``."""
_COLOURS = [[0, "#4f86c6"], [0.5, "#b07aa8"], [1, "#f08a3c"]]
"""Of middling lightness, so that both ends show on white and on black."""
_STYLE = """
:root{color-scheme:light dark;--ink:#1d2129;--faint:#d5dae3;--page:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e4e6eb;--faint:#3b414d;--page:#16181d}}
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}
body{color:var(--ink);background:var(--page)}
table{border-collapse:collapse}
th,td{text-align:left;vertical-align:top;padding:.2em 0;border-bottom:1px solid var(--faint)}
th{padding-right:1.5em;font-weight:500;white-space:nowrap}
"""
_PAINT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink"), faint = style.getPropertyValue("--faint");
  for (const chart of document.querySelectorAll(".plotly-graph-div"))
    Plotly.relayout(chart, {"font.color": ink, "xaxis.gridcolor": faint, "yaxis.gridcolor": faint,
      "xaxis.zerolinecolor": faint, "yaxis.zerolinecolor": faint, "shapes[0].line.color": ink});
}
paint();
dark.addEventListener("change", paint);
"""


def write_page(path: str, plan: Plan, cost: Price, facts: Mapping[str, str]) -> None:
    """Write the page.

    Args:
        path: the file.
        plan: what to show.
        cost: its price.
        facts: what to say above the charts, name by name.

    Raises:
        DynajaxError: plotly is not installed, or the file cannot be written.
    """
    try:
        go: Any = import_module("plotly.graph_objects")
    except ImportError:
        raise DynajaxError("--html needs plotly: pip install 'dynajax[viz]'") from None
    charts = (
        _traffic(go, plan),
        _links(go, cost),
        _memory(go, plan),
        _held(go, plan, "before"),
        _held(go, plan, "after"),
    )
    drawn = "".join(
        f"<h2>{escape(title)}</h2><p>{escape(text)}</p>"
        + figure.to_html(
            full_html=False,
            include_plotlyjs="inline" if number == 0 else False,
            config={"responsive": True, "displaylogo": False},
        )
        for number, (title, text, figure) in enumerate(charts)
    )
    listed = "".join(f"<tr><th>{escape(name)}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
    assumed = "".join(f"<li>{escape(line)}</li>" for line in cost.assumptions)
    page = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>dynajax plan</title><style>{_STYLE}</style></head><body>"
        f"<h1>dynajax plan</h1><table>{listed}</table>{drawn}<h2>Assumed</h2><ul>{assumed}</ul>"
        f"<script>{_PAINT}</script></body></html>\n"
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise DynajaxError(f"the page cannot be written: {error}") from None


def _figure(go: Any, trace: Any, height: int, **layout: Any) -> Any:
    """A chart without a background of its own, its legend above it."""
    figure = go.Figure(trace)
    figure.update_layout(
        height=height,
        margin={"l": 60, "r": 20, "t": 60, "b": 50},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        modebar_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        **layout,
    )
    return figure


def _places(plan: Plan) -> tuple[Ints, str]:
    """What each device is drawn as: itself, or its node where there are too many."""
    if plan.num_devices <= _MOST_ROWS or plan.topology is None:
        return np.arange(plan.num_devices), "device"
    return plan.topology.node[: plan.num_devices], "node"


def _axis(plan: Plan, what: str) -> dict[str, Any]:
    """An axis of devices has a line before the first device of each node, at most 16 of them."""
    if what == "node" or plan.topology is None:
        return {}
    node = int((plan.topology.node[: plan.num_devices] == plan.topology.node[0]).sum())
    first = np.arange(0, plan.num_devices, node * -(-plan.num_devices // (16 * node)))
    return {"tickvals": first - 0.5, "ticktext": first, "tickangle": 0}


def _heat(go: Any, colours: Any, bar: dict[str, Any], **data: Any) -> Any:
    """A heat map with its colour bar above it."""
    return go.Heatmap(
        z=colours,
        colorscale=_COLOURS,
        colorbar={"orientation": "h", "thickness": 10, "y": 1.0, "yanchor": "bottom", **bar},
        **data,
    )


def _traffic(go: Any, plan: Plan) -> tuple[str, str, Any]:
    place, what = _places(plan)
    size = int(place.max(initial=0)) + 1
    t = plan.traffic
    sent = segment_sum(place[t.sender] * size + place[t.receiver], t.nbytes, size * size).reshape(size, size)
    said = np.array([[format_bytes(n) if n else "" for n in row] for row in sent.tolist()])
    powers = np.log2(np.where(sent > 0, sent, np.nan))
    ticks = {"tickvals": [10, 20, 30, 40], "ticktext": ["1 KB", "1 MB", "1 GB", "1 TB"]}
    hover = f"{what} %{{y}} → {what} %{{x}}: %{{text}}<extra></extra>"
    figure = _figure(go, _heat(go, powers, ticks, text=said, hovertemplate=hover, texttemplate=""), 680)
    figure.update_xaxes(title=f"to {what}", constrain="domain", range=[-0.5, size - 0.5], **_axis(plan, what))
    figure.update_yaxes(
        title=f"from {what}", scaleanchor="x", constrain="domain", range=[size - 0.5, -0.5], **_axis(plan, what)
    )
    pairs = f"{len(t.nbytes)} pairs of devices talk" if what == "device" else "traffic inside a node is on the diagonal"
    return "Traffic", f"Bytes from {what} to {what}, in powers of two; {pairs}.", figure


def _links(go: Any, cost: Price) -> tuple[str, str, Any]:
    names, nbytes = list(cost.bytes_by_tier), list(cost.bytes_by_tier.values())
    text = [format_bytes(n) for n in nbytes]
    bars = go.Bar(x=[n / _GB for n in nbytes], y=names, orientation="h", text=text, marker_color=_COLOURS[0][1])
    figure = _figure(go, bars, 90 + 50 * len(names), xaxis_title="GB", yaxis_autorange="reversed")
    figure.update_layout(margin_t=30, margin_l=90)
    return "Links", "Bytes over each kind of link; of the first, copies inside devices.", figure


def _memory(go: Any, plan: Plan) -> tuple[str, str, Any]:
    live = live_bytes(plan)
    base = np.maximum(plan.footprint.source, plan.footprint.target)
    if not plan.donate:
        base = plan.footprint.source + plan.footprint.target
    moments = np.arange(len(live)) / max((len(live) - 1) / max(len(plan.stages), 1), 1)
    lines = (
        ("fullest device", live.max(axis=1), "#f08a3c"),
        ("mean", live.mean(axis=1), "#b07aa8"),
        ("emptiest device", live.min(axis=1), "#4f86c6"),
        ("most above a base", np.maximum((live - base).max(axis=1), 0), "#3fa66b"),
    )
    traces = [go.Scatter(x=moments, y=y / _GB, name=name, mode="lines", line_color=c) for name, y, c in lines]
    figure = _figure(go, traces, 440, xaxis_title="stage", yaxis_title="GB", yaxis_rangemode="tozero")
    figure.add_hline(
        y=plan.budget / _GB, line_dash="dot", annotation_text="budget above a base", annotation_position="top left"
    )
    sum_or_larger = "larger" if plan.donate else "sum"
    return (
        "Memory",
        "Bytes alive on a device over the stages. The base of a device is the "
        f"{sum_or_larger} of what it holds before and after.",
        figure,
    )


def _held(go: Any, plan: Plan, when: str) -> tuple[str, str, Any]:
    place, what = _places(plan)
    share, columns = layer_shares(plan, when, place)
    hover = f"{what} %{{y}} holds %{{z:.2%}} of %{{x}}<extra></extra>"
    bar = {"tickformat": ".1%"}
    figure = _figure(
        go,
        _heat(go, np.where(share > 0, share, np.nan), bar, x=columns, hovertemplate=hover, zmin=0, zmax=share.max()),
        680,
    )
    figure.update_xaxes(title="layer", type="category", nticks=24, showgrid=False)
    figure.update_yaxes(title=what, range=[len(share) - 0.5, -0.5], **_axis(plan, what))
    return f"Who holds what {when}", f"Share of the bytes of each layer, and of what has no layers, by {what}.", figure


def layer_shares(plan: Plan, when: str, place: Ints) -> tuple[Floats, list[str]]:
    """Share of the bytes of every layer that each place holds, and the names of the columns.

    Args:
        plan: the plan.
        when: "before" or "after".
        place: place of each device.
    """
    layers = max((m.tensor.shape[0] for m in plan.moves if _has_layers(m.tensor.path)), default=0)
    held = np.zeros((int(place.max(initial=0)) + 1, layers + 1))
    total = np.zeros(layers + 1)
    seen: dict[tuple[int, bool], Floats] = {}
    for move in plan.moves:
        tiling = move.source if when == "before" else move.target
        stacked = _has_layers(move.tensor.path)
        key = (id(tiling), stacked)
        if key not in seen:
            seen[key] = _by_layer(tiling, place, layers) if stacked else _by_place(tiling, place, held.shape)
        held += seen[key] * move.tensor.itemsize
        spread = slice(0, layers) if stacked else slice(layers, None)
        total[spread] += move.tensor.nbytes / (layers if stacked else 1)
    return held / np.maximum(total, 1), [*map(str, range(layers)), "rest"]


def _has_layers(path: str) -> bool:
    return "['blocks']" in path


def _by_layer(tiling: Tiling, place: Ints, layers: int) -> Floats:
    """Elements of each layer by place; a box adds its share to each of its layers."""
    region, rows = tiling.region, place[tiling.holder]
    change = np.zeros((int(place.max(initial=0)) + 1, layers + 1))
    lo, hi = region.lo[:, 0], region.hi[:, 0]
    each = region.volumes / (hi - lo)
    np.add.at(change, (rows, lo), each)
    np.add.at(change, (rows, hi), -each)
    held = np.cumsum(change, axis=1)
    held[:, layers] = 0
    return held


def _by_place(tiling: Tiling, place: Ints, shape: tuple[int, ...]) -> Floats:
    held = np.zeros(shape)
    np.add.at(held[:, -1], place[tiling.holder], tiling.region.volumes)
    return held
