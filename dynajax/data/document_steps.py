"""Documents as they are: the variable-length sequences of each step, under a budget of tokens.

This is what a planner dispatches that gives each batch the mix of strategies that suits it. Nothing is
packed here: the plan of an iteration decides which sequences share a row, and ``lay_out`` makes the row.
As with packed rows, the sequences of step n are a pure function of (documents, settings, n).

    steps = DocumentSteps(stdlib_documents(), token_budget=200_000, longest=32_768, seed=0)
    steps.lengths(7)    # for the planner, ahead of time: reads nothing
    steps[7].segments   # the text
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import grain
import numpy as np
from numpy.typing import NDArray

from dynajax.data.batch import Segment
from dynajax.data.batches import read_piece
from dynajax.data.corpus import Documents
from dynajax.data.packing import Bins, DocumentPieces, Overlong, cut, group_in_order, shuffled
from dynajax.data.stream import Stream, endless_order, item, stream_digest
from dynajax.errors import DataError


@dataclass(frozen=True, eq=False)
class DocumentBatch:
    """The sequences of one step.

    Attributes:
        segments: one per sequence.
    """

    segments: tuple[Segment, ...]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (sequences,), tokens of each."""
        return np.array([s.length for s in self.segments], np.int64)

    @property
    def samples(self) -> int:
        """Sequences."""
        return len(self.segments)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(s.length for s in self.segments)

    @property
    def num_targets(self) -> int:
        """Tokens that enter the loss."""
        return sum(s.text.size - 1 for s in self.segments)


@dataclass(frozen=True, eq=False)
class DocumentSteps(Stream):
    """Sequences of variable length, by step.

    Sequences are shuffled by ``seed`` and filled into steps in that order, so that each step's lengths are
    a fair draw. Which sequences share a step is decided once per run; the order of the steps changes every
    epoch. A sample of this stream, in the sense of ``Cursor``, is a step.

    Attributes:
        documents: where the text is.
        token_budget: no step has more tokens.
        longest: no sequence has more tokens.
        seed: 0 or more.
        overlong: what happens to documents of more than ``longest`` tokens.
        alignment: a sequence takes its length, rounded up to this, out of the budget.

    Raises:
        DataError: a setting is out of range, ``longest`` is over the budget, a document is refused, or
            there is nothing to predict.
    """

    documents: Documents
    token_budget: int
    longest: int
    seed: int = 0
    overlong: Overlong = Overlong.SPLIT
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise DataError(f"alignment is {self.alignment}: give 1 or more")
        padded = -(-self.longest // self.alignment) * self.alignment
        if padded > self.token_budget:
            raise DataError(
                f"a sequence may have {self.longest} tokens, {padded} when aligned to {self.alignment}, and a step "
                f"{self.token_budget}: raise the budget or lower the longest length"
            )
        if not self.pieces.targets.any():
            raise DataError(f"{len(self.documents)} documents leave no token to predict: give longer ones")
        _ = self._order

    @cached_property
    def pieces(self) -> DocumentPieces:
        """The documents cut to ``longest``, with the counts of what was cut and dropped."""
        return cut(self.documents.lengths, self.longest, self.overlong)

    @cached_property
    def bins(self) -> Bins:
        """The pieces of each step, by the step's number in the corpus."""
        order = shuffled(np.arange(len(self.pieces)), self.seed)
        groups = group_in_order(self.pieces.length[order], self.token_budget, alignment=self.alignment)
        return Bins(order[groups.members], groups.starts)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that hold every sequence once."""
        return len(self.bins)

    def lengths(self, step: int) -> NDArray[np.int64]:
        """int64 (sequences,), tokens of each sequence of ``step``; no text is read."""
        return self.pieces.length[self._members(step)]

    @property
    def batch_size(self) -> int:
        """Samples of the stream that a batch takes."""
        return 1

    def take(self, sample: int, count: int) -> DocumentBatch:
        """The sequences of ``count`` steps from ``sample`` on."""
        steps = range(sample, sample + count)
        return DocumentBatch(tuple(segment for step in steps for segment in self[step].segments))

    def __getitem__(self, step: int) -> DocumentBatch:
        """The sequences of ``step``."""
        members = self._members(step).tolist()
        return DocumentBatch(tuple(read_piece(self.documents, self.pieces, piece) for piece in members))

    @cached_property
    def digest(self) -> str:
        """Names the steps and their order."""
        settings = {"budget": self.token_budget, "longest": self.longest, "seed": self.seed}
        return stream_digest(
            self.bins, self._order, kind="documents", overlong=self.overlong.value, alignment=self.alignment, **settings
        )

    @cached_property
    def _order(self) -> grain.MapDataset[int]:
        return endless_order(len(self.bins), self.seed)

    def _members(self, step: int) -> NDArray[np.int64]:
        if step < 0:
            raise DataError(f"step {step} is negative: steps count from 0")
        return self.bins[item(self._order, step)]
