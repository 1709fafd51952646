"""What programs do to the shards of one geometry, as a value: what stays, and what goes to whom in which round.

Devices are numbered from 0 in the group that talks, so that groups that do alike share their programs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

Shape = tuple[int, ...]
Starts = tuple[Shape, ...]
"""Where a slice begins, for each device; of devices without one, where that of some other begins."""
Pair = tuple[int, int]


@dataclass(frozen=True)
class Slice:
    """A box of shards, or the part of it that is handled at a time.

    Attributes:
        size: of the slice.
        start: of the box.
        along: the dim that the parts of the box lie along, and which of the shifts that the program is given says
            where this part begins; None for the whole box.
    """

    size: Shape
    start: Starts
    along: Pair | None = None


@dataclass(frozen=True)
class Box:
    """A box of a message.

    Attributes:
        read, filled: where it is in the source and in the target; as many elements, in one order.
        slot: for a part of a sum, its place among all parts that a device gets, for each device; it is not written to
            the target then.
    """

    read: Slice
    filled: Slice
    slot: Shape | None = None


@dataclass(frozen=True)
class Message:
    """What some devices send in a round, to one device each, or what stays on them.

    Attributes:
        boxes: what it is made of.
        pairs: sender and receiver of each; none if all stay.
        receivers: devices that it is for.
        chunks: how many chunks it is made of that tables name, instead of boxes.
        added: whether these are added to what is there.
    """

    boxes: tuple[Box, ...]
    pairs: tuple[Pair, ...]
    receivers: Shape
    chunks: int = 0
    added: bool = False


@dataclass(frozen=True)
class Sum:
    """A box of the target that is the sum of parts.

    Attributes:
        filled: where it is.
        receivers: devices that have it.
    """

    filled: Slice
    receivers: Shape


@dataclass(frozen=True)
class Grid:
    """A shard as a grid of equal boxes, one for each device of a group.

    Attributes:
        counts: boxes along each dim.
        order: for each device, which peer each box is for, or from, in row-major order of the grid.
    """

    counts: Shape
    order: Starts


@dataclass(frozen=True)
class Collective:
    """One native collective that is the whole exchange.

    Attributes:
        source: how the source is cut, for an all-to-all; None for an all-gather of whole shards.
        target: how the target is put together.
        part: of boxes that are sent in parts, the dim that these lie along and the length of this one, which begins
            where the first shift says.
    """

    source: Grid | None
    target: Grid
    part: Pair | None = None


@dataclass(frozen=True)
class Exchange:
    """All that the programs of a group do at a time.

    Attributes:
        devices: how many there are.
        source, target: shapes of a shard.
        dtype: name of the machine dtype of the elements.
        messages: what stays, and the rounds; empty if there is a collective.
        collective: what does it all instead.
        chunk: elements of a chunk, if messages are made of chunks.
        sums, parts: boxes to sum, and of how many parts each.
    """

    devices: int
    source: Shape
    target: Shape
    dtype: str
    messages: tuple[Message, ...] = ()
    collective: Collective | None = None
    chunk: int = 0
    sums: tuple[Sum, ...] = ()
    parts: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Worked out once: programs are looked up by it at every call."""
        return hash(tuple(getattr(self, f.name) for f in fields(self)))
