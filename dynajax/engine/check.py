"""``check=True``: do the replicas of the source agree?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynajax.engine.places import Places, shards_of
from dynajax.engine.shared_memory import Words, bytes_of, word_of
from dynajax.engine.tree import Leaf, located
from dynajax.errors import CheckError
from dynajax.planner import Plan
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
        first: dict[int, tuple[int, Words]] = {}
        for row, k in enumerate(box.tolist()):
            holder, extent = int(move.source.holder[row]), (region.hi[row] - region.lo[row]).tolist()
            buffer = bytes_of(held[int(array[row])][holder]).view(word)
            mine = view(buffer, int(offset[row]), region.stride[row].tolist(), extent)
            known, theirs = first.setdefault(k, (holder, mine))
            if not np.array_equal(mine, theirs):
                raise CheckError(
                    f"{move.tensor.path}: replicas differ between {places.places[known][0]} and "
                    f"{places.places[holder][0]}; make them equal first, or move with check=False, which takes the "
                    "first holder's values"
                )
