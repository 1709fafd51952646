"""What carries out the stages of a plan: the contract, and what every carrier knows of a leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from dynajax.engine import _jax_private as private
from dynajax.engine.places import Places, memory_kind, shards_of
from dynajax.engine.tree import Leaf
from dynajax.planner import Move

Stage = Sequence[tuple[Move, Leaf]]


class Transport(Protocol):
    """Carries out one stage of a plan.

    Attributes:
        name: how reports call it.
        overhead: bytes that each device holds meanwhile beside the shards.
    """

    name: str
    overhead: int

    def run(self, stage: Stage, share: bool) -> list[jax.Array]:
        """The target arrays of a stage; source arrays stay as they are.

        Args:
            stage: what to move.
            share: True if the buffers that stay may be shared with the source (which is then given up); False if
                the target needs buffers, or aliases, of its own.
        """
        ...

    def prepare(self, stage: Stage) -> None:
        """Compile what ``run`` will need; leaves may be without data."""
        ...

    def close(self) -> None:
        """Give back threads and buffers."""
        ...


class Outline:
    """The target shards of one leaf: on which devices, of which shape, and which of them stay.

    Attributes:
        order: devices of this process in target order.
        number: place of each device of the target, of whatever process.
        kept: places whose buffer stays.
        filled: devices whose buffer does not.
        dtype, inner: machine dtype and trailing dims of an element.
        shape: of one physical target shard.
    """

    def __init__(self, move: Move, leaf: Leaf, places: Places) -> None:
        self.move, self.leaf, self._places = move, leaf, places
        self.order = private.device_order(leaf.target.sharding)
        self.number = places.numbers(leaf.target.sharding)
        self.kept = set(move.kept.tolist())
        self.filled = tuple(d for d, n in self.number.items() if n not in self.kept)
        self.dtype, self.inner = private.physical_element(leaf.array.dtype)
        self.shape = (*leaf.target.sharding.shard_shape(leaf.target.array_shape), *self.inner)

    @property
    def is_in_default_memory(self) -> bool:
        """False for targets in a host memory kind."""
        return memory_kind(self.leaf.target.sharding) == next(iter(self.number)).default_memory().kind

    def pieces(self) -> dict[int, jax.Array]:
        """The physical source shard of each place of this process."""
        return shards_of(self.leaf.array, self._places)

    def array(self, buffers: Mapping[int, Any]) -> jax.Array:
        """The target array made of a buffer for each place of this process."""
        goal, mine = self.leaf.target, [buffers[self.number[d]] for d in self.order]
        return private.assemble(goal.array_shape, self.leaf.array, goal.sharding, mine, self.order)
