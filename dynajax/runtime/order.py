"""Orders of the tokens of a row: which token lies where when the row is cut over the context axis.

An order is applied to a whole batch before it is cut, so that every device gets one run of places.
Attention asks only for segments and positions and the loss is a sum, so no order changes a result.

- contiguous: device r of cp gets the r-th run of tokens. Under a causal mask the last device works most.
- zig-zag: the row is cut in 2·cp runs and device r gets runs r and 2·cp − 1 − r, which evens the work out.

A row that the cut does not divide gets places without a token at its end: segment 0, weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from dynajax.errors import LayoutError
from dynajax.types import Ints

T = TypeVar("T")


@dataclass(frozen=True)
class TokenOrder:
    """Where the tokens of a row are stored, as runs.

    Attributes:
        length: tokens of a row.
        runs: ``(first, tokens)`` of each run of ``run_length`` places, in the order of storage; the rest of a
            run that has fewer tokens than places is padding.
        run_length: places of every run.
    """

    length: int
    runs: tuple[tuple[int, int], ...]
    run_length: int

    @property
    def stored_length(self) -> int:
        """Places of a stored row, padding included."""
        return len(self.runs) * self.run_length

    @property
    def index(self) -> Ints:
        """The token at each place of storage, −1 for padding."""
        index = np.full((len(self.runs), self.run_length), -1, np.int64)
        for row, (first, tokens) in zip(index, self.runs, strict=True):
            row[:tokens] = np.arange(first, first + tokens)
        return index.reshape(-1)

    def arrange(self, rows: T) -> T:
        """Every leaf (rows, length, ...) of a pytree of numpy arrays as (rows, stored_length, ...), padding 0.

        Raises:
            LayoutError: a leaf has no rows of ``length`` tokens.
        """
        index = self.index

        def place(leaf: Any) -> Any:
            if len(leaf.shape) < 2 or leaf.shape[1] != self.length:
                raise LayoutError(
                    f"an array of shape {leaf.shape} has no rows of {self.length} tokens; "
                    f"give (rows, {self.length}, ...)"
                )
            stored = np.take(leaf, np.maximum(index, 0), axis=1)
            stored[:, index < 0] = 0
            return stored

        return jax.tree.map(place, rows)


def contiguous(length: int, cp: int) -> TokenOrder:
    """Device r of ``cp`` gets the r-th of equal runs of a row of ``length`` tokens.

    Raises:
        LayoutError: either is below 1.
    """
    return _order(length, cp, range(cp))


def zigzag(length: int, cp: int) -> TokenOrder:
    """Device r of ``cp`` gets runs r and 2·cp − 1 − r of 2·cp equal ones.

    Raises:
        LayoutError: either is below 1.
    """
    return _order(length, cp, [run for r in range(cp) for run in (r, 2 * cp - 1 - r)])


def _order(length: int, cp: int, runs: range | list[int]) -> TokenOrder:
    if length < 1 or cp < 1:
        raise LayoutError(f"a row of {length} tokens cannot be cut over cp = {cp}; both must be 1 or more")
    places = -(-length // len(runs))
    starts = [run * places for run in runs]
    return TokenOrder(length, tuple((s, min(max(length - s, 0), places)) for s in starts), places)
