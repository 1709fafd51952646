"""Edge colouring: messages in rounds in which every device sends at most one and receives at most one.

Devices as senders and devices as receivers are the two sides of a bipartite graph, so as many rounds do as the busiest
device has messages on one side (König, 1916). An edge takes the lowest colour that is free at both ends; where none
is, the two colours of an alternating path change places.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dynajax.types import Ints


def coloured(sender: Ints, receiver: Ints) -> Ints:
    """The round of each message, counted from 0; no more rounds than the largest number of messages at one end.

    Args:
        sender, receiver: device numbers, one row a message; pairs may repeat, and a device may send to itself.
    """
    (senders, s), (receivers, r) = (np.unique(end, return_inverse=True) for end in (sender, receiver))
    degree = max(int(np.bincount(end.ravel()).max(initial=0)) for end in (s, r))
    graph = _Graph(list(zip(s.ravel().tolist(), r.ravel().tolist(), strict=True)))
    out, into = ([(1 << degree) - 1] * len(devices) for devices in (senders, receivers))
    for edge, (a, b) in enumerate(graph.ends):
        both = out[a] & into[b]
        colour = both & -both
        if not both:
            colour, other = out[a] & -out[a], into[b] & -into[b]
            side, last = graph.exchange(b, colour, other)
            into[b] ^= colour | other
            (out, into)[side][last] ^= colour | other
        graph.add(edge, colour)
        out[a] ^= colour
        into[b] ^= colour
    return np.asarray([colour.bit_length() - 1 for colour in graph.colours], np.int64)


@dataclass
class _Graph:
    """Edges with their colours, a colour being one bit.

    Attributes:
        ends: sender and receiver of each edge.
        colours: of each edge so far.
        at: for each side, the edge of each end and colour.
    """

    ends: list[tuple[int, int]]
    colours: list[int] = field(default_factory=list)
    at: tuple[dict[tuple[int, int], int], ...] = field(default_factory=lambda: ({}, {}))

    def add(self, edge: int, colour: int) -> None:
        """Give the next edge its colour."""
        self.colours.append(colour)
        for side, end in enumerate(self.ends[edge]):
            self.at[side][end, colour] = edge

    def exchange(self, receiver: int, colour: int, other: int) -> tuple[int, int]:
        """Swap two colours along the path of them that begins at a receiver; gives the side and end where it ends."""
        path: list[int] = []
        side, end, now, then = 1, receiver, colour, other
        while (end, now) in self.at[side]:
            path.append(self.at[side][end, now])
            side, now, then = 1 - side, then, now
            end = self.ends[path[-1]][side]
        for edge in path:
            for k, at in enumerate(self.ends[edge]):
                del self.at[k][at, self.colours[edge]]
        for edge in path:
            self.colours[edge] ^= colour | other
            for k, at in enumerate(self.ends[edge]):
                self.at[k][at, self.colours[edge]] = edge
        return side, end
