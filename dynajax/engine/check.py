"""Do the replicas of the source agree, and is every moved byte that of its source?

Each side hashes what lies on its devices, the hashes are told to all processes, and all compare the same ones: so all
raise alike, and no byte travels for the comparison. Sums are made again for it inside one process, where all parts
are; between processes they are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from dynajax.engine.host_view import View, bytes_of, word_of
from dynajax.engine.places import Places, shards_of
from dynajax.engine.processes import Processes
from dynajax.engine.transport import Stage
from dynajax.engine.tree import Held, Leaf, located
from dynajax.errors import CheckError
from dynajax.planner import Plan
from dynajax.vps import algebra
from dynajax.vps.buffer import view
from dynajax.vps.region import Ints

Hashes = NDArray[np.uint64]


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
        boxes = (array.tolist(), move.source.holder, offset, region.stride, region.hi - region.lo)
        hashes.append(_hashes(held, *boxes))
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


def check_moved(
    stage: Stage, filled: Mapping[Held, Mapping[int, jax.Array]], places: Places, processes: Processes
) -> None:
    """Compare what was copied in a stage with its source, while both are there.

    Args:
        stage: what was moved.
        filled: the shards of the targets that are here, by place.
        places, processes: where, and who takes part.

    Raises:
        CheckError: naming the leaf and the device.
    """
    hashes: list[Hashes] = []
    for move, leaf in stage:
        c, added = move.copies, move.copies.added & places.are_here
        goes_on = np.append(c.added[1:], False)
        dtype = np.dtype(leaf.sources[0].array.dtype) if c.added.any() else word_of(move.tensor.itemsize)
        before = [_buffers(shards_of(source.array, places), dtype) for source in leaf.sources]
        after = [_buffers(filled[target], dtype) for target in leaf.targets]
        read, passed, into = (
            located(ends, at)
            for ends, at in (
                (leaf.sources, c.source_offset), (leaf.targets, c.source_offset), (leaf.targets, c.target_offset)
            )
        )  # fmt: skip
        array = np.where(c.relayed, len(before) + passed[0], read[0]).tolist()
        offset = np.where(c.relayed, passed[1], read[1])
        for side in (
            _hashes(before + after, array, c.source, offset, c.source_stride, c.extent, added),
            _hashes(after, into[0].tolist(), c.target, into[1], c.target_stride, c.extent),
        ):
            hashes.append(np.where(goes_on | (c.added & ~added), np.uint64(0), side))
    told = _told(hashes, processes)
    for (move, _), sent, came in zip(stage, told[::2], told[1::2], strict=True):
        for row in np.flatnonzero(sent != came)[:1].tolist():
            device = places.places[int(move.copies.target[row])][0]
            raise CheckError(f"{move.tensor.path}: the bytes that {device} holds are not those of its source")


def _buffers(shards: Mapping[int, jax.Array], dtype: np.dtype[Any]) -> dict[int, View]:
    """What lies in shards, in elements."""
    return {n: bytes_of(shard).view(dtype) for n, shard in shards.items()}


def _hashes(
    held: Sequence[Mapping[int, View]],
    array: Sequence[int],
    place: Ints,
    offset: Ints,
    stride: Ints,
    extent: Ints,
    added: NDArray[np.bool_] | None = None,
) -> Hashes:
    """Of boxes, one row each; 0 for those that are not here.

    Args:
        held: the buffers of some arrays by place.
        array: which of them a box lies in.
        place, offset, stride, extent: where in it.
        added: True for a box that is added to those before it, as is then hashed.
    """
    made, total = np.zeros(len(place), np.uint64), np.zeros(())
    rows = zip(array, place.tolist(), offset.tolist(), stride.tolist(), extent.tolist(), strict=True)
    for row, (k, number, first, strides, sizes) in enumerate(rows):
        if number in held[k]:
            box = view(held[k][number], first, strides, sizes)
            total = total + box if added is not None and added[row] else box
            content = np.ascontiguousarray(total).view(np.uint8)
            made[row] = int.from_bytes(hashlib.sha256(content.data).digest()[:8], "little")
    return made


def _told(hashes: Sequence[Hashes], processes: Processes) -> list[Hashes]:
    """Hashes of which each process knows those of its own devices, all known."""
    if not hashes:
        return []
    ends = np.cumsum([len(part) for part in hashes])
    return np.split(processes.known_to_any(np.concatenate(hashes)), ends[:-1])
