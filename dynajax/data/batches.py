"""Batches of packed rows: the global batch of step n is a pure function of (documents, settings, n).

Documents are cut and packed once, from their lengths, into rows; Grain gives the rows an endless order,
reshuffled every epoch. A row is a sample. Nothing depends on who reads, how many read, or what was read
before: ``take`` builds any rows of the stream.

    batches = Batches(stdlib_documents(), batch_size=8, seq_len=128, seed=0)
    batch = batches[1000]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import grain

from dynajax.data.batch import Batch, Segment, lay_out
from dynajax.data.corpus import Documents
from dynajax.data.packing import Bins, DocumentPieces, Overlong, cut, pack_rows
from dynajax.data.stream import Stream, endless_order, item, stream_digest
from dynajax.errors import DataError


@dataclass(frozen=True, eq=False)
class Batches(Stream):
    """Global batches of packed rows, by step.

    Which segments share a row is decided once per run, by ``seed``; which rows share a batch changes
    every epoch. A batch may span two epochs; if it is larger than an epoch, rows come again in it.

    Attributes:
        documents: where the text is.
        batch_size: rows of the global batch.
        seq_len: tokens of a row.
        seed: 0 or more.
        max_segments: bound on the segments of a row.
        overlong: what happens to documents of more than ``seq_len`` tokens.

    Raises:
        DataError: a setting is out of range, a document is refused, or there is nothing to predict.
    """

    documents: Documents
    batch_size: int
    seq_len: int
    seed: int = 0
    max_segments: int = 16
    overlong: Overlong = Overlong.SPLIT

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "max_segments"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}: give 1 or more")
        if not self.pieces.targets.any():
            raise DataError(
                f"{len(self.documents)} documents cut to {self.seq_len} tokens leave no token to predict: "
                "give documents of 2 bytes or more, and a seq_len of 2 or more"
            )
        _ = self._order

    @cached_property
    def pieces(self) -> DocumentPieces:
        """The documents cut to ``seq_len``, with the counts of what was cut and dropped."""
        return cut(self.documents.lengths, self.seq_len, self.overlong)

    @cached_property
    def bins(self) -> Bins:
        """The pieces of each row, by the row's number in the corpus."""
        return pack_rows(self.pieces.length, self.seq_len, self.max_segments, seed=self.seed)

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold every piece once."""
        return len(self.bins)

    @property
    def fill(self) -> float:
        """Share of the rows' tokens that is not padding, from 0 to 1."""
        return float(self.pieces.length.sum()) / (self.rows_per_epoch * self.seq_len)

    def summary(self) -> str:
        """One line for people: sizes, padding, and what the policy for long documents did."""
        pieces = self.pieces
        done = "truncated" if self.overlong is Overlong.TRUNCATE else "split"
        return (
            f"{len(self.documents):,} documents, {int(pieces.length.sum()):,} tokens, {len(pieces):,} pieces in "
            f"{self.rows_per_epoch:,} rows of {self.seq_len} ({self.fill:.1%} full); {pieces.cut_documents:,} "
            f"documents {done}, {pieces.dropped_tokens:,} tokens dropped; an epoch is "
            f"{self.rows_per_epoch / self.batch_size:,.1f} steps"
        )

    # ---- reading

    def __getitem__(self, step: int) -> Batch:
        """The global batch of ``step``: ``batch_size`` rows."""
        return self.take(step * self.batch_size, self.batch_size)

    def take(self, sample: int, count: int) -> Batch:
        """Rows ``sample`` to ``sample + count`` of the stream, for a batch size that changes on the way."""
        if sample < 0 or count < 1:
            raise DataError(f"{count} rows from sample {sample}: give 1 or more rows, and a sample of 0 or more")
        return self._batch([item(self._rows, i) for i in range(sample, sample + count)])

    @cached_property
    def digest(self) -> str:
        """Names the rows and their order; the batch size is no part of it."""
        settings = {"seq_len": self.seq_len, "seed": self.seed, "max_segments": self.max_segments}
        return stream_digest(self.bins, self._order, kind="rows", overlong=self.overlong.value, **settings)

    # ---- inside

    @cached_property
    def _order(self) -> grain.MapDataset[int]:
        return endless_order(len(self.bins), self.seed)

    @cached_property
    def _rows(self) -> grain.MapDataset[list[Segment]]:
        return self._order.map(self._read_row)

    def _read_row(self, row: int) -> list[Segment]:
        return [read_piece(self.documents, self.pieces, piece) for piece in self.bins[row].tolist()]

    def _batch(self, rows: Sequence[list[Segment]]) -> Batch:
        return lay_out(rows, self.seq_len, self.max_segments)


def read_piece(documents: Documents, pieces: DocumentPieces, piece: int) -> Segment:
    """Piece number ``piece``, read: its tokens, and the target of its last one if it has one."""
    start, length = int(pieces.start[piece]), int(pieces.length[piece])
    document = int(pieces.document[piece])
    stop = start + 1 + int(pieces.targets[piece])
    return Segment(document, start, length, documents.read(document, start, stop))
