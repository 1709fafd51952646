"""How long plans take: whole states on thousands of devices, and of small states.

    python benchmarks/planner.py [--repeats 5] [--json]

A case is timed from the shapes of a model's tensors to the finished plan: both layouts, the ranks, the diff, the
sources, the stages, the rounds and the price. Nothing is kept between repeats. Ratios are to the limit of the case,
which is the baseline here; below 1 is within it. Memory is the largest resident size of the process so far, which has
to stay under 2 GB. Then switches of bf16 weights are scheduled on paper: collectives one after another, the largest
message of each summed (critical), and what the busiest device sends or receives. The exit status is 1 if a median is
over its limit, or critical bytes are over 1.05 times those of the busiest device.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from dynajax.cli.plan_state import JobState, StateParts
from dynajax.meshes import Strategy, Topology
from dynajax.planner import Granularity, Plan, assign_ranks, build_plan, coupled_ranks, price_plan, renumbered
from dynajax.planner.cost.schedule import Schedule, scheduled
from dynajax.vps import Layout, Space, Tensor, mesh_tiling

P = PartitionSpec
BUDGET = 2**31
AMPLE = 2**60
MOST_RESIDENT = 2 * 10**9


@dataclass(frozen=True)
class Cluster:
    """A switch of a whole state on a cluster, and the seconds it may take to plan."""

    model: str
    source: str
    target: str
    limit_s: float


CLUSTERS = (
    Cluster("llama2-70b", "tp8.pp8.dp16", "tp4.pp8.dp32", 0.3),
    Cluster("llama2-70b", "tp8.pp8.dp8", "tp8.pp8.dp16", 0.3),
    Cluster("llama2-70b", "tp8.pp4.dp32", "tp8.pp16.dp8", 0.3),
    Cluster("qwen3-235b-a22b", "tp4.pp8.dp32/ep16", "tp4.pp8.dp32/ep8", 1.0),
    Cluster("qwen3-235b-a22b", "tp4.pp16.dp16/ep16", "tp8.pp8.dp16/ep32", 1.0),
    Cluster("llama2-70b", "tp8.pp8.dp128", "tp4.pp8.dp256", 5.0),
    Cluster("llama2-70b", "tp8.pp8.dp64", "tp8.pp8.dp128", 5.0),
)


SWITCHES = (
    ("fsdp128.tp8", "fsdp256.tp4"),
    ("fsdp1024", "fsdp128.tp8"),
    ("fsdp256.tp4", "fsdp32.tp32"),
    ("fsdp128.tp4", "fsdp128.tp8"),
    ("dp16.fsdp8.tp8", "dp32.fsdp8.tp4"),
)
"""Of a 70B model, on 1,024 devices after."""
MOST_CRITICAL = 1.05


@dataclass(frozen=True)
class OnPaper:
    """A switch of weights, scheduled."""

    case: str
    schedule: Schedule
    busiest: int

    @property
    def ratio(self) -> float:
        """Critical bytes over those of the busiest device."""
        return self.schedule.critical_bytes / max(self.busiest, 1)


def on_paper(source: str, target: str) -> OnPaper:
    """Plan and schedule a switch of the weights of a 70B model."""
    state = JobState.of("llama2-70b", StateParts(master="none", moments="none", weights=True))
    plan = build_plan(state.layout(Strategy.parse(source)), state.layout(Strategy.parse(target)), AMPLE)
    return OnPaper(f"{source} to {target}", scheduled(plan), plan.busiest_device_bytes)


@dataclass(frozen=True)
class Row:
    """Seconds of a case, and what its plan is like."""

    case: str
    limit_s: float
    seconds: list[float]
    ranks_s: float
    plan: Plan

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


def cluster_row(case: Cluster, repeats: int) -> Row:
    """Time a switch on a cluster."""
    state = JobState.of(case.model, StateParts())
    source, target = Strategy.parse(case.source), Strategy.parse(case.target)
    devices = max(source.num_devices, target.num_devices)
    seconds: list[float] = []
    plan, ranks_s = None, 0.0
    for _ in range(repeats):
        topology = Topology.load("h100", devices)
        start = time.perf_counter()
        before, after = state.layout(source), state.layout(target)
        begin_ranks = time.perf_counter()
        unit = coupled_ranks(target, topology)
        after = renumbered(after, assign_ranks(before, after, topology, np.arange(devices), unit))
        ranks_s = time.perf_counter() - begin_ranks
        plan = build_plan(before, after, BUDGET, topology=topology, granularity=Granularity.PACKED)
        price_plan(plan)
        seconds.append(time.perf_counter() - start)
    assert plan is not None
    return Row(f"{case.model} {case.source} to {case.target}, {devices} devices", case.limit_s, seconds, ranks_s, plan)


def small_state(leaves: int) -> Callable[[], tuple[Layout, Layout]]:
    """Layouts of a state of many leaves on 8 devices, made anew at each call."""
    few: list[tuple[int, ...]] = [(512, 512), (64, 32), (128,), (8, 16, 4), (16,)]
    shapes = few if leaves < 1000 else [few[-1]] * 99 + few[:1]
    space = Space(tuple(Tensor(f"w{k:05d}", shapes[k % len(shapes)], "float32", 4) for k in range(leaves)))

    def layouts() -> tuple[Layout, Layout]:
        made: list[Layout] = []
        for first, last in ((P("x"), False), (P("y"), True)):
            tilings = {
                s: mesh_tiling(s, {"x": 4, "y": 2}, P(*[None] * (len(s) - 1), "y") if last else first, np.arange(8))
                for s in set(shapes)
            }
            made.append(Layout(space, tuple(tilings[t.shape] for t in space)))
        return made[0], made[1]

    return layouts


def small_row(leaves: int, limit_s: float, repeats: int) -> Row:
    """Time a state of many leaves."""
    layouts = small_state(leaves)
    seconds: list[float] = []
    plan = None
    for _ in range(repeats):
        source, target = layouts()
        start = time.perf_counter()
        plan = build_plan(source, target, AMPLE)
        seconds.append(time.perf_counter() - start)
    assert plan is not None
    return Row(f"{leaves} leaves, 8 devices", limit_s, seconds, 0.0, plan)


def main() -> int:
    """Time all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [cluster_row(case, options.repeats) for case in CLUSTERS]
    rows += [small_row(100, 0.01, options.repeats), small_row(5000, 0.5, options.repeats)]
    switches = [on_paper(*ends) for ends in SWITCHES]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.json:
        print(json.dumps(_record(rows, switches, resident)))
    else:
        _show(rows, switches, resident)
    long = any(s.ratio > MOST_CRITICAL for s in switches)
    return int(any(r.median > r.limit_s for r in rows) or resident > MOST_RESIDENT or long)


