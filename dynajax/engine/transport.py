"""What carries the bytes of a plan: a way through memory that is shared, or one of XLA programs.

A transport makes of a plan a program, which knows no data. Started on arrays, the program fills what they move to,
stage by stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import jax

from dynajax.engine.memories import Memories
from dynajax.engine.report import Stopwatch
from dynajax.engine.request import Request
from dynajax.engine.stored import Endpoint
from dynajax.planner import Plan

Path = Literal["shared memory", "xla"]
PATHS: tuple[Path, ...] = ("shared memory", "xla")

Shards = Mapping[int, Any]
"""The shards of an array by the number of their memory: arrays of one device, or of numpy."""


class Transport(Protocol):
    """A way to carry bytes.

    Attributes:
        request: what is moved.
        memories: what the numbers of plans mean.
        path: its name.
        at_once: bytes that a stage of several tensors had better not exceed on all devices together; None for any.
    """

    @property
    def request(self) -> Request:
        """See above."""
        ...

    @property
    def memories(self) -> Memories:
        """See above."""
        ...

    @property
    def path(self) -> Path:
        """See above."""
        ...

    @property
    def at_once(self) -> int | None:
        """See above."""
        ...

    def room(self, budget: int) -> int:
        """Bytes of a budget that it needs on every device beside the shards."""
        ...

    def lower(self, plan: Plan, room: int) -> Program:
        """What carries out a plan with so much room.

        Raises:
            BudgetError: the room is too small; names a budget that does.
        """
        ...


class Program(Protocol):
    """What carries out a plan.

    Attributes:
        overhead: bytes that it needs on a device beside the shards.
        bytes_travelled: bytes that cross from device to device, padding included.
    """

    @property
    def overhead(self) -> int:
        """See above."""
        ...

    @property
    def bytes_travelled(self) -> int:
        """See above."""
        ...

    def compile(self) -> None:
        """Have all that it needs compiled; may run in a thread of its own.

        Raises:
            BudgetError: XLA says that a program needs more memory than there is room for.
        """
        ...

    def start(self, arrays: Sequence[Any], watch: Stopwatch) -> Filling:
        """Begin to carry it out.

        Args:
            arrays: leaves of the state.
            watch: where the time goes.
        """
        ...


class Filling(Protocol):
    """A program being carried out."""

    def fill(self, stage: int) -> dict[Endpoint, Shards]:
        """Fill what a stage fills.

        Returns:
            The shards, of this process, of the arrays that are whole now, without those that stay where they are. They
            may still be on their way, as results of jax are; the next stage allocates nothing before they are there.
        """
        ...

    def copies(self, shards: Sequence[jax.Array]) -> list[Any]:
        """Shards of their own with what is in some that stay; their source is not given up."""
        ...

    def close(self) -> None:
        """Give back threads and buffers."""
        ...
