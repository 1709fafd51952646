"""What a move needs of a device's memory, and in which units memory can be freed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from dynajax.types import Ints


class Memory(Enum):
    """What can be freed, and when."""

    SHARDS = "shards"
    """A shard is one buffer, freed whole: arrays of jax. A stage holds whole tensors."""
    PACKED = "packed"
    """State lies in pieces, without padding, each freed when its last reader has it; see ``planner.stages.packed``."""


@dataclass(frozen=True, eq=False)
class Footprint:
    """Bytes of each device.

    Attributes:
        source, target: bytes of the layouts, shape (devices,).
        peak: the most bytes alive at once, shape (devices,).
    """

    source: Ints
    target: Ints
    peak: Ints

    def extra(self, donate: bool) -> int:
        """The most that a device's peak lies above its base, at least 0."""
        base = np.maximum(self.source, self.target) if donate else self.source + self.target
        return int(np.maximum(self.peak - base, 0).max(initial=0))
