"""Waves of an exchange: which run of words lies in which bucket when, and in which round each bucket travels.

All that a stage copies is cut in grains: runs of words that are contiguous at both ends. What device i has for
device j is a message. Device i talks to i ^ s in round s, so that a bucket of every device can travel in one round,
and a message larger than a bucket takes several rounds of the same s. A wave fills the buckets of a device once.
Round 0 is for what stays on its device and only changes its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dynajax.engine.words import Words
from dynajax.errors import LayoutError
from dynajax.planner.route import Copies
from dynajax.types import Ints
from dynajax.vps.tiling import segment_sum

NOWHERE = np.int32(2**31 - 1)


@dataclass(frozen=True, eq=False)
class Grains:
    """Runs of words to copy, one row each.

    Attributes:
        sender, receiver: device numbers.
        source, target: number of the grain in the buffer of either.
    """

    sender: Ints
    receiver: Ints
    source: Ints
    target: Ints

    @staticmethod
    def concatenate(parts: list[Grains]) -> Grains:
        """All rows of some grains."""
        names = ("sender", "receiver", "source", "target")
        return Grains(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))

    def finer(self, parts: int) -> Grains:
        """Every grain cut in so many."""
        part = np.tile(np.arange(parts), len(self.sender))
        sender, receiver, source, target = (
            np.repeat(a, parts) for a in (self.sender, self.receiver, self.source, self.target)
        )
        return Grains(sender, receiver, source * parts + part, target * parts + part)


@dataclass(frozen=True, eq=False)
class Wave:
    """One filling of the buckets, as the devices of this process see it.

    Attributes:
        rounds: XOR step of each bucket, shape (buckets,); the same in all processes, and so is the count.
        count: buckets in use; the rest does not travel.
        source, target: grain of the source or target buffer at each place of each bucket, shape (devices of this
            process, places). Places that hold nothing have any source and ``NOWHERE`` as target.
    """

    rounds: np.ndarray
    count: int
    source: np.ndarray
    target: np.ndarray


def longest_run(c: Copies, source: int, target: int) -> int:
    """Elements that lie side by side, at multiples of their number, at both ends of every copy; 1 if nothing does.

    Args:
        c: boxes to copy.
        source, target: elements of either buffer.
    """
    run = np.ones(len(c.extent), np.int64)
    dense = np.ones(len(c.extent), bool)
    common = math.gcd(source, target, *np.unique(c.source_offset).tolist(), *np.unique(c.target_offset).tolist())
    for dim in reversed(range(c.extent.shape[1])):
        extent, strides = c.extent[:, dim], (c.source_stride[:, dim], c.target_stride[:, dim])
        several = extent > 1
        dense &= ~several | ((strides[0] == run) & (strides[1] == run))
        run = np.where(dense, run * extent, run)
        for stride in strides:
            common = math.gcd(common, *np.unique(stride[several & ~dense]).tolist())
    return max(math.gcd(common, *np.unique(run).tolist()), 1)


def words_and_grain(dtype: np.dtype, run: int, most: int, largest: int = 0) -> tuple[Words, int]:
    """How to send elements whose copies are multiples of ``run`` of them, and the words of a grain.

    Grains have a power of two of words, and so has ``most``, so that grains fill a bucket of that size.

    Args:
        dtype: of the elements.
        run: see ``longest_run``.
        most: words of a grain at most.
        largest: elements of the largest buffer.

    Raises:
        LayoutError: the buffer has more grains than 32 bits count.
    """
    words = Words(dtype, widened=bool(run * dtype.itemsize % 4))
    count = max(words.count(run), 1)
    grain = min(count & -count, most)
    if words.count(largest) // grain >= NOWHERE:
        raise LayoutError(
            f"a shard of {largest} elements that moves in runs of {run} has more runs than 32 bits count; choose "
            "layouts that cut it into longer runs, or smaller shards"
        )
    return words, grain


def grains_of(c: Copies, rows: np.ndarray, size: int, device: Ints) -> Grains:
    """The copies ``rows`` cut in grains.

    Args:
        c: boxes to copy.
        rows: which of them.
        size: elements of a grain.
        device: device number of each place.
    """
    extent = c.extent[rows]
    count = c.volumes[rows] // size
    row = np.repeat(np.arange(len(rows)), count)
    left = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)) * size
    source, target = c.source_offset[rows][row], c.target_offset[rows][row]
    for dim in reversed(range(extent.shape[1])):
        left, at = np.divmod(left, extent[row, dim])
        source = source + at * c.source_stride[rows][row, dim]
        target = target + at * c.target_stride[rows][row, dim]
    return Grains(device[c.source[rows]][row], device[c.target[rows]][row], source // size, target // size)


def messages(c: Copies, rows: np.ndarray, size: int, device: Ints, devices: int) -> Ints:
    """Grains that each device has for each other, shape (devices, devices); ``grains_of`` says what they are."""
    pair = device[c.source[rows]] * devices + device[c.target[rows]]
    return segment_sum(pair, c.volumes[rows] // size, devices * devices).reshape(devices, devices)


def longest_of(sent: Ints) -> Ints:
    """The longest message of each XOR step, from those between all devices, shape (devices, devices)."""
    devices = len(sent)
    longest = np.zeros(1 << max(devices - 1, 0).bit_length(), np.int64)
    np.maximum.at(longest, np.arange(devices)[:, None] ^ np.arange(devices), sent)
    return longest


def waves_of(grains: Grains, longest: Ints, here: Ints, buckets: int, places: int) -> Iterator[Wave]:
    """The grains in waves.

    Args:
        grains: what the devices of this process send and receive.
        longest: grains of the longest message of each XOR step in any process.
        here: numbers of the devices of this process, ascending.
        buckets: of a device.
        places: grains in a bucket.
    """
    order = np.lexsort((grains.target, grains.receiver, grains.sender))
    sender, receiver = grains.sender[order], grains.receiver[order]
    steps = len(longest)
    _, first, length = np.unique(sender * steps + receiver, return_index=True, return_counts=True)
    chunk, place = np.divmod(np.arange(len(order)) - np.repeat(first, length), places)
    chunks = np.arange(-(-int(longest.max(initial=0)) // places))
    travels = np.flatnonzero(chunks[:, None] * places < longest)
    wave, at = np.divmod(np.searchsorted(travels, chunk * steps + (sender ^ receiver)), buckets)
    column = at * places + place
    sent, came = np.isin(sender, here), np.isin(receiver, here)
    for number in range(-(-len(travels) // buckets)):
        out, into = sent & (wave == number), came & (wave == number)
        source = np.zeros((len(here), buckets * places), np.int32)
        target = np.full((len(here), buckets * places), NOWHERE)
        source[np.searchsorted(here, sender[out]), column[out]] = grains.source[order][out]
        target[np.searchsorted(here, receiver[into]), column[into]] = grains.target[order][into]
        mine = travels[number * buckets : (number + 1) * buckets] % steps
        yield Wave(np.pad(mine, (0, buckets - len(mine))).astype(np.int32), len(mine), source, target)
