"""Rounds: in each a device talks to one partner, so that no link is shared and no devices wait for one another in a
circle.

XOR rounds pair device i with i ^ s. The step s has to run to the next power of two: of three devices, 1 and 2 meet only
at s = 3. Absent partners are skipped. Coloured rounds are a greedy colouring of the edges of the graph of devices that
talk, heavy edges first: few rounds, and each of messages of like weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from dynajax.types import Ints


class Pairing(Enum):
    """How the partners of a round are matched."""

    XOR = "xor"
    COLOURS = "colours"


@dataclass(frozen=True, eq=False)
class Rounds:
    """Messages in rounds.

    Attributes:
        sender, receiver: device numbers, one row a message.
        number: round of each message, counted from 0 without gaps.
    """

    sender: Ints
    receiver: Ints
    number: Ints

    @property
    def count(self) -> int:
        """How many rounds there are."""
        return int(self.number.max(initial=-1)) + 1


def xor_rounds(sender: Ints, receiver: Ints) -> Rounds:
    """Messages at step ``sender ^ receiver``; steps without messages are left out."""
    _, number = np.unique(sender ^ receiver, return_inverse=True)
    return Rounds(sender, receiver, number.ravel())


def coloured_rounds(sender: Ints, receiver: Ints, weight: Ints) -> Rounds:
    """Messages in the first round in which neither partner is taken, the heaviest first.

    Both directions of a pair share a round. With d partners at most, a device waits for less than 2·d rounds.

    Args:
        sender, receiver: device numbers, one row a message.
        weight: bytes or time of each message.
    """
    size = 1 + max(int(sender.max(initial=-1)), int(receiver.max(initial=-1)))
    pair, edge = np.unique(np.minimum(sender, receiver) * size + np.maximum(sender, receiver), return_inverse=True)
    heavy = np.zeros(len(pair), weight.dtype)
    np.maximum.at(heavy, edge.ravel(), weight)
    order = np.lexsort((pair, -heavy))
    taken = [0] * size
    colour = np.empty(len(pair), np.int64)
    for k, a, b in zip(order.tolist(), *(end[order].tolist() for end in np.divmod(pair, size)), strict=True):
        free = ~(taken[a] | taken[b])
        first = free & -free
        taken[a] |= first
        taken[b] |= first
        colour[k] = first.bit_length() - 1
    return Rounds(sender, receiver, colour[edge.ravel()])


def rounds_of(pairing: Pairing, sender: Ints, receiver: Ints, weight: Ints) -> Rounds:
    """Messages in rounds of the given kind."""
    if pairing is Pairing.XOR:
        return xor_rounds(sender, receiver)
    return coloured_rounds(sender, receiver, weight)
