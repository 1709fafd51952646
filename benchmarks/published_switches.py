"""Switches that others published: planned, proved and priced in one run, beside what they said.

    python benchmarks/published_switches.py [--roles assigned|fixed] [--together groups|tp] [--budget 2GB] [--json]

Seconds are predictions of a link model (see docs/planner.md), published ones were measured on the real cluster; what
stands next to each other is thus not a race. Every plan is proved by bookkeeping. The exit status is 1 if a switch is
slower than the published limit of its list, even in lockstep (see ``Price``), or if bytes differ from the independent
estimates in the data file: by more than 3 % with fixed roles, by 1 % more with assigned ones (less is fine), by
anything more if only tensor-parallel groups have to stay together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from dynajax.bytesize import parse_bytes
from dynajax.cli.plan_state import JobState, StateParts
from dynajax.meshes import PARAMETER_RULES, Strategy, Topology
from dynajax.planner import (
    Granularity,
    Plan,
    Price,
    assign_ranks,
    build_plan,
    coupled_ranks,
    price_plan,
    renumbered,
    verify,
)
from dynajax.types import Ints
from dynajax.vps import Layout, Tensor, Tiling
from dynajax.vps.spec import cut_boxes

HOT = StateParts(master="none", moments="none", weights=True, gradients=True)
TOLERANCE = {"fixed": 0.03, "assigned": 0.01}


@dataclass(frozen=True)
class Case:
    """A switch to plan, with what was published about it."""

    list_name: str
    model: str
    topology: str
    source: str
    target: str
    parts: StateParts
    published_s: str
    limit_s: float | None
    volumes: dict[str, list[float]]
    uneven: Any = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a case."""

    case: Case
    plan: Plan
    price: Price
    plan_s: float
    faults: tuple[str, ...]


def cases() -> Iterator[Case]:
    """Every switch of the data file."""
    table = tomllib.loads((files("dynajax.planner") / "published_switches.toml").read_text(encoding="utf-8"))
    for entry in table["lists"]:
        pairs = [(s["from"], s["to"], s) for s in entry.get("switches", [])]
        for chain in (entry.get("chain", []), [*entry.get("cycle", []), *entry.get("cycle", [])[:1]]):
            pairs += [(a, b, {}) for a, b in itertools.pairwise(chain)]
        parts = HOT if entry.get("state") == "hot" else StateParts()
        for source, target, said in pairs:
            volumes = {k: said[k] for k in ("volumes", "assigned") if k in said}
            yield Case(
                entry["name"], entry["model"], entry["topology"], source, target, parts, entry.get("published_s", ""),
                entry.get("limit_s"), volumes,
            )  # fmt: skip
    for entry in table["uneven"]:
        yield Case(
            entry["name"], entry["model"], entry["topology"], entry["from"], "uneven stages", HOT, "", None, {},
            entry["pipelines"],
        )  # fmt: skip


