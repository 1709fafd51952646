"""Do the replicas of the source agree, and does what is handed out equal it?

What is compared is read off the arrays themselves, each shard by its own buffer, dtype and memory layout, and which
pieces are compared follows from the two layouts: nothing that the move went by is trusted. In one process pieces are
compared byte by byte. Between processes each side hashes what lies on its devices, the hashes are told to all, and all
compare the same ones: so all raise alike, and no byte travels for the comparison. Sums are made again where all parts
are here; between processes they are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from dynajax.arrays import _jax_private as private
from dynajax.arrays.host_view import View, bytes_of_each, word_of
from dynajax.engine.memories import Memories, located, shards_of
from dynajax.engine.request import Leaf
from dynajax.engine.stored import Endpoint
from dynajax.errors import CheckError
from dynajax.planner import Move
from dynajax.processes.consensus import Processes
from dynajax.types import Ints
from dynajax.vps import Region, algebra
from dynajax.vps.buffer import view

Hashes = NDArray[np.uint64]
Moves = Sequence[tuple[Move, Leaf]]


@dataclass(eq=False)
class Comparison:
    """Compares the arrays of a move.

    Attributes:
        arrays: leaves of the state.
        memories, processes: where they are, and who takes part.
    """

    arrays: Sequence[Any]
    memories: Memories
    processes: Processes
    _made: dict[Endpoint, jax.Array] = field(default_factory=dict)
    _waiting: list[tuple[Move, Leaf, _Pieces, Hashes]] = field(default_factory=list)

    def replicas(self, moves: Moves) -> None:
        """Compare all devices that hold the same box of the source.

        Raises:
            CheckError: naming the leaf and the devices that differ.
        """
        whole = [(move, leaf) for move, leaf in moves if not move.source.partial]
        rows = [np.arange(move.source.region.count) for move, _ in whole]
        hashes = [
            _hashes(self._sources(*pair, row, pair[0].source.region)) for pair, row in zip(whole, rows, strict=True)
        ]
        for (move, _), known in zip(whole, self._told(hashes), strict=True):
            boxes = move.source.region.distinct
            first = np.empty_like(boxes.row)
            first[boxes.row] = boxes.row[boxes.first[:-1]][boxes.of_row]
            differs = np.flatnonzero(known != known[first])
            if len(differs):
                two = first[differs[0]], differs[0]
                a, b = (self.memories.listed[int(move.source.holder[row])][0] for row in two)
                raise CheckError(
                    f"{move.tensor.path}: replicas differ between {a} and {b}; make them equal first, or move with "
                    "check=False, which takes the first holder's values"
                )

    def stage(self, moves: Moves, made: Mapping[Endpoint, jax.Array]) -> None:
        """Compare what a stage has moved, and what was waiting for it, while the source of the stage is there.

        Args:
            moves: of the stage.
            made: target arrays that are whole since it.

        Raises:
            CheckError: naming the leaf and the device.
        """
        self._made |= made
        self._waiting += [(m, leaf, p, _hashes(self._sent(m, leaf, p))) for m, leaf in moves for p in [_Pieces.of(m)]]
        done = [w for w in self._waiting if all(end in self._made for end in w[1].targets)]
        self._waiting = [w for w in self._waiting if not all(end in self._made for end in w[1].targets)]
        both = [hashes for m, leaf, p, sent in done for hashes in (sent, _hashes(self._came(m, leaf, p)))]
        told = self._told(both)
        for (move, _, pieces, _), a, b in zip(done, told[::2], told[1::2], strict=True):
            compared = self.memories.are_here | ~np.full(len(a), move.source.partial)
            differs = np.flatnonzero((a != b) & compared)
            if len(differs):
                device = self.memories.listed[int(move.target.holder[pieces.target_row[differs[0]]])][0]
                raise CheckError(f"{move.tensor.path}: the bytes that {device} holds are not those of its source")

    def _sent(self, move: Move, leaf: Leaf, pieces: _Pieces) -> Iterator[View | None]:
        """What each piece has to be: the part of its holder, or the sum of the parts of all."""
        rows = pieces.source_row
        region = _within(move.source.region, rows, pieces.lo[pieces.piece], pieces.hi[pieces.piece])
        parts = self._sources(move, leaf, rows, region)
        last = np.append(pieces.piece[1:] != pieces.piece[:-1], True)[: len(rows)]
        total: Any = None
        for part, ends in zip(parts, last.tolist(), strict=True):
            total = part if total is None or part is None else total + part
            if ends:
                yield total
                total = None

    def _sources(self, move: Move, leaf: Leaf, rows: Ints, region: Region) -> Iterator[View | None]:
        """Boxes of the source that the holders of ``rows`` have; None for those that are not here."""
        (same,) = leaf.targets if leaf.has_own_target else (None,)
        ends = leaf.sources
        arrays = [self.arrays[end.index] for end in ends]
        if same is not None and same.index in ends[0].repeats:
            arrays = [self.arrays[same.index]]  # the array itself, not the one that it was taken for
        dtype = np.dtype(ends[0].like.dtype) if move.source.partial else word_of(move.tensor.itemsize)
        held = [self._values(array, end, dtype) for array, end in zip(arrays, ends, strict=True)]
        return _boxes(held, ends, move.source.holder[rows], region)

    def _came(self, move: Move, leaf: Leaf, pieces: _Pieces) -> Iterator[View | None]:
        """What is handed out for each piece; None where it is not here."""
        dtype = np.dtype(leaf.sources[0].like.dtype) if move.source.partial else word_of(move.tensor.itemsize)
        held = [self._values(self._made[end], end, dtype) for end in leaf.targets]
        region = _within(move.target.region, pieces.target_row, pieces.lo, pieces.hi)
        return _boxes(held, leaf.targets, move.target.holder[pieces.target_row], region)

    def _values(self, array: Any, end: Endpoint, dtype: np.dtype[Any]) -> dict[int, View]:
        """What lies in the shards of an array, by memory, as elements that are compared.

        Raises:
            CheckError: a shard is not what its array says.
        """
        machine, shape = end.physical
        values: dict[int, View] = {}
        for n, shard in shards_of(array, self.memories).items():
            if shard.dtype != machine or shard.shape != shape:
                where = self.memories.listed[n][0]
                raise CheckError(
                    f"a shard on {where} is {shard.dtype}{list(shard.shape)} and not {machine}{list(shape)}"
                )
            values[n] = bytes_of_each([shard], private.layout_of(shard))[0].view(dtype)
        return values

    def _told(self, hashes: Sequence[Hashes]) -> list[Hashes]:
        """Hashes of which each process knows those of its own devices, all known."""
        if not hashes or not self.processes.talk:
            return list(hashes)
        ends = np.cumsum([len(part) for part in hashes])
        return np.split(self.processes.known_to_any(np.concatenate(hashes)), ends[:-1])


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Boxes that are compared, one row each.

    Attributes:
        target_row: row of the target tiling that each is part of.
        lo, hi: shape (pieces, rank).
        piece, source_row: rows of the source tiling that have each: the first, or if parts are summed all, by holder.
    """

    target_row: Ints
    lo: Ints
    hi: Ints
    piece: Ints
    source_row: Ints

    @staticmethod
    def of(move: Move) -> _Pieces:
        """What a source box, cut where such boxes overlap, has in common with a target box."""
        cells, wanted = move.source.region.cells, move.target.region
        cell, row = algebra.overlaps(cells.lo, cells.hi, wanted.lo, wanted.hi)
        lo, hi = np.maximum(cells.lo[cell], wanted.lo[row]), np.minimum(cells.hi[cell], wanted.hi[row])
        order = np.lexsort((move.source.holder[cells.row], cells.of_row))
        piece, at = algebra.expand(cells.first[cell], cells.first[cell + 1])
        held = cells.row[order][at]
        if not move.source.partial:
            piece, first = np.unique(piece, return_index=True)
            held = held[first]
        return _Pieces(row, lo, hi, piece, held)


