"""The two calls of the engine: plan a move of live state, and carry it out."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any, Literal

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from dynajax.bytesize import format_bytes, parse_bytes
from dynajax.engine import _jax_private as private
from dynajax.engine.check import check_replicas
from dynajax.engine.execute import execute, give_up, peak_extra
from dynajax.engine.keys import is_key
from dynajax.engine.paths import DEFAULT_BUDGET, Path, checked_path, needed_beside, plan_within, prepare, transport_of
from dynajax.engine.places import Places, layouts
from dynajax.engine.processes import Agreement, Processes
from dynajax.engine.regroup import read
from dynajax.engine.report import Report, Stopwatch
from dynajax.engine.transport import Transport
from dynajax.engine.tree import Held, Leaf
from dynajax.errors import BudgetError, TargetError
from dynajax.meshes import Topology
from dynajax.planner import Plan, build_plan

Commit = Literal["staged", "safe"]

_log = logging.getLogger(__name__)


def plan_reshard(
    tree: Any,
    shardings: Any,
    *,
    budget: int | str = DEFAULT_BUDGET,
    donate: bool = False,
    commit: Commit = "staged",
    stored: Any = None,
    path: Path | None = None,
    topology: Topology | None = None,
) -> Plan:
    """Plan what ``reshard`` would do with the same arguments; needs shapes and shardings, no data.

    Args:
        tree: any pytree of arrays, or of ``jax.ShapeDtypeStruct`` with shardings.
        shardings: targets, as for ``reshard``.
        budget: bytes, or text such as ``"64MB"``.
        donate, commit: whether the source would be given up, and when.
        stored: how the arrays of ``tree`` store their tensors, as for ``reshard``.
        path: what would carry the bytes, as for ``reshard``.
        topology: the links between devices, numbered by their ids; what a node needs then comes to it once and is
            passed on inside. None if all devices are alike.

    Raises:
        TargetError: the targets do not fit the tree; names the paths.
        BudgetError: the budget cannot hold the smallest stage; names the leaf and the smallest budget that does.
        TopologyError: the topology lacks a device or a link.
    """
    leaves, _, _ = read(tree, shardings, stored)
    places = Places.of_leaves(leaves)
    staged = donate and _checked_commit(commit) == "staged"
    unique, path = _without_repeats(leaves, places)[0], checked_path(path, places)
    links = None if topology is None else places.links(topology)
    return plan_within(parse_bytes(budget), unique, places, staged, path, links)


def prepare_reshard(tree: Any, shardings: Any, *, plan: Plan, stored: Any = None, path: Path | None = None) -> None:
    """Compile what ``reshard`` with this plan will need, so that it compiles nothing; may run in a thread of its own.

    Args:
        tree, shardings, stored, path: as for ``plan_reshard``; no data is needed.
        plan: what ``plan_reshard`` made of them.

    Raises:
        TargetError: the plan is for another state or other targets.
    """
    leaves, _, _ = read(tree, shardings, stored)
    places = Places.of_leaves(leaves)
    unique, path = _without_repeats(leaves, places)[0], checked_path(path, places)
    _checked(plan, unique, places, path, safe=False)
    prepare(plan, unique, path, places)


def reshard(
    tree: Any,
    shardings: Any,
    *,
    budget: int | str = DEFAULT_BUDGET,
    donate: bool = False,
    commit: Commit = "staged",
    snapshot: str | None = None,
    check: bool = False,
    plan: Plan | None = None,
    stored: Any = None,
    path: Path | None = None,
) -> tuple[Any, Report]:
    """Move every array of a state to a new sharding, on any devices.

    Values, dtypes, weak types, key types and pytree nodes stay as they are, bit for bit. Leaves that are not jax
    arrays are passed on untouched. If there are devices of several processes among them, all these processes call
    alike and in the same order, and all return, or raise, alike.

    Args:
        tree: any pytree of ``jax.Array``; where no device of this process holds a part of one, a
            ``jax.ShapeDtypeStruct`` with its sharding may stand for it.
        shardings: a tree of shardings or of ``jax.ShapeDtypeStruct`` with shardings, a prefix of one, or one sharding
            for all; memory kinds are honoured.
        budget: bytes that a device may hold above its base, as int or text such as ``"64MB"``. The base is
            max(source, target) with ``donate`` in stages, source + target otherwise.
        donate: give up the source: its arrays are deleted, and shards that stay keep their buffers. Without it the
            source stays usable whatever happens to the result.
        commit: when a donated source is given up. ``"staged"``: stage by stage, so that memory stays flat; after an
            error in a later stage the state has to come from a snapshot. ``"safe"``: only when the whole target is
            there and compared with it (as by ``check``); after an error the source is whole.
        snapshot: what to go on from if a staged move fails, such as a checkpoint's folder; errors and reports name it.
        check: replicas of the source must agree, and every moved byte must equal its source.
        plan: a plan made earlier by ``plan_reshard`` for this state and these targets; its budget and ``donate`` hold.
        stored: a tree of ``Stored`` for arrays that store their tensors padded or in another order, or of ``Bundle``
            for those that store parts of several (as targets may ask for, too); None if every array is its tensor.
            With a ``Bundle`` on either side, ``shardings`` is the whole tree of the result.
        path: what carries the bytes: ``"xla"``, or ``"shared memory"`` (CPU devices of one process), which None
            prefers.

    Returns:
        The moved tree and a report of its time and bytes. Arrays on devices of other processes are without shards here.

    Raises:
        TargetError: the targets do not fit the tree, or a leaf is deleted or abstract.
        BudgetError: the budget cannot hold the smallest stage.
        CheckError: ``check`` found bytes that differ.
        AgreementError: processes called for different moves; none has begun.
        DeadlineError: another process did not come, or died.
    """
    watch, processes = Stopwatch(), Processes.of(tree, shardings)
    with watch.phase("plan"), Agreement(processes) as agreement:
        leaves, all_leaves, treedef = read(tree, shardings, stored)
        _refuse_unusable(leaves)
        places, safe = Places.of_leaves(leaves), donate and _checked_commit(commit) == "safe"
        unique, again = _without_repeats(leaves, places)
        path = checked_path(path, places)
        if plan is None:
            plan = plan_within(parse_bytes(budget), unique, places, donate and not safe, path)
        else:
            _checked(plan, unique, places, path, safe)
        # What still runs may have collectives in it, and those of the move must not begin before they are done.
        jax.block_until_ready([source.array for leaf in leaves for source in leaf.sources])
        agreement.on(lambda chosen=plan: (chosen.digest, path, safe, check, len(again), _weak(leaves)))
    check |= safe
    moved = _move(plan, unique, again, places, processes, path, watch, safe=safe, check=check, snapshot=snapshot)
    for index, array in moved.items():
        all_leaves[index] = array
    report = watch.report(
        plan,
        bytes_by_tier=places.by_tier(plan),
        peak_extra_bytes=peak_extra(plan, needed_beside(path, plan.budget, places, unique)),
        leaves=len(leaves),
        path=path,
        commit="staged" if plan.donate else "safe" if safe else "kept",
        snapshot=snapshot,
    )
    _log.info("%s", report.summary())
    return jtu.tree_unflatten(treedef, all_leaves), report


def _move(
    plan: Plan,
    leaves: list[Leaf],
    again: list[tuple[Leaf, Leaf]],
    places: Places,
    processes: Processes,
    path: Path,
    watch: Stopwatch,
    *,
    safe: bool,
    check: bool,
    snapshot: str | None,
) -> dict[int, jax.Array]:
    """Target arrays by leaf index."""
    transport, share = transport_of(path, places, processes, watch, plan.budget, leaves), plan.donate or safe
    try:
        if check:
            with watch.phase("verify"):
                check_replicas(plan, leaves, places, processes)
        moved = execute(plan, leaves, transport, watch, share=share, check=check, snapshot=snapshot)
        if again:
            moved |= _copies_of(again, moved, places, transport, watch)
    finally:
        transport.close()
    if safe:
        with watch.phase("free"), closing(private.Disowner()) as disowner:
            give_up({source: None for leaf in leaves for source in leaf.sources}, moved.values(), disowner)
    return moved


def _checked(plan: Plan, leaves: list[Leaf], places: Places, path: Path, safe: bool) -> None:
    """Raise if the given plan is not one for these leaves and this way to move them."""
    if safe and plan.donate:
        raise TargetError("the plan gives the source up in stages; make it with plan_reshard(…, commit='safe')")
    source, target = layouts(leaves, places)
    planned = [(m.tensor, m.source.key, m.target.key) for m in plan.moves]
    present = zip(source.space, source.tilings, target.tilings, strict=True)
    arrays = [x and x.key for x in (plan.source_arrays, plan.target_arrays)]
    if planned != [(tensor, before.key, after.key) for tensor, before, after in present] or arrays != [
        x and x.key for x in (source.arrays, target.arrays)
    ]:
        raise TargetError("the plan was made for another state or other targets; make a new one with plan_reshard")
    beside = needed_beside(path, plan.budget, places, leaves)
    if peak_extra(plan, beside) > plan.budget:
        raise BudgetError(
            f"the plan leaves no room in its budget of {format_bytes(plan.budget)} for the {beside} bytes "
            f"that the path {path!r} needs; make it with plan_reshard(…, path={path!r})"
        )


def _checked_commit(commit: Commit) -> Commit:
    if commit not in ("staged", "safe"):
        raise TargetError(f"commit is {commit!r}; give 'staged' or 'safe'")
    return commit


def _refuse_unusable(leaves: list[Leaf]) -> None:
    here = [(leaf, source) for leaf in leaves for source in leaf.sources if source.stored.sharding.addressable_devices]
    for path, array in ((leaf.tensor.path, source.array) for leaf, source in here):
        if not isinstance(array, jax.Array) or isinstance(array, Tracer):
            raise TargetError(f"{path}: the leaf is a {type(array).__name__} without data; give the array itself")
        if array.is_deleted():
            raise TargetError(f"{path}: the array was deleted or donated; give the state that the last step returned")
    first: dict[int, tuple[Held, bool]] = {}
    for leaf, source in ((x, source) for x in leaves for source in x.sources):
        known, alone = first.setdefault(id(source.array), (source, leaf.is_alone))
        if known is not source and not (alone and leaf.is_alone):
            raise TargetError(f"{leaf.tensor.path}: one array is at two places of the state; give each its own copy")


def _weak(leaves: list[Leaf]) -> list[int]:
    """Which leaves have a weak type, of which plans know nothing."""
    return [leaf.index for leaf in leaves if leaf.is_alone and private.is_weak(leaf.array)]


def _without_repeats(leaves: list[Leaf], places: Places) -> tuple[list[Leaf], list[tuple[Leaf, Leaf]]]:
    """Leaves with buffers of their own, and those that repeat one of them, each with its first.

    One array at two places of a tree becomes two arrays, so that the next step can donate both. Several processes have
    to find the same, so between them only one object at two places counts, not arrays that share buffers here.
    """
    identity = _identity if places.are_here else id
    first: dict[object, Leaf] = {}
    unique: list[Leaf] = []
    again: list[tuple[Leaf, Leaf]] = []
    for leaf in leaves:
        known = first.setdefault(identity(leaf.array), leaf) if leaf.is_alone else leaf
        if known is leaf:
            unique.append(leaf)
        else:
            again.append((leaf, known))
    return unique, again


def _identity(array: Any) -> object:
    """Equal for arrays that share buffers."""
    if not isinstance(array, jax.Array) or array.is_deleted() or not array.size:
        return id(array)
    shard = array.addressable_shards[0].data
    if not is_key(array) and next(iter(shard.devices())).platform == "cpu":
        return shard.unsafe_buffer_pointer(), array.shape, array.dtype
    return id(array)


def _copies_of(
    again: list[tuple[Leaf, Leaf]],
    moved: dict[int, jax.Array],
    places: Places,
    transport: Transport,
    watch: Stopwatch,
) -> dict[int, jax.Array]:
    """Arrays of their own for leaves that repeat others, made of the moved first ones."""
    leaves = [Leaf.of(leaf.index, leaf.tensor, moved[known.index], known.target, leaf.target) for leaf, known in again]
    plan = build_plan(*layouts(leaves, places), budget=0, donate=False)
    return execute(plan, leaves, transport, watch, share=False, check=False)
