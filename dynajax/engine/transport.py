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

    def run(self, stage: Stage, share: bool) -> list[jax.Array]:
        """The target arrays of a stage; source arrays stay as they are.

        Args:
            stage: what to move.
            share: True if the buffers that stay may be shared with the source (which is then given up); False if
                the target needs buffers, or aliases, of its own.
        """
        ...

    def prepare(self, stage: Stage) -> None:
        """Compile what ``run`` will need; leaves may be without data."""
        ...

    def close(self) -> None:
        """Give back threads and buffers."""
        ...