def run(case: Case, roles: str, budget: int, together: str = "groups") -> Outcome:
    """Plan, prove and price a case."""
    state = JobState.of(case.model, case.parts)
    source = Strategy.parse(case.source)
    began = time.perf_counter()
    before = state.layout(source)
    after = _uneven(state, case.uneven) if case.uneven else state.layout(Strategy.parse(case.target))
    devices = max(before.num_devices, after.num_devices)
    node = int((Topology.load(case.topology).node == 0).sum())
    topology = Topology.load(case.topology, -(-devices // node) * node)
    if roles == "assigned" and not case.uneven:
        strategy = Strategy.parse(case.target)
        unit = strategy.size("tp") if together == "tp" else coupled_ranks(strategy, topology)
        after = renumbered(after, assign_ranks(before, after, topology, np.arange(devices), unit))
    plan = build_plan(before, after, budget, topology=topology, granularity=Granularity.PACKED)
    cost = price_plan(plan)
    plan_s = time.perf_counter() - began
    verify(plan)
    more = 0.0 if together == "tp" else TOLERANCE[roles]
    return Outcome(case, plan, cost, plan_s, tuple(_faults(case, plan, cost, roles, more)))


def _uneven(state: JobState, pipelines: Sequence[Sequence[Mapping[str, Sequence[int]]]]) -> Layout:
    """Weights and gradients on pipelines whose stages are listed one by one; every pipeline holds a whole copy."""
    tilings: list[Tiling] = []
    for tensor in state.space:
        path = "[" + tensor.path.partition("[")[2]
        axes = state.axes[path]
        held = [_stage_boxes(stage, tensor, axes) for p in pipelines for stage in _holders(p, path, axes, state)]
        devices, lo, hi = (np.concatenate([part[k] for part in held]) for k in range(3))
        tilings.append(Tiling.of_boxes(tensor.shape, devices, lo, hi))
    return Layout(state.space, tuple(tilings))


def _holders(pipeline: Sequence[Any], path: str, axes: Sequence[str | None], state: JobState) -> Sequence[Any]:
    """The stages of a pipeline that hold a tensor: all if it has layers, else the first or the last."""
    if "layers" in axes:
        return pipeline
    return pipeline[-1:] if path in state.last else pipeline[:1]


def _stage_boxes(
    stage: Mapping[str, Sequence[int]], tensor: Tensor, axes: Sequence[str | None]
) -> tuple[Ints, Ints, Ints]:
    """Devices of a stage, and lower and upper corners of their tensor-parallel boxes, shape (devices, rank)."""
    lo, hi = cut_boxes({"tp": len(stage["devices"])}, tensor.shape, axes, PARAMETER_RULES)
    if "layers" in axes:
        lo[:, axes.index("layers")], hi[:, axes.index("layers")] = stage["layers"]
    return np.asarray(stage["devices"], np.int64), lo, hi


def _faults(case: Case, plan: Plan, cost: Price, roles: str, more: float) -> Iterator[str]:
    """What is worse than published."""
    if case.limit_s is not None and cost.lockstep_s >= case.limit_s:
        yield f"{cost.lockstep_s:.2f} s, published {case.published_s} s"
    found = {"moved": plan.bytes_moved, "between nodes": plan.bytes_inter_node, "busiest": plan.busiest_device_bytes}
    names = list(found) if roles == "fixed" else ["moved", "busiest"]
    said = case.volumes.get("volumes" if roles == "fixed" else "assigned", [])
    for name, gigabytes in zip(names, said, strict=False):
        rounding = 0.5 if gigabytes >= 100 else 0.05
        least = gigabytes * (1 - more) - rounding if roles == "fixed" else 0.0
        most = gigabytes * (1 + more) + rounding
        if not least <= found[name] / 1e9 <= most:
            yield f"{name} {found[name] / 1e9:.1f} GB, estimated {gigabytes}"


def main() -> int:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roles", choices=("assigned", "fixed"), default="assigned")
    parser.add_argument("--together", choices=("groups", "tp"), default="groups")
    parser.add_argument("--budget", default="2GB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    outcomes = [run(case, options.roles, parse_bytes(options.budget), options.together) for case in cases()]
    if options.json:
        print(json.dumps(_record(outcomes)))
    else:
        _show(outcomes, f"{options.roles}, together: {options.together}" if options.roles == "assigned" else "fixed")
    return int(any(o.faults for o in outcomes))


def _record(outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "machine": {"system": platform.system(), "python": platform.python_version()},
        "cases": [
            {
                "case": f"{o.case.list_name}: {o.case.source} to {o.case.target}",
                "method": "plan",
                "predicted_s": o.price.seconds,
                "lockstep_s": o.price.lockstep_s,
                "floor_s": o.price.floor_s,
                "published_s": o.case.published_s,
                "bytes_moved": o.plan.bytes_moved,
                "bytes_inter_node": o.plan.bytes_inter_node,
                "busiest_device_bytes": o.plan.busiest_device_bytes,
                "peak_extra_bytes": o.plan.peak_extra_bytes,
                "stages": len(o.plan.stages),
                "rounds": o.price.rounds,
                "seconds_median": o.plan_s,
                "verified": True,
                "faults": list(o.faults),
            }
            for o in outcomes
        ],
    }


def _show(outcomes: list[Outcome], roles: str) -> None:
    print(f"roles {roles}; GB are 1e9 bytes; seconds are predictions, 'published' were measured by the authors\n")
    titles = ("moved", "nodes", "busiest", "stages", "rounds", "pred. s", "lockstep", "floor s", "plan s")
    columns = f"{'switch':38} " + " ".join(
        f"{t:>{w}}" for t, w in zip(titles, (8, 8, 8, 6, 6, 8, 8, 8, 7), strict=True)
    )
    name = ""
    for o in outcomes:
        if o.case.list_name != name:
            name = o.case.list_name
            said = f", published: {o.case.published_s} s" if o.case.published_s else ""
            print(f"\n{name} ({o.case.topology}{said})\n{columns}  proof")
        sizes = (o.plan.bytes_moved, o.plan.bytes_inter_node, o.plan.busiest_device_bytes)
        gigabytes = " ".join(f"{n / 1e9:8.1f}" for n in sizes)
        seconds = " ".join(f"{s:8.3f}" for s in (o.price.seconds, o.price.lockstep_s, o.price.floor_s))
        print(
            f"{o.case.source + ' → ' + o.case.target:38} {gigabytes} {len(o.plan.stages):6} {o.price.rounds:6} "
            f"{seconds} {o.plan_s:7.3f}  holds {' '.join(o.faults)}"
        )
    wrong = sum(bool(o.faults) for o in outcomes)
    print(f"\n{len(outcomes)} switches planned, proved and priced; {wrong} worse than published or estimated")


if __name__ == "__main__":
    sys.exit(main())
