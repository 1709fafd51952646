"""Route: one source for every needed piece: the device itself, else the holder that has least to send."""

from __future__ import annotations

import numpy as np

from dynajax.planner.diff import Demand
from dynajax.vps.region import Ints
from dynajax.vps.tiling import Tiling


def choose_sources(demand: Demand, source: Tiling, itemsize: int, load: Ints) -> Ints:
    """The source row that serves each need, shape (needs,).

    Needs of atoms with the same holders are levelled together: the holders with least to send get the next bytes.

    Args:
        demand: what is needed.
        source: the source tiling.
        itemsize: bytes of an element.
        load: bytes that each device sends so far; updated in place.
    """
    row = demand.own_row.copy()
    sent = np.flatnonzero(row < 0)
    nbytes = (demand.hi[sent] - demand.lo[sent]).prod(axis=1, dtype=np.int64) * itemsize
    for atom in np.unique(demand.atom[sent]).tolist():
        needs = demand.atom[sent] == atom
        holders = demand.source_row[demand.first[atom] : demand.first[atom + 1]]
        pick = _level(nbytes[needs], load[source.holder[holders]])
        row[sent[needs]] = holders[pick]
        np.add.at(load, source.holder[holders[pick]], nbytes[needs])
    return row


def _level(nbytes: Ints, load: Ints) -> Ints:
    """Give pieces of ``nbytes`` to holders that have ``load`` so that the largest load stays small.

    Water is poured on the loads until all bytes are in; each holder takes a run of pieces as long as its column.
    """
    if len(load) == 1:
        return np.zeros(len(nbytes), np.int64)
    order = np.argsort(load, kind="stable")
    column = np.diff(_poured(load[order], int(nbytes.sum())), prepend=0)
    middle = np.cumsum(nbytes) - nbytes / 2
    return order[np.minimum(np.searchsorted(np.cumsum(column), middle), len(load) - 1)]


def _poured(sorted_load: Ints, amount: int) -> Ints:
    """Cumulative bytes that each holder takes when ``amount`` is poured on ascending loads."""
    below = np.arange(1, len(sorted_load) + 1) * sorted_load - np.cumsum(sorted_load)
    wet = int(np.searchsorted(below, amount, side="left")) or 1
    level = (amount + int(sorted_load[:wet].sum())) / wet
    return np.cumsum(np.maximum(level - sorted_load, 0) * (np.arange(len(sorted_load)) < wet))
