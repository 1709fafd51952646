"""A planned switch as one self-contained page (needs plotly): traffic, links, memory, who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynajax.errors import DynajaxError
from dynajax.planner import Plan, Price
from dynajax.planner.timeline import live_bytes
from dynajax.vps.region import Ints
from dynajax.vps.tiling import Tiling, sums

_MOST_ROWS = 256
"""Devices that a chart shows one by one; beyond, it shows nodes."""
_GB = 1e9


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
        + figure.to_html(full_html=False, include_plotlyjs="inline" if number == 0 else False)
        for number, (title, text, figure) in enumerate(charts)
    )
    listed = "".join(f"<tr><th>{escape(name)}</th><td>{escape(fact)}</td></tr>" for name, fact in facts.items())
    assumed = "".join(f"<li>{escape(line)}</li>" for line in cost.assumptions)
    page = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>dynajax plan</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}"
        "th{text-align:left;padding-right:2em;font-weight:500;vertical-align:top}</style></head><body>"
        f"<h1>dynajax plan</h1><table>{listed}</table>{drawn}<h2>Assumed</h2><ul>{assumed}</ul></body></html>\n"
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise DynajaxError(f"the page cannot be written: {error}") from None


def _places(plan: Plan) -> tuple[Ints, str]:
    """What each device is drawn as: itself, or its node where there are too many."""
    if plan.num_devices <= _MOST_ROWS or plan.topology is None:
        return np.arange(plan.num_devices), "device"
    return plan.topology.node[: plan.num_devices], "node"


def _traffic(go: Any, plan: Plan) -> tuple[str, str, Any]:
    place, what = _places(plan)
    size = int(place.max(initial=0)) + 1
    t = plan.traffic
    sent = sums(place[t.sender] * size + place[t.receiver], t.nbytes, size * size).reshape(size, size) / _GB
    figure = go.Figure(
        go.Heatmap(
            z=np.where(sent > 0, sent, np.nan),
            colorscale="Viridis",
            colorbar={"title": "GB"},
            hovertemplate=f"{what} %{{y}} → {what} %{{x}}: %{{z:.3f}} GB<extra></extra>",
        )
    )
    figure.update_layout(height=640, xaxis_title=f"to {what}", yaxis_title=f"from {what}", yaxis_autorange="reversed")
    pairs = f"{len(t.nbytes)} pairs of devices talk" if what == "device" else "traffic inside a node is on the diagonal"
    return "Traffic", f"Bytes from {what} to {what}; {pairs}.", figure


def _links(go: Any, cost: Price) -> tuple[str, str, Any]:
    names = list(cost.bytes_by_tier)
    gigabytes = [cost.bytes_by_tier[n] / _GB for n in names]
    figure = go.Figure(go.Bar(x=gigabytes, y=names, orientation="h", text=[f"{g:.1f} GB" for g in gigabytes]))
    figure.update_layout(height=240, xaxis_title="GB")
    return "Links", "Bytes over each kind of link; of the first, copies inside devices.", figure


def _memory(go: Any, plan: Plan) -> tuple[str, str, Any]:
    live = live_bytes(plan)
    base = np.maximum(plan.footprint.source, plan.footprint.target)
    if not plan.donate:
        base = plan.footprint.source + plan.footprint.target
    above = live - base
    figure = go.Figure()
    moments = np.arange(len(live)) / max((len(live) - 1) / max(len(plan.stages), 1), 1)
    for name, line in (
        ("fullest device", live.max(axis=1)),
        ("mean", live.mean(axis=1)),
        ("emptiest device", live.min(axis=1)),
    ):
        figure.add_scatter(x=moments, y=line / _GB, name=name, mode="lines")
    figure.add_scatter(x=moments, y=above.max(axis=1) / _GB, name="most above its base", mode="lines")
    figure.add_hline(y=plan.budget / _GB, line_dash="dot", annotation_text="budget above the base")
    figure.update_layout(height=420, xaxis_title="stage", yaxis_title="GB")
    text = (
        "Bytes alive on a device over the stages. The base of a device is the larger of what it holds before and after."
    )
    return "Memory", text, figure


def _held(go: Any, plan: Plan, when: str) -> tuple[str, str, Any]:
    place, what = _places(plan)
    share, columns = layer_shares(plan, when, place)
    figure = go.Figure(
        go.Heatmap(
            z=np.where(share > 0, share, np.nan),
            x=columns,
            colorscale="Viridis",
            colorbar={"title": "share"},
            hovertemplate=f"{what} %{{y}} holds %{{z:.2%}} of %{{x}}<extra></extra>",
        )
    )
    figure.update_layout(height=640, yaxis_title=what, yaxis_autorange="reversed", xaxis_type="category")
    return f"Who holds what {when}", f"Share of the bytes of each layer, and of what has no layers, by {what}.", figure


def layer_shares(plan: Plan, when: str, place: Ints) -> tuple[NDArray[np.float64], list[str]]:
    """Share of the bytes of every layer that each place holds, and the names of the columns.

    Args:
        plan: the plan.
        when: "before" or "after".
        place: place of each device.
    """
    layers = max((m.tensor.shape[0] for m in plan.moves if _has_layers(m.tensor.path)), default=0)
    held = np.zeros((int(place.max(initial=0)) + 1, layers + 1))
    total = np.zeros(layers + 1)
    seen: dict[tuple[int, bool], NDArray[np.float64]] = {}
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


def _by_layer(tiling: Tiling, place: Ints, layers: int) -> NDArray[np.float64]:
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


def _by_place(tiling: Tiling, place: Ints, shape: tuple[int, ...]) -> NDArray[np.float64]:
    held = np.zeros(shape)
    np.add.at(held[:, -1], place[tiling.holder], tiling.region.volumes)
    return held
