"""A batch: rows of packed segments, as a pytree of numpy arrays.

There is one source of truth for padding: segment id 0. No token id means padding (a zero byte is a
token like any other), weights follow from the segments, and counts are counts of what is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from dynajax.errors import DataError


@dataclass(frozen=True, eq=False)
class Segment:
    """What fills one segment of a row: a document, or a piece of one.

    Attributes:
        document: number of the document.
        start: first token, counted in the document.
        length: tokens, at least 1.
        text: uint8 (length,) or (length + 1,): the tokens and, if the document goes on, the next one,
            which is the target of the last.
    """

    document: int
    start: int
    length: int
    text: NDArray[np.uint8] = dataclasses.field(repr=False)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of packed segments. A pytree whose leaves are five arrays of shape (rows, seq_len).

    The leaves are numpy arrays as the data side makes them, and whatever the caller puts in their place
    later. ``max_segments`` is static: it belongs to the structure, hence to the key of a compiled step.

    Attributes:
        tokens: int32, byte values; 0 where padded.
        targets: int32, the next token of the same document; 0 where there is none.
        weights: float32, 1 where there is a target, else 0. The loss is the weighted mean over the global batch.
        segment_ids: int32, 1, 2, ... without gaps in each row, 0 where padded.
        positions: int32, from 0 in each segment; 0 where padded.
        max_segments: bound on the segments of a row.
    """

    tokens: Any
    targets: Any
    weights: Any
    segment_ids: Any
    positions: Any
    max_segments: int

    @property
    def rows(self) -> int:
        """Rows, fillers included."""
        return self.tokens.shape[0]

    @property
    def seq_len(self) -> int:
        """Tokens that a row can hold."""
        return self.tokens.shape[1]

    @property
    def samples(self) -> int:
        """Rows that hold a token: fillers are not samples."""
        return int((self.segment_ids > 0).any(axis=1).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segment_ids > 0).sum())

    @property
    def num_targets(self) -> int:
        """Tokens that enter the loss: all but the last of each document."""
        return int((self.weights > 0).sum())


jax.tree_util.register_dataclass(
    Batch,
    data_fields=["tokens", "targets", "weights", "segment_ids", "positions"],
    meta_fields=["max_segments"],
)


def lay_out(rows: Sequence[Sequence[Segment]], seq_len: int, max_segments: int) -> Batch:
    """The batch whose row r holds the segments ``rows[r]``, one after the other, then padding.

    Raises:
        DataError: the segments of a row have more than ``seq_len`` tokens, or are more than ``max_segments``.
    """
    shape = (len(rows), seq_len)
    tokens, targets, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(4))
    weights = np.zeros(shape, np.float32)
    for row, segments in enumerate(rows):
        total = sum(s.length for s in segments)
        if total > seq_len or len(segments) > max_segments:
            raise DataError(
                f"row {row} has {total} tokens in {len(segments)} segments and a row holds {seq_len} tokens "
                f"in {max_segments} segments: put fewer in it, or raise seq_len or max_segments"
            )
        begin = 0
        for number, segment in enumerate(segments, start=1):
            end, predicted = begin + segment.length, begin + segment.text.size - 1
            tokens[row, begin:end] = segment.text[: segment.length]
            targets[row, begin:predicted] = segment.text[1:]
            weights[row, begin:predicted] = 1
            segment_ids[row, begin:end] = number
            positions[row, begin:end] = np.arange(segment.length)
            begin = end
    return Batch(tokens, targets, weights, segment_ids, positions, max_segments)


def pad_rows(batch: Batch, multiple: int) -> Batch:
    """``batch`` with filler rows of weight 0 at its end, so that ``multiple`` divides its rows.

    Fillers are all padding: they change neither the sum of a loss nor the number of targets.

    Raises:
        DataError: ``multiple`` is below 1.
    """
    if multiple < 1:
        raise DataError(f"cannot pad to a multiple of {multiple}: give 1 or more")
    missing = -batch.rows % multiple
    if not missing:
        return batch
    return jax.tree.map(lambda leaf: np.pad(leaf, [(0, missing), (0, 0)]), batch)
