"""The two calls of the engine: plan a move of live state, and carry it out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from dynajax.bytesize import parse_bytes
from dynajax.engine.bundles import Bundles
from dynajax.engine.check import check_replicas
from dynajax.engine.device_put import DevicePut
from dynajax.engine.execute import execute
from dynajax.engine.keys import is_key
from dynajax.engine.places import Places, layouts
from dynajax.engine.regroup import read
from dynajax.engine.report import Report, Stopwatch
from dynajax.engine.shared_memory import SharedMemory, Transport
from dynajax.engine.tree import Held, Leaf
from dynajax.errors import TargetError
from dynajax.planner import Plan, build_plan

DEFAULT_BUDGET = "64MB"


def plan_reshard(
    tree: Any,
    shardings: Any,
    *,
    budget: int | str = DEFAULT_BUDGET,
    donate: bool = False,
    stored: Any = None,
) -> Plan:
    """Plan what ``reshard`` would do with the same arguments; needs shapes and shardings, no data.

    Args:
        tree: any pytree of arrays, or of ``jax.ShapeDtypeStruct`` with shardings.
        shardings: targets, as for ``reshard``.
        budget: bytes, or text such as ``"64MB"``.
        donate: whether the source would be given up.
        stored: how the arrays of ``tree`` store their tensors, as for ``reshard``.

    Raises:
        TargetError: the targets do not fit the tree; names the paths.
        BudgetError: the budget cannot hold the smallest stage; names the leaf and the smallest budget that does.
    """
    leaves, _, _ = read(tree, shardings, stored)
    return _plan(_without_repeats(leaves)[0], _places(leaves), parse_bytes(budget), donate)


def prepare_reshard(tree: Any, shardings: Any, *, plan: Plan, stored: Any = None) -> None:
    """Compile what ``reshard`` with this plan will need, so that it compiles nothing; may run in a thread of its own.

    Args:
        tree, shardings, stored: as for ``plan_reshard``; no data is needed.
        plan: what ``plan_reshard`` made of them.

    Raises:
        TargetError: the plan is for another state or other targets.
    """
    leaves, _, _ = read(tree, shardings, stored)
    unique, places = _without_repeats(leaves)[0], _places(leaves)
    _checked(plan, unique, places)
    transport, bundles = _transport(places, Stopwatch()), Bundles(places, Stopwatch())
    try:
        for pairs in ([(plan.moves[k], unique[k]) for k in stage] for stage in plan.stages):
            transport.prepare([(move, leaf) for move, leaf in pairs if leaf.is_alone])
            bundles.prepare([(move, leaf) for move, leaf in pairs if not leaf.is_alone])
    finally:
        transport.close()


def reshard(
    tree: Any,
    shardings: Any,
    *,
    budget: int | str = DEFAULT_BUDGET,
    donate: bool = False,
    check: bool = False,
    plan: Plan | None = None,
    stored: Any = None,
) -> tuple[Any, Report]:
    """Move every array of a state to a new sharding, on any devices of this process.

    Values, dtypes, weak types, key types and pytree nodes stay as they are, bit for bit. Leaves that are not jax
    arrays are passed on untouched.

    Args:
        tree: any pytree of ``jax.Array``.
        shardings: a tree of shardings or of ``jax.ShapeDtypeStruct`` with shardings, a prefix of one, or one sharding
            for all; memory kinds are honoured.
        budget: bytes that a device may hold above its base, as int or text such as ``"64MB"``. The base is
            max(source, target) with ``donate``, source + target without.
        donate: give up the source: its arrays are deleted, and shards that stay keep their buffers. Without it the
            source stays usable whatever happens to the result.
        check: replicas of the source must agree, and every moved byte must equal its source.
        plan: a plan made earlier by ``plan_reshard`` for this state and these targets; its budget and ``donate`` hold.
        stored: a tree of ``Stored`` for arrays that store their tensors padded or in another order, or of ``Bundle``
            for those that store parts of several (as targets may ask for, too); None if every array is its tensor.
            With a ``Bundle`` on either side, ``shardings`` is the whole tree of the result.

    Returns:
        The moved tree and a report of its time and bytes.

    Raises:
        TargetError: the targets do not fit the tree, or a leaf is deleted, abstract or on devices of another process.
        BudgetError: the budget cannot hold the smallest stage.
        CheckError: ``check`` found bytes that differ.
    """
    watch = Stopwatch()
    with watch.phase("plan"):
        leaves, all_leaves, treedef = read(tree, shardings, stored)
        unique, again = _without_repeats(leaves)
        _refuse_unusable(leaves)
        places = _places(leaves)
        plan = _plan(unique, places, parse_bytes(budget), donate) if plan is None else _checked(plan, unique, places)
    jax.block_until_ready([leaf.array for leaf in leaves])
    if check:
        with watch.phase("verify"):
            check_replicas(plan, unique, places)
    moved, peak_extra = _run(plan, unique, places, watch, check)
    if again:
        moved |= _copies_of(again, moved, places, watch)
    for index, array in moved.items():
        all_leaves[index] = array
    return jtu.tree_unflatten(treedef, all_leaves), watch.report(plan, peak_extra, len(leaves))


def _plan(leaves: list[Leaf], places: Places, budget: int, donate: bool) -> Plan:
    return build_plan(*layouts(leaves, places), budget, donate)


def _checked(plan: Plan, leaves: list[Leaf], places: Places) -> Plan:
    """The given plan, if it is one for these leaves."""
    source, target = layouts(leaves, places)
    planned = [(m.tensor, m.source.key, m.target.key) for m in plan.moves]
    present = zip(source.space, source.tilings, target.tilings, strict=True)
    arrays = [x and x.key for x in (plan.source_arrays, plan.target_arrays)]
    if planned != [(tensor, before.key, after.key) for tensor, before, after in present] or arrays != [
        x and x.key for x in (source.arrays, target.arrays)
    ]:
        raise TargetError("the plan was made for another state or other targets; make a new one with plan_reshard")
    return plan


def _run(
    plan: Plan, leaves: list[Leaf], places: Places, watch: Stopwatch, check: bool
) -> tuple[dict[int, jax.Array], int]:
    transport = _transport(places, watch)
    try:
        return execute(plan, leaves, transport, watch, places, check)
    finally:
        transport.close()


def _transport(places: Places, watch: Stopwatch) -> Transport:
    share_memory = all(device.platform == "cpu" for device, _ in places.places)
    return SharedMemory(places, watch) if share_memory else DevicePut(watch)


def _places(leaves: Iterable[Leaf]) -> Places:
    return Places.of(end.stored.sharding for leaf in leaves for end in (*leaf.sources, *leaf.targets))


def _refuse_unusable(leaves: list[Leaf]) -> None:
    for path, array in ((leaf.tensor.path, source.array) for leaf in leaves for source in leaf.sources):
        if not isinstance(array, jax.Array) or isinstance(array, Tracer):
            raise TargetError(f"{path}: the leaf is a {type(array).__name__} without data; give the array itself")
        if array.is_deleted():
            raise TargetError(f"{path}: the array was deleted or donated; give the state that the last step returned")
    for leaf in leaves:
        if not all(end.stored.sharding.is_fully_addressable for end in (*leaf.sources, *leaf.targets)):
            raise TargetError(f"{leaf.tensor.path}: source and target must be on devices of this process")
    first: dict[int, tuple[Held, bool]] = {}
    for leaf, source in ((x, source) for x in leaves for source in x.sources):
        known, alone = first.setdefault(id(source.array), (source, leaf.is_alone))
        if known is not source and not (alone and leaf.is_alone):
            raise TargetError(f"{leaf.tensor.path}: one array is at two places of the state; give each its own copy")


def _without_repeats(leaves: list[Leaf]) -> tuple[list[Leaf], list[tuple[Leaf, Leaf]]]:
    """Leaves with buffers of their own, and those that repeat one of them, each with its first.

    One array at two places of a tree becomes two arrays, so that the next step can donate both.
    """
    first: dict[object, Leaf] = {}
    unique: list[Leaf] = []
    again: list[tuple[Leaf, Leaf]] = []
    for leaf in leaves:
        known = first.setdefault(_identity(leaf.array), leaf) if leaf.is_alone else leaf
        if known is leaf:
            unique.append(leaf)
        else:
            again.append((leaf, known))
    return unique, again


def _identity(array: Any) -> object:
    """Equal for arrays that share buffers."""
    if not isinstance(array, jax.Array) or array.is_deleted() or not array.size or not array.is_fully_addressable:
        return id(array)
    shard = array.addressable_shards[0].data
    if not is_key(array) and next(iter(shard.devices())).platform == "cpu":
        return shard.unsafe_buffer_pointer(), array.shape, array.dtype
    return id(array)


def _copies_of(
    again: list[tuple[Leaf, Leaf]], moved: dict[int, jax.Array], places: Places, watch: Stopwatch
) -> dict[int, jax.Array]:
    """Arrays of their own for leaves that repeat others, made of the moved first ones."""
    leaves = [Leaf.of(leaf.index, leaf.tensor, moved[known.index], known.target, leaf.target) for leaf, known in again]
    plan = build_plan(*layouts(leaves, places), budget=0, donate=False)
    return _run(plan, leaves, places, watch, check=False)[0]
