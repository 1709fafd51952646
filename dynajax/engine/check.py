"""Do the replicas of the source agree, and is every moved byte that of its source?

In one process boxes are compared byte by byte. Between processes each side hashes what lies on its devices, the hashes
are told to all, and all compare the same ones: so all raise alike, and no byte travels for the comparison. Sums are
made again for it where all parts are here; between processes they are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from dynajax.engine.host_view import View, bytes_of, same_bytes, word_of
from dynajax.engine.places import Places, shards_of
from dynajax.engine.processes import Processes
from dynajax.engine.transport import Stage
from dynajax.engine.tree import Held, Leaf, located
from dynajax.errors import CheckError
from dynajax.planner import Move, Plan
from dynajax.types import Bools, Ints
from dynajax.vps import algebra
from dynajax.vps.buffer import view

Hashes = NDArray[np.uint64]
_RowBox = tuple[int, View]


def check_replicas(plan: Plan, leaves: Sequence[Leaf], places: Places, processes: Processes) -> None:
    """Compare all devices that hold the same box.

    Raises:
        CheckError: naming the leaf and the devices that differ.
    """
    hashes: list[Hashes] = []
    pairs = [pair for pair in zip(plan.moves, leaves, strict=True) if not pair[0].source.partial]
    for move, leaf in pairs:
        region = move.source.region
        held = [_buffers(shards_of(source.array, places), word_of(move.tensor.itemsize)) for source in leaf.sources]
        array, offset = located(leaf.sources, region.offset)
        boxes = _boxes(held, array, move.source.holder, offset, region.stride, region.hi - region.lo)
        hashes.append(_hashes(len(array), boxes))
    for (move, _), known in zip(pairs, _told(hashes, processes), strict=True):
        _, _, box = algebra.unique_boxes(move.source.region.lo, move.source.region.hi)
        _, first = np.unique(box, return_index=True)
        differs = np.flatnonzero(known != known[first][box])
        if len(differs):
            a, b = (places.places[int(move.source.holder[row])][0] for row in (first[box[differs[0]]], differs[0]))
            raise CheckError(
                f"{move.tensor.path}: replicas differ between {a} and {b}; make them equal first, or move with "
                "check=False, which takes the first holder's values"
            )


def check_moved(stage: Stage, filled: Mapping[Held, Mapping[int, View]], places: Places, processes: Processes) -> None:
    """Compare what was copied in a stage with its source, while both are there.

    Args:
        stage: what was moved.
        filled: the bytes of the targets' shards that are here, by place.
        places, processes: where, and who takes part.

    Raises:
        CheckError: naming the leaf and the device.
    """
    sides = [_sides(move, leaf, filled, places) for move, leaf in stage]
    if places.are_here:
        different = [[row for (row, a), (_, b) in zip(*pair, strict=True) if not same_bytes(a, b)] for pair in sides]
    else:
        hashes = [
            _hashes(len(m.copies.target), side) for (m, _), pair in zip(stage, sides, strict=True) for side in pair
        ]
        told = _told(hashes, processes)
        different = [np.flatnonzero(a != b).tolist() for a, b in zip(told[::2], told[1::2], strict=True)]
    for (move, _), rows in zip(stage, different, strict=True):
        if rows:
            device = places.places[int(move.copies.target[rows[0]])][0]
            raise CheckError(f"{move.tensor.path}: the bytes that {device} holds are not those of its source")


def _sides(
    move: Move, leaf: Leaf, filled: Mapping[Held, Mapping[int, View]], places: Places
) -> tuple[Iterator[_RowBox], Iterator[_RowBox]]:
    """What was sent, and what came: of parts of a sum the last, which is the sum, if all parts are here."""
    c = move.copies
    summed = c.added & places.are_here
    last = ~np.append(c.added[1:], False) & (summed == c.added)
    dtype = np.dtype(leaf.sources[0].array.dtype) if c.added.any() else word_of(move.tensor.itemsize)
    before = [_buffers(shards_of(source.array, places), dtype) for source in leaf.sources]
    after = [{n: shard.view(dtype) for n, shard in filled[target].items()} for target in leaf.targets]
    read, read_at = located(leaf.sources, c.source_offset)
    passed, passed_at = located(leaf.targets, c.source_offset)
    into, into_at = located(leaf.targets, c.target_offset)
    array, offset = np.where(c.relayed, len(before) + passed, read), np.where(c.relayed, passed_at, read_at)
    sent = _boxes(before + after, array, c.source, offset, c.source_stride, c.extent, summed)
    came = _boxes(after, into, c.target, into_at, c.target_stride, c.extent)
    return ((row, box) for row, box in sent if last[row]), ((row, box) for row, box in came if last[row])


def _buffers(shards: Mapping[int, jax.Array], dtype: np.dtype[Any]) -> dict[int, View]:
    """What lies in shards, in elements."""
    return {n: bytes_of(shard).view(dtype) for n, shard in shards.items()}


def _boxes(
    held: Sequence[Mapping[int, View]],
    array: Ints,
    place: Ints,
    offset: Ints,
    stride: Ints,
    extent: Ints,
    added: Bools | None = None,
) -> Iterator[_RowBox]:
    """Those of some boxes that are here, each with its row.

    Args:
        held: the buffers of some arrays by place.
        array: which of them a box lies in.
        place, offset, stride, extent: where in it.
        added: True for a box that is added to those before it; what comes is then the sum.
    """
    total = np.zeros(())
    rows = zip(*(column.tolist() for column in (array, place, offset, stride, extent)), strict=True)
    for row, (k, number, first, strides, sizes) in enumerate(rows):
        if number in held[k]:
            box = view(held[k][number], first, strides, sizes)
            total = total + box if added is not None and added[row] else box
            yield row, total


def _hashes(count: int, boxes: Iterable[_RowBox]) -> Hashes:
    """Hashes of ``count`` boxes; 0 for those that are not here."""
    made = np.zeros(count, np.uint64)
    for row, box in boxes:
        content = np.ascontiguousarray(box).view(np.uint8)
        made[row] = int.from_bytes(hashlib.sha256(content.data).digest()[:8], "little")
    return made


def _told(hashes: Sequence[Hashes], processes: Processes) -> list[Hashes]:
    """Hashes of which each process knows those of its own devices, all known."""
    if not hashes:
        return []
    ends = np.cumsum([len(part) for part in hashes])
    return np.split(processes.known_to_any(np.concatenate(hashes)), ends[:-1])
