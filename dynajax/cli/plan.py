"""``dynajax plan``: a switch without devices: what it moves, in which stages, at what price, and a proof."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dynajax.bytesize import format_bytes, parse_bytes
from dynajax.cli.plan_state import JobState, StateParts
from dynajax.meshes import Placement, Topology
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
    worth_it,
)
from dynajax.planner.cost.primitives import operations

_WIDTH_WITHOUT_TERMINAL = 110
_BETWEEN_PLACEMENTS = re.compile(r",(?=\s*(?:\d+\*)?[A-Za-z])")
"""A comma that no device number follows."""


@dataclass(frozen=True)
class PlanOptions:
    """Plan, price and prove a switch of strategy without any device.

    The state is float32 master weights and two Adam moments, flat over the data ranks (ZeRO-1), unless options
    say more.
    """

    source: Annotated[str, tyro.conf.arg(name="from")] = "tp8.pp4.dp1"
    """Placement that runs: a strategy, such as tp8.pp4 or, of several pipelines, tp8|2*tp4; with its devices, if they
    are not the first: tp8@8-15."""
    target: Annotated[str, tyro.conf.arg(name="to")] = "tp8.pp4.dp2"
    """Placement to switch to, whose ranks are as written if it names devices; several, separated by commas, are ranked
    by price and the cheapest is shown."""
    model: str = "llama2-70b"
    """Model preset."""
    topology: str = "a800-16x8"
    """Cluster: a name (a800-16x8, h100, pcie4, machine, tpu-v5p) or a TOML file."""
    budget: str = "2GB"
    """Bytes a device may hold above the larger of its source and target."""
    roles: Literal["assigned", "fixed"] = "assigned"
    """Whether devices may take other ranks of the target so that less moves; fixed: device k plays rank k."""
    together: Literal["groups", "tp"] = "groups"
    """What assigned ranks keep on one node: groups that talk in every layer (of tensors, context, experts), or those of
    tensors alone: less moves, but experts of one group may then lie on two nodes."""
    memory: Literal["packed", "shards"] = "packed"
    """What is freed at once. packed: a piece, an analysis of what a framework with an allocator of its own could do;
    shards: a whole shard, which is how dynajax moves arrays of jax."""
    master: Literal["flat", "none"] = "flat"
    """The float32 master weights: flat over the data ranks, or none."""
    moments: Literal["flat", "replicated", "none"] = "flat"
    """The Adam moments: flat over the data ranks, replicated over them, or none."""
    weights: bool = False
    """Move the bfloat16 weights too; by default they are recast from the master after the switch."""
    gradients: bool = False
    """Move float32 gradients too."""
    saves: float = 0.0
    """Seconds that the new strategy saves per step; with --steps says whether the switch is worth it."""
    steps: int = 0
    """Steps that the new strategy will run."""
    verify: bool = False
    """Prove the plan: coverage, single writes, exact addresses, least bytes, peak."""
    html: str | None = None
    """File for a self-contained page with charts (needs plotly)."""
    json: bool = False
    """Print one JSON object on standard output."""


@dataclass(frozen=True, eq=False)
class PlannedSwitch:
    """A planned switch.

    Attributes:
        target: placement.
        plan: how to get there.
        price: what it costs.
        plan_s: seconds that layouts, rank mapping, plan and price took.
    """

    target: Placement
    plan: Plan
    price: Price
    plan_s: float


def run(options: PlanOptions) -> int:
    """Do what ``options`` ask for, print it, and return the exit status.

    Raises:
        DynajaxError: the options do not fit together, or the switch is impossible.
    """
    state = JobState.of(options.model, _parts(options))
    switches = sorted(plan_switches(state, options), key=lambda s: s.price.seconds)
    best = switches[0]
    if options.verify:
        verify(best.plan)
    if options.html:
        from dynajax.cli.plan_page import write_page

        write_page(options.html, best.plan, best.price, facts(options, state, best))
    if options.json:
        print(json.dumps(record(options, state, switches)))
    else:
        _show(options, state, switches)
    return 0


def _parts(options: PlanOptions) -> StateParts:
    return StateParts(options.master, options.moments, options.weights, options.gradients)


def plan_switches(state: JobState, options: PlanOptions) -> list[PlannedSwitch]:
    """A plan for each target of the options."""
    source, texts = Placement.parse(options.source), _BETWEEN_PLACEMENTS.split(options.target)
    targets = [Placement.parse(text) for text in texts]
    topology = _topology(options.topology, 1 + max(max(p.devices) for p in (source, *targets)))
    budget, granularity = parse_bytes(options.budget), Granularity(options.memory)
    switches: list[PlannedSwitch] = []
    for text, target in zip(texts, targets, strict=True):
        start = time.perf_counter()
        before, after = state.layout(source), state.layout(target)
        if options.roles == "assigned" and "@" not in text:
            pool = np.union1d(source.devices, target.devices)
            after = renumbered(after, assign_ranks(before, after, topology, pool, _unit(options, target, topology)))
        plan = build_plan(before, after, budget, topology=topology, granularity=granularity)
        cost = price_plan(plan)
        switches.append(PlannedSwitch(target, plan, cost, time.perf_counter() - start))
    return switches


def _unit(options: PlanOptions, target: Placement, topology: Topology) -> int | None:
    """How many consecutive ranks stay on one node."""
    sizes = {pipeline.size("tp") for pipeline in target.strategy.pipelines}
    if options.together == "tp" and len(sizes) == 1:
        return sizes.pop()
    return coupled_ranks(target.strategy, topology)


def _topology(cluster: str, devices: int) -> Topology:
    """The cluster with just the nodes that the job needs; whole nodes, so that ranks can move inside them."""
    known = Topology.load(cluster, devices)
    whole = int((known.node == known.node[0]).sum())
    return Topology.load(cluster, -(-devices // whole) * whole) if devices > whole else known


def record(options: PlanOptions, state: JobState, switches: list[PlannedSwitch]) -> dict[str, Any]:
    """What ``--json`` prints: the cheapest switch, and what every target costs."""
    plan, cost = switches[0].plan, switches[0].price
    return {
        "model": options.model,
        "from": options.source,
        "to": str(switches[0].target),
        "devices": [Placement.parse(options.source).num_devices, switches[0].target.num_devices],
        "bytes_total": state.space.nbytes,
        "bytes_retained": plan.bytes_retained,
        "bytes_moved": plan.bytes_moved,
        "bytes_lower_bound": plan.bytes_lower_bound,
        "bytes_inter_node": plan.bytes_inter_node,
        "bytes_inter_node_lower_bound": plan.bytes_inter_node_lower_bound,
        "busiest_device_bytes": plan.busiest_device_bytes,
        "peak_bytes": max(plan.peak_bytes()),
        "peak_extra_bytes": plan.peak_extra_bytes,
        "budget_bytes": plan.budget,
        "stages": len(plan.stages),
        "rounds": cost.rounds,
        "predicted_s": cost.seconds,
        "lockstep_s": cost.lockstep_s,
        "floor_s": cost.floor_s,
        "bytes_by_tier": dict(cost.bytes_by_tier),
        "assumptions": list(cost.assumptions),
        "worth_it": _worth(options, cost),
        "ranking": [
            {"to": str(s.target), "predicted_s": s.price.seconds, "bytes_moved": s.plan.bytes_moved} for s in switches
        ],
        "plan_s": switches[0].plan_s,
        "roles": options.roles,
        "memory": options.memory,
        "topology": options.topology,
        "digest": plan.digest,
        "verified": options.verify or None,
    }


def _worth(options: PlanOptions, cost: Price) -> bool | None:
    if not options.saves or not options.steps:
        return None
    return worth_it(cost, options.saves, options.steps)


def facts(options: PlanOptions, state: JobState, switch: PlannedSwitch) -> dict[str, str]:
    """What there is to say about a switch, name by name."""
    plan, cost = switch.plan, switch.price
    moved, total = plan.bytes_moved, max(plan.bytes_needed, 1)
    rows = {
        "switch": f"{options.model}, {options.source} → {switch.target}, {options.topology}, roles {options.roles}",
        "state": f"{format_bytes(state.space.nbytes)} in {len(state.space)} tensors",
        "kept": f"{format_bytes(plan.bytes_retained)} ({plan.bytes_retained / total:.1%})",
        "moved": f"{format_bytes(moved)} (lower bound {format_bytes(plan.bytes_lower_bound)})",
        "across nodes": f"{format_bytes(plan.bytes_inter_node)} (lower bound "
        f"{format_bytes(plan.bytes_inter_node_lower_bound)})",
        "busiest device": format_bytes(plan.busiest_device_bytes),
        "peak of a device": f"{format_bytes(max(plan.peak_bytes()))}, {format_bytes(plan.peak_extra_bytes)} above its "
        f"base of a budget of {format_bytes(plan.budget)}",
        "stages, rounds": f"{len(plan.stages)}, {cost.rounds}",
        "predicted": f"{cost.seconds:.3f} s; {cost.lockstep_s:.3f} s in lockstep; busiest link {cost.floor_s:.3f} s",
        "planned in": f"{switch.plan_s:.3f} s",
        "proof": "coverage, single writes, addresses, least bytes, peak: all hold"
        if options.verify
        else "not asked for",
    }
    worth = _worth(options, cost)
    if worth is not None:
        saved = options.saves * options.steps
        rows["worth it"] = f"{'yes' if worth else 'no'}: saves {saved:.3g} s over {options.steps} steps"
    return rows


def _show(options: PlanOptions, state: JobState, switches: list[PlannedSwitch]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_WITHOUT_TERMINAL)
    table = Table(show_header=False, box=SIMPLE_HEAD)
    for name, fact in facts(options, state, switches[0]).items():
        table.add_row(name, fact)
    console.print(table)
    if len(switches) > 1:
        ranking = Table("to", "predicted s", "moved", "across nodes", box=SIMPLE_HEAD)
        for s in switches:
            moved, across = format_bytes(s.plan.bytes_moved), format_bytes(s.plan.bytes_inter_node)
            ranking.add_row(str(s.target), f"{s.price.seconds:.3f}", moved, across)
        console.print(ranking)
    console.print(_links(switches[0].price))
    console.print(_primitives(switches[0].plan))
    console.print("assumed:", *(f"\n- {line}" for line in switches[0].price.assumptions), markup=False, soft_wrap=True)


def _links(cost: Price) -> Table:
    table = Table("link", "bytes", box=SIMPLE_HEAD)
    for name, nbytes in cost.bytes_by_tier.items():
        table.add_row(name, format_bytes(nbytes))
    return table


def _primitives(plan: Plan) -> Table:
    table = Table("primitive", "groups", "messages", "bytes", box=SIMPLE_HEAD)
    found = operations(plan)
    for kind in dict.fromkeys(o.primitive for o in found):
        mine = [o for o in found if o.primitive is kind]
        table.add_row(
            kind.value, str(len(mine)), str(sum(o.messages for o in mine)), format_bytes(sum(o.nbytes for o in mine))
        )
    return table
