"""What carries out the stages of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax

from dynajax.engine.tree import Leaf
from dynajax.planner import Move

Stage = Sequence[tuple[Move, Leaf]]


class Transport(Protocol):
    """Carries out one stage of a plan.

    Attributes:
        name: how reports call it.
        overhead: bytes that each device holds meanwhile beside the shards.
    """

    name: str
    overhead: int

    def fill(self, stage: Stage, share: bool, check: bool) -> dict[int, jax.Array]:
        """Fill the arrays that a stage fills, and return those that are whole now, by their place in the tree.

        They may still be on their way, as results of jax are; source arrays may be deleted meanwhile. The next stage
        allocates nothing before they are there.

        Args:
            stage: tensors to move, in arrays of their own or not.
            share: True if the buffers that stay may be shared with the source (which is then given up); False if
                the target needs buffers, or aliases, of its own.
            check: compare every copied box with its source.

        Raises:
            CheckError: ``check`` found bytes that differ.
        """
        ...

    def prepare(self, stage: Stage) -> None:
        """Compile what ``fill`` will need; leaves may be without data."""
        ...

    def close(self) -> None:
        """Give back threads and buffers."""
        ...