def _record(rows: list[Row], switches: list[OnPaper], resident: int) -> dict[str, Any]:
    return {
        "machine": {"system": platform.system(), "python": platform.python_version(), "peak_resident_bytes": resident},
        "cases": [
            {
                "case": r.case,
                "method": "plan",
                "ratio": {name: f(r.seconds) / r.limit_s for name, f in _STATISTICS.items()},
                "seconds_median": r.median,
                "peak_extra_bytes": r.plan.peak_extra_bytes,
                "limit_s": r.limit_s,
                "ranks_s": r.ranks_s,
            }
            for r in rows
        ],
        "on_paper": [
            {
                "case": s.case,
                "collectives": s.schedule.collectives,
                "critical_bytes": s.schedule.critical_bytes,
                "busiest_device_bytes": s.busiest,
            }
            for s in switches
        ],
    }


_STATISTICS: dict[str, Callable[[list[float]], float]] = {"min": min, "median": statistics.median, "max": max}


def _show(rows: list[Row], switches: list[OnPaper], resident: int) -> None:
    print(f"{'case':74} {'limit s':>8} {'min':>8} {'median':>8} {'max':>8} {'ranks':>7} {'pieces':>8} {'stages':>6}")
    for r in rows:
        pieces = sum(len(route.lo) for route, _ in r.plan.routes)
        times = " ".join(f"{f(r.seconds):8.4f}" for f in _STATISTICS.values())
        mark = "" if r.median <= r.limit_s else "  over"
        print(f"{r.case:74} {r.limit_s:8.4f} {times} {r.ranks_s:7.3f} {pieces:8} {len(r.plan.stages):6}{mark}")
    print(f"largest resident size {resident / 1e9:.2f} GB\n")
    print(f"{'70B weights, on paper':34} {'collectives':>11} {'critical GB':>11} {'busiest GB':>10} {'ratio':>6}")
    for s in switches:
        critical, busiest = s.schedule.critical_bytes / 1e9, s.busiest / 1e9
        print(f"{s.case:34} {s.schedule.collectives:11} {critical:11.3f} {busiest:10.3f} {s.ratio:6.3f}")


if __name__ == "__main__":
    sys.exit(main())
