"""From two layouts and a budget to a plan: diff, choose sources, order in stages."""

from __future__ import annotations

import numpy as np

from dynajax.errors import LayoutError
from dynajax.meshes import Topology
from dynajax.planner.diff import diff, unchanged_devices
from dynajax.planner.plan import Move, Plan, distinct_routes
from dynajax.planner.sources.choose import Geometry, choose_sources
from dynajax.planner.stages.footprint import Granularity
from dynajax.planner.stages.packed import pack_stages
from dynajax.planner.stages.shards import Allocations, Shards, plan_stages
from dynajax.types import Ints
from dynajax.vps.tiling import Arrays, Layout, Tiling, segment_sum


def build_plan(
    source: Layout,
    target: Layout,
    budget: int,
    donate: bool = True,
    *,
    topology: Topology | None = None,
    granularity: Granularity = Granularity.SHARDS,
    at_once: int | None = None,
    keep: frozenset[int] = frozenset(),
    rewritten: frozenset[int] = frozenset(),
) -> Plan:
    """The plan of a move between two layouts of one space.

    Args:
        source, target: who holds what before and after; device numbers mean the same in both.
        budget: bytes a device may hold above its base.
        donate: whether the source is given up as the move goes on.
        topology: the links between the devices; None if all are alike, in one node.
        granularity: the unit in which devices free memory.
        at_once: bytes that a stage of several tensors may allocate on all devices together, if shards are freed whole;
            None for any.
        keep: rows of the source's arrays (of its tensors, if each has one of its own) that are not given up all the
            same.
        rewritten: rows of tensors whose buffers never stay as they are, even where nothing else changes.

    Raises:
        LayoutError: the layouts are of different spaces, the source lacks what the target needs, or the target is
            partial.
        BudgetError: the budget cannot hold the smallest stages.
        TopologyError: the topology lacks a device or a link.
    """
    _require_one_space(source, target)
    devices = max(source.num_devices, target.num_devices, 1)
    disjoint = granularity is Granularity.PACKED or (topology is not None and topology.num_nodes > 1)
    members = _by_geometry(source, target, rewritten)
    sizes = [t.itemsize for t in source.space]
    geometries = [
        Geometry(
            diff(before, after, disjoint=disjoint or before.partial),
            unchanged_devices(before, after) if alone else np.empty(0, np.int64),
            [sizes[k] for k in rows],
        )
        for before, after, alone, rows in members
    ]
    moves: list[Move | None] = [None] * len(sizes)
    for (*_, rows), routes in zip(members, choose_sources(geometries, devices, topology), strict=True):
        for k, route in zip(rows, routes, strict=True):
            moves[k] = Move(source.space.tensors[k], route)
    made = tuple(m for m in moves if m is not None)
    if granularity is Granularity.PACKED:
        return _packed(made, devices, budget, donate, topology)
    keep = keep if donate else frozenset(range(len(sizes) if source.arrays is None else len(source.arrays.tensors)))
    allocations = _allocations(made, source.arrays, target.arrays, devices, keep)
    stages = plan_stages(allocations, budget, [t.path for t in source.space], at_once)
    arrays = source.arrays, target.arrays
    return Plan(made, stages, budget, donate, allocations.footprint(stages), granularity, topology, *arrays, keep)


def _require_one_space(source: Layout, target: Layout) -> None:
    if source.space is not target.space and source.space != target.space:
        raise LayoutError("source and target are layouts of different spaces")


def _packed(moves: tuple[Move, ...], devices: int, budget: int, donate: bool, topology: Topology | None) -> Plan:
    """The plan of stages that cut pieces; a stage lists the tensors that have a slice in it."""
    routes = distinct_routes(moves)
    source, target = (
        sum(
            (segment_sum(t.holder, t.region.volumes, devices) * size for t, size in tilings),
            np.zeros(devices, np.int64),
        )
        for tilings in ([(r.source, size) for r, size in routes], [(r.target, size) for r, size in routes])
    )
    staged, footprint = pack_stages(routes, source, target, budget, donate)
    of_route = {id(route): k for k, (route, _) in enumerate(routes)}
    members: list[list[int]] = [[] for _ in routes]
    for k, move in enumerate(moves):
        members[of_route[id(move.route)]].append(k)
    moves = tuple(Move(m.tensor, staged[of_route[id(m.route)]]) for m in moves)
    stages: list[set[int]] = [set()]
    for route, rows in zip(staged, members, strict=True):
        present = np.unique(route.stages_of_pieces()) if len(route.lo) else np.zeros(1, np.int64)
        stages += [set() for _ in range(int(present[-1]) + 1 - len(stages))]
        for s in present.tolist():
            stages[s].update(rows)
    return Plan(moves, tuple(tuple(sorted(s)) for s in stages), budget, donate, footprint, Granularity.PACKED, topology)


def _by_geometry(
    source: Layout, target: Layout, rewritten: frozenset[int]
) -> list[tuple[Tiling, Tiling, bool, list[int]]]:
    """Group the tensors whose moves are alike.

    Returns:
        For each group: its source tiling, its target tiling, whether its tensors have arrays of their own that
        are not rewritten (so that their buffers may stay), and the rows of its tensors in the space.
    """
    shared = rewritten.union(*(x.arrays.shared for x in (source, target) if x.arrays is not None))
    found: dict[tuple[bytes, bytes, bool], tuple[Tiling, Tiling, bool, list[int]]] = {}
    for k, (before, after) in enumerate(zip(source.tilings, target.tilings, strict=True)):
        alone = k not in shared
        found.setdefault((before.key, after.key, alone), (before, after, alone, []))[-1].append(k)
    return list(found.values())


def _allocations(
    moves: tuple[Move, ...], source: Arrays | None, target: Arrays | None, devices: int, keep: frozenset[int]
) -> Allocations:
    """Bytes that every tensor allocates and frees on every device; tensors of one route are counted once."""
    counts: dict[int, tuple[np.ndarray, ...]] = {}
    rows: list[tuple[np.ndarray, ...]] = []
    for move in moves:
        key = id(move.route)
        if key not in counts:
            before, after = move.source.elements(devices), move.target.elements(devices)
            kept = np.zeros_like(after)
            kept[move.kept] = after[move.kept]
            counts[key] = before, after, kept
        rows.append(counts[key])
    size = np.asarray([m.tensor.itemsize for m in moves], np.int64)[:, None]
    before, after, kept = (
        np.asarray([r[k] for r in rows], np.int64).reshape(len(rows), devices) * size for k in range(3)
    )
    given = np.ones(len(moves) if source is None else len(source.tensors), bool)
    given[list(keep)] = False
    # A buffer that stays serves both sides only if the source gives it up; else the target has a copy.
    owners = np.arange(len(moves)) if source is None else [source.owner(k) for k in range(len(moves))]
    kept = kept * given[owners, None]
    return Allocations(_shards(before, kept, source), _shards(after, kept, target), len(moves), given)


def _shards(nbytes: Ints, kept: Ints, arrays: Arrays | None) -> Shards:
    if arrays is None:
        return Shards(nbytes, kept)
    held = np.zeros((len(arrays.tensors), nbytes.shape[1]), np.int64)
    held[:, : arrays.nbytes.shape[1]] = arrays.nbytes
    # A buffer stays only where a tensor has an array of its own, before and after; of others nothing is kept.
    stay = [kept[rows[0]] for rows in arrays.tensors]
    return Shards(held, np.stack(stay), arrays.tensors)
