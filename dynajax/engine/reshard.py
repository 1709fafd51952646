"""The calls of the engine: plan a move of live state, have it compiled, and carry it out."""

from __future__ import annotations

from typing import Any, Literal

import jax.tree_util as jtu

from dynajax.arrays import _jax_private as private
from dynajax.bytesize import parse_bytes
from dynajax.engine.compiled import Compiled, chosen, planned, programs_compiled, require_same, wait_for
from dynajax.engine.execute import Ownership
from dynajax.engine.report import Report, Stopwatch
from dynajax.engine.request import Request, read, require_data
from dynajax.engine.targets import devices_named
from dynajax.engine.transport import Path, Transport
from dynajax.errors import TargetError
from dynajax.meshes import Topology
from dynajax.planner import Plan
from dynajax.processes.consensus import Consensus, Processes

Commit = Literal["staged", "safe"]

DEFAULT_BUDGET = "64MB"


def plan_reshard(
    tree: Any,
    shardings: Any,
    *,
    budget: int | str = DEFAULT_BUDGET,
    donate: Any = False,
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
    transport = chosen(read(tree, shardings, stored, donate), path, True)
    return _plan(transport, None, budget, commit, topology)[0]


def prepare_reshard(
    tree: Any,
    shardings: Any,
    *,
    plan: Plan | None = None,
    budget: int | str = DEFAULT_BUDGET,
    donate: Any = False,
    commit: Commit = "staged",
    stored: Any = None,
    path: Path | None = None,
    donatable: bool = True,
) -> Compiled:
    """Plan and compile a move, so that calling the result only runs it; may run in a thread of its own.

    A later ``reshard`` of the same move, with the same plan, finds compiled what this has compiled.

    Args:
        tree, shardings, budget, donate, commit, stored, path: as for ``plan_reshard``; no data is needed.
        plan: what ``plan_reshard`` made of them, if that was done; its budget and ``donate`` hold.
        donatable: False for a result that is used and dropped before the next: where memory is shared it then lies as
            it takes the fewest copies, and no step can donate it in place.

    Raises:
        TargetError: the targets do not fit the tree, or the plan is for another state or other targets.
        BudgetError: the budget cannot hold the smallest stage, or what XLA says that programs need.
    """
    with private.own_settings():
        request = read(tree, shardings, stored, donate)
        transport = chosen(request, path, donatable)
        compiled = Compiled.of(transport, *_plan(transport, plan, budget, commit))
        compiled.compile()
    return compiled


def reshard(
    tree: Any,
    shardings: Any,
    *,
    budget: int | str = DEFAULT_BUDGET,
    donate: Any = False,
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
    alike and in the same order, and all return, or raise, alike. What JAX is set to (a mesh, guards, checks of values,
    64 bits) changes nothing.

    Args:
        tree: any pytree of ``jax.Array``; where no device of this process holds a part of one, a
            ``jax.ShapeDtypeStruct`` with its sharding may stand for it. In a job of several processes an array that
            was never put anywhere (``jnp.int32(0)``) is a value that all of them have.
        shardings: a tree of targets, a prefix of one, or one for all, as ``jax.device_put`` takes them: shardings, a
            ``Device``, a ``PartitionSpec`` under the mesh that is set, arrays or ``jax.ShapeDtypeStruct`` with
            shardings; memory kinds are honoured. None leaves an array as it is.
        budget: bytes that a device may hold above its base, as int or text such as ``"64MB"``. The base is what it
            holds before or after the move, whichever is more.
        donate: give up the source: its arrays are deleted, and shards that stay keep their buffers. Without it the
            source stays usable whatever happens to the result. A tree of bools says it for each array.
        commit: when a donated source is given up. ``"staged"``: stage by stage, so that memory stays flat; after an
            error in a later stage the state has to come from a snapshot. ``"safe"``: only when the whole target is
            there and compared with it (as by ``check``); after an error the source is whole.
        snapshot: what to go on from if a staged move fails, such as a checkpoint's folder; errors and reports name it.
        check: replicas of the source must agree, and every array must equal its source as it is handed out.
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
        BudgetError: the budget cannot hold the smallest stage, or what XLA says that programs need.
        CheckError: ``check`` found bytes that differ.
        AgreementError: processes called for different moves; none has begun.
        DeadlineError: another process did not come, or died.
    """
    watch, processes = Stopwatch(), Processes.of(devices_named(tree, shardings))
    with Consensus(processes) as consensus:
        with watch.phase("plan"):
            request = read(tree, shardings, stored, donate)
            arrays = jtu.tree_leaves(tree)
        with private.own_settings():
            with watch.phase("plan"):
                require_data(request, arrays)
                transport = chosen(request, path, True)
                plan, ownership = _plan(transport, plan, budget, commit)
            with watch.phase("group"):
                compiled = Compiled.of(transport, plan, ownership)
            with watch.compiling(programs_compiled):
                compiled.compile()
            wait_for(request, arrays)
        consensus.on(lambda: compiled.facts(check))
    with private.own_settings():
        return compiled.run(arrays, watch, check=check, snapshot=snapshot)


def _plan(
    transport: Transport, plan: Plan | None, budget: int | str, commit: Commit, topology: Topology | None = None
) -> tuple[Plan, Ownership]:
    """The plan of a move, or the one that was made before if it is of that move; and what becomes of the source."""
    ownership = _ownership(transport.request, commit)
    if plan is None:
        return planned(transport, parse_bytes(budget), ownership, topology), ownership
    require_same(transport, plan)
    if ownership is not Ownership.SAFE:
        ownership = Ownership.STAGED if plan.donate else Ownership.KEPT
    return plan, ownership


def _ownership(request: Request, commit: Commit) -> Ownership:
    """What becomes of the source, as the caller says it.

    Raises:
        TargetError: there is no such commit.
    """
    if commit not in ("staged", "safe"):
        raise TargetError(f"commit is {commit!r}; give 'staged' or 'safe'")
    return Ownership(commit) if any(map(request.gives, request.sources)) else Ownership.KEPT
