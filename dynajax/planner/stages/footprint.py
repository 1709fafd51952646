"""What a move needs of a device's memory, and in which units memory can be freed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from dynajax.types import Ints


class Granularity(Enum):
    """The unit in which devices free memory during a move."""

    SHARDS = "shards"
    """A whole shard: one buffer, as an array of jax is. A stage moves whole tensors. What the engine does."""
    PACKED = "packed"
    """A piece of a tensor, freed once its last reader has it; shards lie in pieces, without padding. A stage moves
    slices of tensors (``planner.stages.packed``). For analysis only: no transport carries out such a plan."""


@dataclass(frozen=True, eq=False)
class Footprint:
    """Bytes of each device.

    Attributes:
        source, target: bytes of the layouts, shape (devices,).
        peak: the most bytes alive at once, shape (devices,).
        stays: bytes of the source that are not given up, shape (devices,).
    """

    source: Ints
    target: Ints
    peak: Ints
    stays: Ints

    @property
    def base(self) -> Ints:
        """What a device holds before or after the move, whichever is more, shape (devices,)."""
        return np.maximum(self.source, self.stays + self.target)

    @property
    def extra(self) -> int:
        """The most that a device's peak lies above its base, at least 0."""
        return int(np.maximum(self.peak - self.base, 0).max(initial=0))