def _within(region: Region, rows: Ints, lo: Ints, hi: Ints) -> Region:
    """Parts ``lo, hi`` of the boxes at ``rows``."""
    return Region(lo, hi, region.address(rows, lo), region.stride[rows])


def _boxes(
    held: Sequence[Mapping[int, View]], ends: Sequence[Endpoint], memory: Ints, region: Region
) -> Iterator[View | None]:
    """Boxes of some arrays; None for those that are not here.

    Args:
        held: the buffers of the arrays by memory.
        ends: the arrays, whose shards the region numbers end to end.
        memory: where each box is.
        region: the boxes.
    """
    array, offset = located(ends, region.offset)
    rows = zip(*(c.tolist() for c in (array, memory, offset, region.stride, region.hi - region.lo)), strict=True)
    for k, number, first, strides, sizes in rows:
        yield view(held[k][number], first, strides, sizes) if number in held[k] else None


def _hashes(boxes: Iterable[View | None]) -> Hashes:
    """Hashes of boxes; 0 for those that are not here."""
    made: list[int] = []
    for box in boxes:
        content = None if box is None else np.ascontiguousarray(box).view(np.uint8)
        made.append(0 if content is None else int.from_bytes(hashlib.sha256(content.data).digest()[:8], "little"))
    return np.asarray(made, np.uint64)
