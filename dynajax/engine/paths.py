"""What may carry the bytes of a move, which suits its devices, and plans that leave room for what it needs."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dynajax.bytesize import format_bytes
from dynajax.engine import shared_memory, xla
from dynajax.engine.places import Places, layouts
from dynajax.engine.processes import Processes
from dynajax.engine.recipe import Recipes
from dynajax.engine.report import Stopwatch
from dynajax.engine.shared_memory import SharedMemory
from dynajax.engine.transport import Transport
from dynajax.engine.tree import Leaf
from dynajax.errors import BudgetError, TargetError
from dynajax.meshes import Topology
from dynajax.planner import Plan, build_plan

DEFAULT_BUDGET = "64MB"
Path = Literal["shared memory", "xla"]
PATHS: tuple[Path, ...] = ("shared memory", "xla")


def checked_path(path: Path | None, places: Places) -> Path:
    """The path to take: the given one, or the fastest that the devices allow."""
    share_memory = places.are_here and all(device.platform == "cpu" for device in places.devices)
    if path is None:
        return "shared memory" if share_memory else "xla"
    if path not in PATHS:
        raise TargetError(f"the path is {path!r}; give one of {', '.join(map(repr, PATHS))} or None")
    if path == "shared memory" and not share_memory:
        raise TargetError("the devices are not all CPU devices of this process, so share no memory; use path='xla'")
    return path


def transport_of(
    path: Path,
    places: Places,
    processes: Processes,
    watch: Stopwatch,
    budget: int,
    leaves: list[Leaf],
    recipes: Recipes | None = None,
) -> Transport:
    """What carries the bytes by a path; see ``Xla`` and ``SharedMemory``."""
    return xla.Xla(places, processes, watch, budget, leaves) if path == "xla" else SharedMemory(places, watch, recipes)


def prepare(plan: Plan, leaves: list[Leaf], path: Path, places: Places, recipes: Recipes | None = None) -> None:
    """Compile what carrying out a plan needs, so that nothing is compiled then; connects nothing."""
    processes = Processes(places.devices)
    processes.prepare()
    transport = transport_of(path, places, processes, Stopwatch(), plan.budget, leaves, recipes)
    try:
        for stage in plan.stages:
            transport.prepare([(plan.moves[k], leaves[k]) for k in stage])
    finally:
        transport.close()


def plan_within(
    budget: int, leaves: list[Leaf], places: Places, donate: bool, path: Path, topology: Topology | None = None
) -> Plan:
    """A plan whose stages leave room in the budget for what the path needs beside them.

    Raises:
        BudgetError: the budget cannot hold both.
    """
    beside = needed_beside(path, budget, places, leaves)
    try:
        at_once = None if path == "xla" else shared_memory.AT_ONCE
        plan = build_plan(*layouts(leaves, places), budget - beside, donate, topology=topology, at_once=at_once)
    except BudgetError as error:
        if not beside:
            raise
        raise BudgetError(f"{error}; beside it the exchange needs {beside} bytes ({format_bytes(beside)})") from None
    return dataclasses.replace(plan, budget=budget)


def with_fit_budget(plan: Plan, path: Path, leaves: list[Leaf], places: Places) -> Plan:
    """A plan of a move that keeps its source, with no more budget than it is quicker for: buckets travel whole."""
    if path != "xla":
        return plan
    longest = int(plan.traffic.nbytes.max(initial=0))
    return dataclasses.replace(plan, budget=min(plan.budget, xla.enough(longest, len(places.devices), leaves)))


def needed_beside(path: Path, budget: int, places: Places, leaves: list[Leaf]) -> int:
    """Bytes that a path needs on every device beside the shards."""
    return xla.overhead(budget, len(places.devices), leaves) if path == "xla" else 0
