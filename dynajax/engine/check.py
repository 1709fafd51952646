"""``check=True``: do the replicas of the source agree?"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from dynajax.engine import _jax_private as private
from dynajax.engine.places import Places
from dynajax.engine.tree import Leaf
from dynajax.errors import CheckError
from dynajax.planner import Plan
from dynajax.vps import algebra


def check_replicas(plan: Plan, leaves: Sequence[Leaf], places: Places) -> None:
    """Compare all devices that hold the same box.

    Raises:
        CheckError: naming the leaf and the devices that differ.
    """
    for move, leaf in zip(plan.moves, leaves, strict=True):
        number = places.numbers(leaf.array.sharding)
        shards = {number[s.device]: s for s in private.physical(leaf.array).addressable_shards}
        region = move.source.region
        _, _, box = algebra.unique_boxes(region.lo, region.hi)
        first: dict[int, int] = {}
        for row, k in enumerate(box.tolist()):
            holder = int(move.source.holder[row])
            known = first.setdefault(k, holder)
            if known != holder and not _same_bytes(shards[known].data, shards[holder].data):
                raise CheckError(
                    f"{move.tensor.path}: replicas differ between {shards[known].device} and {shards[holder].device}; "
                    "make them equal first, or move with check=False, which takes the first holder's values"
                )


def _same_bytes(a: jax.Array, b: jax.Array) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()
