"""Run a compiled move on arrays: the targets made stage by stage, the sources given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Any, Self

import jax

from dynajax.arrays import _jax_private as private
from dynajax.engine.check import Comparison
from dynajax.engine.memories import Memories, shards_of
from dynajax.engine.report import Stopwatch
from dynajax.engine.request import Leaf, Request
from dynajax.engine.stored import Endpoint
from dynajax.engine.transport import Filling, Program
from dynajax.planner import Move, Plan


class Ownership(Enum):
    """What becomes of the source."""

    KEPT = "kept"
    """It stays usable, whatever is done with the result."""
    STAGED = "staged"
    """What the caller gives up is let go stage by stage, so that memory stays flat."""
    SAFE = "safe"
    """What the caller gives up is let go when the whole target is there and compared with it."""


def execute(
    request: Request,
    plan: Plan,
    program: Program,
    memories: Memories,
    arrays: Sequence[Any],
    watch: Stopwatch,
    *,
    ownership: Ownership,
    comparison: Comparison | None,
    snapshot: str | None,
) -> dict[int, jax.Array]:
    """Target arrays by their place among the leaves of the result.

    Args:
        request, plan, program, memories: the move.
        arrays: leaves of the state.
        watch: where the time goes.
        ownership: what becomes of the source.
        comparison: compares what is moved with its source, if asked to.
        snapshot: what an error names to go on from.
    """
    if ownership is Ownership.SAFE:
        gives = {end for end in request.sources if request.gives(end)}
    else:
        gives = {end for row, end in enumerate(request.rows) if row not in plan.keep}
    unread = Counter({end: end.tensors for end in request.sources})
    made: dict[int, jax.Array] = {}
    with private.Disowner() as disowner, _Remains(plan, snapshot) as remains:
        filling = program.start(arrays, watch)
        run = _Run(memories, arrays, filling, gives)
        try:
            if comparison is not None:
                with watch.phase("verify"):
                    comparison.replicas(list(zip(plan.moves, request.leaves, strict=True)))
            for number, stage in enumerate(plan.stages):
                moves = [(plan.moves[k], request.leaves[k]) for k in stage]
                whole = run.stage(number, moves, watch)
                if comparison is not None:
                    with watch.phase("verify"):
                        jax.block_until_ready(list(whole.values()))
                        comparison.stage(moves, whole)
                made |= {end.index: array for end, array in whole.items()}
                unread.subtract(end for _, leaf in moves for end in leaf.sources)
                if ownership is Ownership.STAGED:
                    with watch.phase("free"):
                        done = gives.intersection(end for _, leaf in moves for end in leaf.sources if not unread[end])
                        _let_go(done, arrays, made.values(), disowner)
                        disowner.commit()
                        remains.stages_done += 1
            with watch.phase("move"):
                jax.block_until_ready(list(made.values()))
        finally:
            filling.close()
        if ownership is Ownership.SAFE:
            with watch.phase("free"):
                _let_go(gives, arrays, made.values(), disowner)
    return made


def _let_go(
    ends: Iterable[Endpoint], arrays: Sequence[Any], made: Iterable[jax.Array], disowner: private.Disowner
) -> None:
    """Delete source arrays, but for those that are targets themselves.

    Their buffers are let go, not destroyed: those that stay live on in the target, and those that an array outside
    the state shares live on there.
    """
    stay = {id(array) for array in made}
    for end in ends:
        for array in {id(arrays[k]): arrays[k] for k in (end.index, *end.repeats)}.values():
            if isinstance(array, jax.Array) and id(array) not in stay:
                disowner.disown(private.physical(array))


class _Run:
    """Makes arrays of the shards that a program fills, and of those that stay.

    Args:
        memories: what the numbers of the plan mean.
        arrays: leaves of the state.
        filling: the program at work.
        gives: source arrays that are given up, whose shards the target may share.
    """

    def __init__(
        self, memories: Memories, arrays: Sequence[Any], filling: Filling, gives: Collection[Endpoint]
    ) -> None:
        self._memories, self._arrays, self._filling, self._gives = memories, arrays, filling, gives
        self._owner: dict[int, Endpoint] = {}

    def stage(self, number: int, moves: Sequence[tuple[Move, Leaf]], watch: Stopwatch) -> dict[Endpoint, jax.Array]:
        """The target arrays that are whole after a stage."""
        filled = self._filling.fill(number)
        with watch.phase("unpack"):
            kept = {leaf.targets[0]: (move, leaf) for move, leaf in moves if len(move.kept)}
            return {end: self._array(end, dict(shards), kept.get(end)) for end, shards in filled.items()}

    def _array(self, end: Endpoint, shards: dict[int, Any], kept: tuple[Move, Leaf] | None) -> jax.Array:
        if kept is not None:
            move, leaf = kept
            held = shards_of(self._arrays[leaf.sources[0].index], self._memories)
            shards |= self._stay({n: held[n] for n in move.kept.tolist() if n in held}, leaf.sources[0], end)
        stored, number = end.stored, self._memories.numbers(end.stored.sharding)
        order = private.device_order(stored.sharding)
        return private.assemble(
            stored.array_shape, end.like, stored.sharding, [shards[number[d]] for d in order], order
        )

    def _stay(self, shards: dict[int, jax.Array], source: Endpoint, target: Endpoint) -> dict[int, Any]:
        """The shards that stay, or copies: of what is not given up, and of a buffer that some other target shares."""
        others: list[int] = []
        for n, shard in shards.items():
            (pointer,) = private.pointers(shard) or (id(shard),)
            # Shards of one array may share a buffer, as those that JAX makes of one numpy array do.
            owner = self._owner.setdefault(pointer, target)
            if source not in self._gives or owner is not target:
                others.append(n)
        return shards | dict(zip(others, self._filling.copies([shards[n] for n in others]), strict=True))


class _Remains:
    """Notes on an error what is left of a source that is given up stage by stage."""

    def __init__(self, plan: Plan, snapshot: str | None) -> None:
        self._stages, self._snapshot = len(plan.stages), snapshot
        self.stages_done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.stages_done:
            error.add_note(
                f"{self.stages_done} of {self._stages} stages were done and their part of the source is given up: "
                f"go on from {self._snapshot or 'a checkpoint'}; with commit='safe' the source would be whole"
            )
