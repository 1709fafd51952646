"""Load balancing: decide who does what, where several devices could, so that the busiest has little to do.

A request is a piece to send or to receive, and its candidates are the devices that could do it. Requests with the same
candidates are a group. A group is spread over its candidates by water filling: loads are uneven ground, the bytes of
the group are poured on it, and each candidate takes as many as its column of water has. Group after group is taken up
and poured again onto the loads of the others. A pour makes the sum of squared loads as small as this group can, the sum
is convex and the groups are independent, so sweeps lead to its minimum, which is also the profile with the lowest peak;
a plan falls short of it only because pieces are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynajax.types import Bools, Ints
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
        devices: candidates of all requests; those of request ``k`` are ``devices[begin[k]:begin[k] + count[k]]``.
        begin, count: shape (requests,).
        port: which port of the chosen device is used, shape (requests,).
        group: equal for requests with the same port and candidates, shape (requests,).
        volume: elements of the piece, shape (requests,).
    """

    devices: Ints
    begin: Ints
    count: Ints
    port: Ints
    group: _Hashes
    volume: Ints

    @staticmethod
    def of(devices: Ints, begin: Ints, count: Ints, port: Ints, volume: Ints) -> Requests:
        """The requests with their groups; arguments as the attributes."""
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_scattered(devices), dtype=np.uint64)])
        # Port and count are told by a negative number: a positive one could be taken for one more candidate.
        group = running[begin + count] - running[begin] + _scattered(-1 - count * _PORTS - port)
        return Requests(devices, begin, count, port, group, volume)


def balance_load(requests: Sequence[Requests], weights: Sequence[Ints], devices: int) -> list[list[Ints]]:
    """Choose a candidate for every request of every geometry, once for each variant of its route.

    Args:
        requests: of each geometry.
        weights: bytes of an element in each variant of each geometry; a variant makes all requests of its geometry.
        devices: one more than the largest device number.

    Returns:
        For each geometry and variant the number of the chosen candidate of each request, shape (requests,).
    """
    begin, count, port, group, nbytes, table = _joined(requests, weights)
    pick = np.zeros(len(begin), np.int64)
    load = np.zeros(_PORTS * devices, np.int64)
    alone = count == 1
    np.add.at(load, port[alone] * devices + table[begin[alone]], nbytes[alone])
    groups = _groups(group, count, ~alone)
    slots = [port[g[0]] * devices + table[begin[g[0]] : begin[g[0]] + count[g[0]]] for g in groups]
    for sweep in range(_SWEEPS if len(groups) > 1 else 1):
        before = int(load.max(initial=0))
        for members, slot in zip(groups, slots, strict=True):
            if sweep:
                load[slot] -= segment_sum(pick[members], nbytes[members], len(slot))
            pick[members] = water_fill(nbytes[members], load[slot])
            load[slot] += segment_sum(pick[members], nbytes[members], len(slot))
        if sweep and int(load.max(initial=0)) >= before:
            break
    return _parted(pick, requests, weights)


def _joined(requests: Sequence[Requests], weights: Sequence[Ints]) -> tuple[Ints, Ints, Ints, _Hashes, Ints, Ints]:
    """All requests of all variants end to end, a variant after the other, with the bytes of each and one table."""
    tables = np.cumsum([0, *[len(r.devices) for r in requests]])
    variants = [len(w) for w in weights]
    none = np.zeros(0, np.int64)
    begin = np.concatenate(
        [none, *(np.tile(r.begin + t, n) for r, t, n in zip(requests, tables[:-1], variants, strict=True))]
    )
    count, port = (
        np.concatenate([none, *(np.tile(getattr(r, f), n) for r, n in zip(requests, variants, strict=True))])
        for f in ("count", "port")
    )
    group = np.concatenate(
        [np.zeros(0, np.uint64), *(np.tile(r.group, n) for r, n in zip(requests, variants, strict=True))]
    )
    nbytes = np.concatenate(
        [none, *((w[:, None] * r.volume).reshape(-1) for r, w in zip(requests, weights, strict=True))]
    )
    return begin, count, port, group, nbytes, np.concatenate([none, *(r.devices for r in requests)])


def _parted(pick: Ints, requests: Sequence[Requests], weights: Sequence[Ints]) -> list[list[Ints]]:
    """The choices, which lie end to end as ``_joined`` puts requests, by geometry and variant."""
    parts: list[list[Ints]] = []
    start = 0
    for r, w in zip(requests, weights, strict=True):
        size = len(r.begin)
        parts.append([pick[start + k * size : start + (k + 1) * size] for k in range(len(w))])
        start += size * len(w)
    return parts


def _groups(group: _Hashes, count: Ints, chosen: Bools) -> list[Ints]:
    """The chosen requests by group, the groups with the fewest candidates first."""
    index = np.flatnonzero(chosen)
    order = index[np.lexsort((index, group[index], count[index]))]
    borders = np.flatnonzero(np.diff(group[order])) + 1
    return [part for part in np.split(order, borders) if len(part)]


def water_fill(nbytes: Ints, load: Ints) -> Ints:
    """Give pieces to devices so that the largest load stays small.

    Args:
        nbytes: of each piece, shape (pieces,).
        load: bytes that each device has already, shape (devices,).

    Returns:
        The device of each piece, shape (pieces,). Each takes a run of pieces about as long as its column of water.
    """
    order = np.argsort(load, kind="stable")
    middle = np.cumsum(nbytes) - nbytes / 2
    return order[np.minimum(np.searchsorted(_columns(load[order], int(nbytes.sum())), middle), len(load) - 1)]


def _columns(sorted_load: Ints, amount: int) -> Ints:
    """Cumulative bytes of water over devices of ascending load when ``amount`` bytes are poured on them."""
    below = np.arange(1, len(sorted_load) + 1) * sorted_load - np.cumsum(sorted_load)
    wet = int(np.searchsorted(below, amount, side="left")) or 1
    level = (amount + int(sorted_load[:wet].sum())) / wet
    return np.cumsum(np.maximum(level - sorted_load, 0) * (np.arange(len(sorted_load)) < wet))


def _scattered(number: Ints) -> _Hashes:
    """Well mixed 64-bit words of integers (Steele et al., SplitMix, 2014), so that sums of them tell sets apart."""
    word = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
