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
from dynajax.vps.region import Ints

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

    def largest_message(self, devices: int) -> int:
        """Grains from one device to another, at most."""
        return int(np.bincount(self.sender * devices + self.receiver).max(initial=0))


@dataclass(frozen=True, eq=False)
class Wave:
    """One filling of the buckets.

    Attributes:
        rounds: XOR step of each bucket, shape (buckets,).
        count: buckets in use; the rest does not travel.
        source, target: grain of the source or target buffer at each place of each bucket, shape (devices, places).
            Places that hold nothing have any source and ``NOWHERE`` as target.
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


def waves_of(grains: Grains, devices: int, buckets: int, places: int) -> Iterator[Wave]:
    """The grains in waves.

    Args:
        grains: what to send.
        devices: how many there are.
        buckets: of a device.
        places: grains in a bucket.
    """
    order = np.lexsort((grains.target, grains.receiver, grains.sender))
    sender, receiver = grains.sender[order], grains.receiver[order]
    message = sender * devices + receiver
    _, first, length = np.unique(message, return_index=True, return_counts=True)
    chunk, place = np.divmod(np.arange(len(order)) - np.repeat(first, length), places)
    step = 1 << (devices - 1).bit_length()
    travels, bucket = np.unique(chunk * step + (sender ^ receiver), return_inverse=True)
    wave, at = np.divmod(bucket.ravel(), buckets)
    for number in range(-(-len(travels) // buckets)):
        now = wave == number
        column = at[now] * places + place[now]
        source = np.zeros((devices, buckets * places), np.int32)
        target = np.full((devices, buckets * places), NOWHERE)
        source[sender[now], column] = grains.source[order][now]
        target[receiver[now], column] = grains.target[order][now]
        mine = travels[number * buckets : (number + 1) * buckets] % step
        yield Wave(np.pad(mine, (0, buckets - len(mine))).astype(np.int32), len(mine), source, target)
