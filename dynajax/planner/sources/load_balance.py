"""Load balancing: decide who does what, where several devices could, so that the busiest has little to do.

A request is a piece to send or to receive, and its candidates are the devices that could do it. Requests with the same
candidates are a group. A group is spread over its candidates by water filling: loads are uneven ground, the bytes of
the group are poured on it, and each candidate takes as many as its column of water has. Groups without a device in
common are poured at once; group after group is taken up and poured again onto the loads of the others. A pour makes the
sum of squared loads as small as this group can, the sum is convex and the groups are independent, so sweeps lead to its
minimum, which is also the profile with the lowest peak; it falls short of it only because pieces are whole.

Loads are those of one route, since programs carry out one route at a time: if each is level, so are the stages that are
made of them. Between candidates that are equal in a route, the one that copies least from itself there is chosen, so
that who keeps something need not send as well; then the one with the least to do in the routes before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dynajax.types import Ints
from dynajax.vps.algebra import expand
from dynajax.vps.tiling import segment_sum

SEND_IN_NODE, SEND_ABROAD, RECEIVE_ABROAD = range(3)
"""Ports of a device. Each has a load of its own: abroad is what leaves or enters the node."""
_PORTS = 3
_SWEEPS = 4

_Hashes = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Requests:
    """Pieces to send or to receive, each with the devices that could do it.

    Attributes:
        devices: candidates of all requests; those of request ``k`` are ``devices[begin[k]:begin[k] + count[k]]``,
            ascending.
        begin, count: shape (requests,).
        port: which port of the chosen device is used, shape (requests,).
        group: equal for requests with the same port and candidates, shape (requests,).
        volume: elements of the piece, shape (requests,).
        receiver: device that the piece is for, shape (requests,).
        own: devices and elements of what they copy from themselves, shape (2, copies).
    """

    devices: Ints
    begin: Ints
    count: Ints
    port: Ints
    group: _Hashes
    volume: Ints
    receiver: Ints
    own: Ints

    @staticmethod
    def of(devices: Ints, begin: Ints, count: Ints, port: Ints, volume: Ints, receiver: Ints, own: Ints) -> Requests:
        """The requests with their groups; arguments as the attributes."""
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_scattered(devices), dtype=np.uint64)])
        # Port and count are told by a negative number: a positive one could be taken for one more candidate.
        group = running[begin + count] - running[begin] + _scattered(-1 - count * _PORTS - port)
        return Requests(devices, begin, count, port, group, volume, receiver, own)

    @cached_property
    def groups(self) -> tuple[Ints, Ints]:
        """The requests with a choice, group by group, those with the fewest candidates first; and the first of each.

        In a group those for one device follow one another, so that it is sent one message and not several.
        """
        index = np.flatnonzero(self.count > 1)
        order = index[np.lexsort((self.receiver[index], self.group[index], self.count[index]))]
        group = self.group[order]
        return order, np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(order)])


def balance_load(requests: Sequence[Requests], weights: Sequence[Ints], devices: int) -> list[list[Ints]]:
    """Choose a candidate for every request of every geometry, once for each variant of its route.

    Args:
        requests: of each geometry.
        weights: bytes of an element in each variant of each geometry; a variant makes all requests of its geometry.
        devices: one more than the largest device number.

    Returns:
        For each geometry and variant the number of the chosen candidate of each request, shape (requests,).
    """
    before = np.zeros(_PORTS * devices, np.int64)
    return [
        [_choose(r, before, weight, devices) for weight in w.tolist()] for r, w in zip(requests, weights, strict=True)
    ]


def _choose(requests: Requests, before: Ints, weight: int, devices: int) -> Ints:
    """The choices for one route, whose bytes are added to what devices did ``before``, shape (ports · devices,)."""
    pick = np.zeros(len(requests.begin), np.int64)
    alone = requests.count == 1
    slots = requests.port[alone] * devices + requests.devices[requests.begin[alone]]
    load = segment_sum(slots, requests.volume[alone], _PORTS * devices)
    pours = list(_pours(requests, devices))
    if pours:
        own = np.tile(segment_sum(requests.own[0], requests.own[1], devices), _PORTS)
        peak = None
        for sweep in range(_SWEEPS if len(pours) > 1 else 1):
            for pour in pours:
                if sweep:
                    load -= pour.load(pick, len(load))
                pick[pour.request] = pour.fill(load, own, before)
                load += pour.load(pick, len(load))
            if peak is not None and int(load.max()) >= peak:
                break
            peak = int(load.max())
    before += load * weight
    return pick


def _pours(requests: Requests, devices: int) -> Iterator[_Pour]:
    """All groups, those without a device and port in common together."""
    order, first = requests.groups
    if not len(order):
        return
    heads, sizes = order[first], np.diff(first, append=len(order))
    group, at = expand(requests.begin[heads], requests.begin[heads] + requests.count[heads])
    slot = requests.port[heads][group] * devices + requests.devices[at]
    of_request = np.repeat(np.arange(len(first)), sizes)
    turn = np.zeros(len(first), np.int64)
    if len(np.unique(slot)) < len(slot):
        last = np.full(_PORTS * devices, -1)
        for k, mine in enumerate(np.split(slot, np.flatnonzero(np.diff(group)) + 1)):
            turn[k] = last[mine] = last[mine].max() + 1
    for now in range(int(turn.max()) + 1):
        number = np.cumsum(turn == now) - 1
        mine, some = (turn == now)[group], (turn == now)[of_request]
        request = order[some]
        yield _Pour(slot[mine], number[group[mine]], request, number[of_request[some]], requests.volume[request])


@dataclass(frozen=True, eq=False)
class _Pour:
    """Groups that share no slot, that is no port of a device.

    Attributes:
        slot, group: the candidates, group by group.
        request, group_of_request: the requests, group by group.
        volume: of each request.
    """

    slot: Ints
    group: Ints
    request: Ints
    group_of_request: Ints
    volume: Ints

    @cached_property
    def _first(self) -> Ints:
        return np.flatnonzero(np.diff(self.group, prepend=-1))

    def load(self, pick: Ints, slots: int) -> Ints:
        """What the requests put on each slot if request ``k`` is given to its candidate number ``pick[k]``."""
        return segment_sum(self.slot[self._first[self.group_of_request] + pick[self.request]], self.volume, slots)

    def fill(self, load: Ints, *ties: Ints) -> Ints:
        """The number of the candidate of each request; ``load`` and ``ties`` are of all slots."""
        at = water_fill(self.volume, self.group_of_request, self.group, load[self.slot], *(t[self.slot] for t in ties))
        return at - self._first[self.group_of_request]


def water_fill(nbytes: Ints, group: Ints, group_of_device: Ints, load: Ints, *ties: Ints) -> Ints:
    """Give the pieces of each group to its devices so that the largest load stays small.

    Args:
        nbytes, group: of each piece, group by group, shape (pieces,). There are pieces and devices of every group.
        group_of_device: whose pieces each device takes, group by group, shape (devices,).
        load: bytes that each device has already, shape (devices,).
        ties: between devices of equal load the one with the least of the first comes first, then of the second.

    Returns:
        The row of the device of each piece, shape (pieces,). Each takes a run of pieces about as long as its column of
        water; if the pieces of a group are alike, as many as if one by one had been given to the least loaded.
    """
    groups = int(group[-1]) + 1 if len(group) else 0
    order = np.lexsort((*reversed(ties), load, group_of_device))
    begin, amount, pieces = (np.zeros(groups, np.int64), segment_sum(group, nbytes, groups), np.bincount(group))
    begin[1:] = np.cumsum(np.bincount(group_of_device, minlength=groups))[:-1]
    ground, of = load[order], group_of_device[order]
    place = np.arange(len(order)) - begin[of]
    under = _running(ground, begin, of)
    # Water stands on the lowest devices, on no more than there are pieces; heights are multiplied by their number.
    wet = segment_sum(of, ((place + 1) * ground - under < amount[of]).astype(np.int64), groups)
    wet = np.maximum(np.minimum(wet, pieces), 1)
    level = amount + under[begin + wet - 1]
    column = np.where(place < wet[of], np.maximum(level[of] - wet[of] * ground, 0), 0)
    column = _whole_pieces(column, nbytes, group, of, wet, ground, *(tie[order] for tie in ties))
    # Twice the water up to each device, and up to the middle of each piece; all groups in a row.
    start = np.cumsum(2 * wet * amount) - 2 * wet * amount
    first = np.cumsum(pieces) - pieces
    water = start[of] + 2 * _running(column, begin, of)
    middle = start[group] + wet[group] * (2 * _running(nbytes, first, group) - nbytes)
    return order[np.clip(np.searchsorted(water, middle), begin[group], (begin + wet - 1)[group])]


def _whole_pieces(column: Ints, nbytes: Ints, group: Ints, of: Ints, wet: Ints, ground: Ints, *ties: Ints) -> Ints:
    """Columns of whole pieces, where the pieces of a group are alike: rounded down, and what is left to the lowest."""
    pieces = np.bincount(group)
    size = nbytes[np.cumsum(pieces) - pieces]
    alike = (segment_sum(group, (nbytes != size[group]).astype(np.int64), len(pieces)) == 0) & (size > 0)
    unit = np.where(alike, wet * size, 1)[of]
    count = column // unit
    left = pieces - segment_sum(of, count, len(pieces))
    dry = column == 0
    lowest = np.lexsort((*reversed(ties), ground + count * size[of], dry, of))
    place = np.arange(len(of)) - np.searchsorted(of, of)
    more = np.empty(len(of), np.int64)
    more[lowest] = place < left[of]
    return np.where(alike[of], (count + more) * unit, column)


def _running(values: Ints, begin: Ints, of: Ints) -> Ints:
    """Running sums within groups that begin at ``begin``."""
    total = np.cumsum(values)
    return total - (total - values)[begin][of] if len(values) else total


def _scattered(number: Ints) -> _Hashes:
    """Well mixed 64-bit words of integers (Steele et al., SplitMix, 2014), so that sums of them tell sets apart."""
    word = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
