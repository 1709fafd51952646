"""Levelling: answer open questions so that the busiest device has little to do.

Items with the same candidates are poured on them together, like water on uneven ground. One set after
the other is taken up and poured again on what the others have left. A pour makes the sum of squared
loads as small as this set can, the sum is convex and the sets are independent, so sweeps lead to its
minimum, which is also the profile with the lowest peak; what keeps a plan from it is that pieces are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynajax.types import Bools, Ints
from dynajax.vps.tiling import segment_sum

_SWEEPS = 4
_DUTIES = 3


@dataclass(frozen=True, eq=False)
class Items:
    """Questions with an open answer: which device of a set does it?

    Attributes:
        devices: candidates of all items; those of item ``k`` are ``devices[begin[k]:begin[k] + count[k]]``.
        begin, count: shape (items,).
        duty: which load the answer adds to: 0 sends in the node, 1 sends to other nodes, 2 receives from other nodes.
        group: equal for items with the same duty and candidates.
        volume: elements that the answer adds.
    """

    devices: Ints
    begin: Ints
    count: Ints
    duty: Ints
    group: NDArray[np.uint64]
    volume: Ints

    @staticmethod
    def of(devices: Ints, begin: Ints, count: Ints, duty: Ints, volume: Ints) -> Items:
        """The questions with their groups."""
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_scattered(devices), dtype=np.uint64)])
        group = running[begin + count] - running[begin] + _scattered(count * _DUTIES + duty)
        return Items(devices, begin, count, duty, group, volume)


def level(items: Sequence[Items], weights: Sequence[Ints], devices: int) -> list[list[Ints]]:
    """Answer all items of all lanes together.

    Args:
        items: questions of each geometry.
        weights: bytes of an element in each lane of each geometry.
        devices: one more than the largest device number.

    Returns:
        For each geometry and lane the candidate number that answers each item, shape (items,).
    """
    begin, count, duty, group, nbytes, table = _joined(items, weights)
    pick = np.zeros(len(begin), np.int64)
    load = np.zeros(_DUTIES * devices, np.int64)
    alone = count == 1
    np.add.at(load, duty[alone] * devices + table[begin[alone]], nbytes[alone])
    groups = _groups(group, count, ~alone)
    homes = [duty[g[0]] * devices + table[begin[g[0]] : begin[g[0]] + count[g[0]]] for g in groups]
    for sweep in range(_SWEEPS if len(groups) > 1 else 1):
        before = int(load.max(initial=0))
        for members, home in zip(groups, homes, strict=True):
            if sweep:
                load[home] -= segment_sum(pick[members], nbytes[members], len(home))
            pick[members] = pour(nbytes[members], load[home])
            load[home] += segment_sum(pick[members], nbytes[members], len(home))
        if sweep and int(load.max(initial=0)) >= before:
            break
    return _parted(pick, items, weights)


def _joined(items: Sequence[Items], weights: Sequence[Ints]) -> tuple[Ints, Ints, Ints, NDArray[np.uint64], Ints, Ints]:
    """All items of all lanes end to end, a lane after the other."""
    tables = np.cumsum([0, *[len(i.devices) for i in items]])
    lanes = [len(w) for w in weights]
    none = np.zeros(0, np.int64)
    begin = np.concatenate(
        [none, *(np.tile(i.begin + t, n) for i, t, n in zip(items, tables[:-1], lanes, strict=True))]
    )
    count, duty = (
        np.concatenate([none, *(np.tile(getattr(i, f), n) for i, n in zip(items, lanes, strict=True))])
        for f in ("count", "duty")
    )
    group = np.concatenate([np.zeros(0, np.uint64), *(np.tile(i.group, n) for i, n in zip(items, lanes, strict=True))])
    nbytes = np.concatenate([none, *((w[:, None] * i.volume).reshape(-1) for i, w in zip(items, weights, strict=True))])
    return begin, count, duty, group, nbytes, np.concatenate([none, *(i.devices for i in items)])


def _parted(pick: Ints, items: Sequence[Items], weights: Sequence[Ints]) -> list[list[Ints]]:
    """What ``_joined`` put end to end, apart again."""
    parts: list[list[Ints]] = []
    start = 0
    for i, w in zip(items, weights, strict=True):
        size = len(i.begin)
        parts.append([pick[start + k * size : start + (k + 1) * size] for k in range(len(w))])
        start += size * len(w)
    return parts


def _groups(group: NDArray[np.uint64], count: Ints, chosen: Bools) -> list[Ints]:
    """Items of equal group, the groups with the fewest candidates first."""
    index = np.flatnonzero(chosen)
    order = index[np.lexsort((index, group[index], count[index]))]
    borders = np.flatnonzero(np.diff(group[order])) + 1
    return [part for part in np.split(order, borders) if len(part)]


def pour(nbytes: Ints, load: Ints) -> Ints:
    """Give pieces of ``nbytes`` to holders that have ``load`` so that the largest load stays small.

    Water is poured on the loads until all bytes are in; each holder takes a run of pieces as long as its column.
    """
    order = np.argsort(load, kind="stable")
    middle = np.cumsum(nbytes) - nbytes / 2
    return order[np.minimum(np.searchsorted(_poured(load[order], int(nbytes.sum())), middle), len(load) - 1)]


def _poured(sorted_load: Ints, amount: int) -> Ints:
    """Cumulative bytes that each holder takes when ``amount`` is poured on ascending loads."""
    below = np.arange(1, len(sorted_load) + 1) * sorted_load - np.cumsum(sorted_load)
    wet = int(np.searchsorted(below, amount, side="left")) or 1
    level = (amount + int(sorted_load[:wet].sum())) / wet
    return np.cumsum(np.maximum(level - sorted_load, 0) * (np.arange(len(sorted_load)) < wet))


def _scattered(number: Ints) -> NDArray[np.uint64]:
    """Well mixed 64-bit words of integers (Steele et al., SplitMix, 2014), so that sums of them tell sets apart."""
    word = number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
