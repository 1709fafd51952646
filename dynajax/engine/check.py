"""Do the replicas of the source agree, and is every moved byte that of its source?"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from dynajax.engine.host_view import View, bytes_of, same_bytes, word_of
from dynajax.engine.places import Places, shards_of
from dynajax.engine.tree import Leaf, located
from dynajax.errors import CheckError
from dynajax.planner import Move, Plan
from dynajax.vps import algebra
from dynajax.vps.buffer import view


def check_replicas(plan: Plan, leaves: Sequence[Leaf], places: Places) -> None:
    """Compare all devices that hold the same box.

    Raises:
        CheckError: naming the leaf and the devices that differ.
    """
    for move, leaf in zip(plan.moves, leaves, strict=True):
        region, word = move.source.region, word_of(move.tensor.itemsize)
        held = [shards_of(source.array, places) for source in leaf.sources]
        array, offset = located(leaf.sources, region.offset)
        _, _, box = algebra.unique_boxes(region.lo, region.hi)
        first: dict[int, tuple[int, View]] = {}
        for row, k in enumerate(box.tolist()):
            holder, extent = int(move.source.holder[row]), (region.hi[row] - region.lo[row]).tolist()
            buffer = bytes_of(held[int(array[row])][holder]).view(word)
            mine = view(buffer, int(offset[row]), region.stride[row].tolist(), extent)
            known, theirs = first.setdefault(k, (holder, mine))
            if not same_bytes(mine, theirs):
                raise CheckError(
                    f"{move.tensor.path}: replicas differ between {places.places[known][0]} and "
                    f"{places.places[holder][0]}; make them equal first, or move with check=False, which takes the "
                    "first holder's values"
                )


def check_moved(move: Move, leaf: Leaf, moved: jax.Array, places: Places) -> None:
    """Compare what was copied of a tensor that is alone in its array with its source, while both are there.

    Raises:
        CheckError: naming the leaf and the device.
    """
    c, word = move.copies, word_of(move.tensor.itemsize)
    before, after = ({n: bytes_of(x).view(word) for n, x in shards_of(a, places).items()} for a in (leaf.array, moved))
    for row in range(len(c.source)):
        held, extent, target = after if c.relayed[row] else before, c.extent[row].tolist(), int(c.target[row])
        sent = view(held[int(c.source[row])], int(c.source_offset[row]), c.source_stride[row].tolist(), extent)
        came = view(after[target], int(c.target_offset[row]), c.target_stride[row].tolist(), extent)
        if not same_bytes(sent, came):
            raise CheckError(
                f"{move.tensor.path}: the bytes that {places.places[target][0]} holds are not those of its source"
            )
