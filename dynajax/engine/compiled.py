"""A compiled move: all that depends on shapes and shardings alone is worked out, and a call only runs it.

The way of every move is: read what is asked for, choose a transport, plan, lower the plan to a program, compile that,
run it on arrays, assemble the result. The calls of ``dynajax.engine.reshard`` go it to where they end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from dynajax.arrays import _jax_private as private
from dynajax.bytesize import format_bytes
from dynajax.engine.check import Comparison
from dynajax.engine.execute import Ownership, execute
from dynajax.engine.memories import Memories, layouts
from dynajax.engine.report import Report, Stopwatch
from dynajax.engine.request import Request, require_data
from dynajax.engine.shared_memory import uninitialised
from dynajax.engine.shared_memory.transport import SharedMemory
from dynajax.engine.stored import ArraySpec
from dynajax.engine.transport import PATHS, Path, Program, Transport
from dynajax.engine.xla import programs
from dynajax.engine.xla.transport import Xla
from dynajax.errors import AgreementError, BudgetError, TargetError
from dynajax.meshes import Topology
from dynajax.planner import Plan, build_plan
from dynajax.processes.consensus import Consensus, Processes

_log = logging.getLogger(__name__)


def chosen(request: Request, path: Path | None, donatable: bool) -> Transport:
    """What carries the bytes of a move: by the given path, or the fastest that the devices allow.

    Args:
        request: the move.
        path: its name; None to choose.
        donatable: whether the next step is to reuse large target shards in place.

    Raises:
        TargetError: there is no such path, or not between these devices.
    """
    memories = Memories.of_request(request)
    shares = memories.are_here and all(device.platform == "cpu" for device in memories.devices)
    if path not in (None, *PATHS):
        raise TargetError(f"the path is {path!r}; give one of {', '.join(map(repr, PATHS))} or None")
    if path == "shared memory" and not shares:
        raise TargetError("the devices are not all CPU devices of this process, so share no memory; use path='xla'")
    if path == "shared memory" or (path is None and shares):
        return SharedMemory(request, memories, donatable)
    return Xla(request, memories)


def planned(transport: Transport, budget: int, ownership: Ownership, topology: Topology | None) -> Plan:
    """The plan of a move, whose stages leave room for what the transport needs beside them.

    Raises:
        BudgetError: the budget cannot hold the smallest stage; names the leaf and the smallest budget that does.
        TargetError: the targets do not fit the state.
        TopologyError: the topology lacks a device or a link.
    """
    request, memories, room = transport.request, transport.memories, transport.room(budget)
    source, target = layouts(request, memories)
    keep = frozenset(row for row, end in enumerate(request.rows) if not request.gives(end))
    # A buffer that is not row-major cannot be one of a row-major array.
    rewritten = frozenset(row for row, leaf in enumerate(request.leaves) if leaf.is_turned)
    links, donate = None if topology is None else memories.links(topology), ownership is Ownership.STAGED
    try:
        plan = build_plan(
            source,
            target,
            budget - room,
            donate,
            topology=links,
            at_once=transport.at_once,
            keep=keep,
            rewritten=rewritten,
        )
    except BudgetError as error:
        if not room:
            raise
        raise BudgetError(f"{error}; beside it the exchange needs {room} bytes ({format_bytes(room)})") from None
    return dataclasses.replace(plan, budget=budget)


@dataclass(frozen=True, eq=False)
class Compiled:
    """A move that only has to be run.

    Between processes each plans for itself, which is no call that others wait for, and may be done in any order. All of
    them then call alike, also those that hold nothing of it; the call finds out first whether they planned the same.

    Attributes:
        plan: what a call does.
        path: what carries the bytes.
        ownership: what becomes of the source of a call.
    """

    plan: Plan
    path: Path
    ownership: Ownership
    _request: Request
    _memories: Memories
    _program: Program

    @staticmethod
    def of(transport: Transport, plan: Plan, ownership: Ownership) -> Compiled:
        """Lower a plan of what the transport moves; ``compile`` has what it needs compiled.

        Raises:
            TargetError: the plan gives up in stages what has to be safe.
            BudgetError: the plan leaves no room for what the transport needs.
        """
        if ownership is Ownership.SAFE and plan.donate:
            raise TargetError("the plan gives the source up in stages; make it with plan_reshard(…, commit='safe')")
        program = transport.lower(plan, plan.budget - plan.peak_extra_bytes)
        return Compiled(plan, transport.path, ownership, transport.request, transport.memories, program)

    def compile(self) -> None:
        """Have XLA compile what a call needs; may run in a thread of its own. It connects nothing.

        Raises:
            BudgetError: XLA says that a program needs more memory than the budget leaves.
        """
        self._processes.prepare()
        self._program.compile()

    def __call__(self, tree: Any, *, check: bool = False, snapshot: str | None = None) -> tuple[Any, Report]:
        """Move arrays like those that the move was planned for.

        Args:
            tree: the state; where this process has no device of an array, a ``jax.ShapeDtypeStruct`` may stand for it.
            check, snapshot: as for ``reshard``.

        Returns:
            The moved tree and a report, as of ``reshard``.

        Raises:
            TargetError: an array is deleted, or unlike what was planned for.
            CheckError, AgreementError, DeadlineError: as ``reshard``.
        """
        watch = Stopwatch()
        with private.own_settings():
            with watch.phase("plan"), Consensus(self._processes) as consensus:
                arrays = self._arrays(tree)
                consensus.on(lambda: self.facts(check))
            return self.run(arrays, watch, check=check, snapshot=snapshot)

    def facts(self, check: bool) -> tuple[Any, ...]:
        """What all processes have to be about to do alike."""
        request = self._request
        weak = [end.like.weak_type for leaf in request.leaves for end in leaf.targets]
        told = [request.paths[k] for k in request.told]
        return self.plan.digest, self.path, self.ownership.value, check, weak, told

    @cached_property
    def _processes(self) -> Processes:
        told = (end.stored.sharding.device_set for end in self._request.told.values())
        return Processes.of(set(self._memories.devices).union(*told))

    def run(self, arrays: Sequence[Any], watch: Stopwatch, *, check: bool, snapshot: str | None) -> tuple[Any, Report]:
        """Run it on the leaves of a state, which are as they were planned for; see ``__call__``."""
        request, safe = self._request, self.ownership is Ownership.SAFE
        comparison = Comparison(arrays, self._memories, self._processes) if check or safe else None
        made = self._told(arrays) if request.told else {}
        made |= execute(
            request,
            self.plan,
            self._program,
            self._memories,
            arrays,
            watch,
            ownership=self.ownership,
            comparison=comparison,
            snapshot=snapshot,
        )
        report = watch.report(
            self.plan,
            bytes_travelled=self._program.bytes_travelled,
            bytes_by_tier=self._bytes_by_tier,
            peak_extra_bytes=self.plan.peak_extra_bytes + self._program.overhead,
            leaves=sum(like is not None for like in request.like),
            path=self.path,
            commit=self.ownership.value,
            snapshot=snapshot,
        )
        _log.info("%s", report.summary())
        leaves = made | {after: arrays[before] for after, before in request.stays.items()}
        return jtu.tree_unflatten(request.after, [leaves[k] for k in range(len(leaves))]), report

    @cached_property
    def _bytes_by_tier(self) -> dict[str, int]:
        return self._memories.by_tier(self.plan)

    def _arrays(self, tree: Any) -> list[Any]:
        """The leaves of a state, waited for."""
        arrays, structure = jtu.tree_flatten(tree)
        request = self._request
        if structure != request.before:
            raise TargetError(f"the move was planned for a tree {request.before} and is given {structure}")
        for path, array, like in zip(request.paths, arrays, request.like, strict=True):
            if like is not None and (found := _unlike(array, like)):
                raise TargetError(f"{path}: the move was planned for {like}, and is given {found}")
        for end in request.sources:
            same = arrays[end.index]
            if private.layout_of(same) != end.layout:
                raise TargetError(f"{request.paths[end.index]}: the move was planned for another memory layout")
            if any(arrays[k] is not same for k in end.repeats):
                raise TargetError(f"{request.paths[end.index]}: the move was planned for one array at several places")
        require_data(request, arrays)
        wait_for(request, arrays)
        return arrays

    def _told(self, arrays: Sequence[Any]) -> dict[int, jax.Array]:
        """Arrays that every process makes of a value of its own.

        Raises:
            AgreementError: the processes have other values.
        """
        values = {k: np.asarray(private.physical(arrays[k])) for k in self._request.told}
        hashes = [np.frombuffer(hashlib.sha256(v.tobytes()).digest()[:8], np.uint32) for v in values.values()]
        heard = self._processes.gather(np.concatenate(hashes)).reshape(-1, len(values), 2)
        for k, of_all in zip(values, heard.transpose(1, 0, 2), strict=True):
            if (of_all != of_all[0]).any():
                raise AgreementError(
                    f"{self._request.paths[k]}: processes have different values; make them equal first"
                )
        return {
            end.index: private.array_of_value(values[k], end.like, end.stored.sharding)
            for k, end in self._request.told.items()
        }


def programs_compiled() -> int:
    """Programs compiled for moves since the process began."""
    return programs.exchanges_compiled() + uninitialised.allocators_compiled()


def wait_for(request: Request, arrays: Sequence[Any]) -> None:
    """Wait for source arrays: what still runs may have collectives, and those of the move must not begin before."""
    jax.block_until_ready([arrays[end.index] for end in request.sources])


def require_same(transport: Transport, plan: Plan) -> None:
    """Raise unless a plan that was made before is one for what a transport moves.

    Raises:
        TargetError: it is for another state or other targets.
    """
    source, target = layouts(transport.request, transport.memories)
    planned = [(m.tensor, m.source.key, m.target.key) for m in plan.moves]
    present = zip(source.space, source.tilings, target.tilings, strict=True)
    arrays = [x and x.key for x in (plan.source_arrays, plan.target_arrays)]
    if planned != [(tensor, before.key, after.key) for tensor, before, after in present] or arrays != [
        x and x.key for x in (source.arrays, target.arrays)
    ]:
        raise TargetError("the plan was made for another state or other targets; make a new one with plan_reshard")
    for move, leaf in zip(plan.moves, transport.request.leaves, strict=True):
        if leaf.is_turned and len(move.kept):
            raise TargetError(
                f"{move.tensor.path}: the plan lets shards stay that are not row-major in memory; make a new one with "
                "plan_reshard, from the arrays"
            )


def _unlike(array: Any, like: ArraySpec) -> str:
    """Why an array cannot be moved as the one that was planned for; empty if it can."""
    if not hasattr(array, "sharding"):
        return f"a {type(array).__name__}"
    found = ArraySpec.of(array)
    return "" if dataclasses.replace(found, weak_type=like.weak_type) == like else str(found)
