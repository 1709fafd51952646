"""Packing: which pieces of which documents share a row.

Everything here is computed from lengths alone, so a plan costs no reading and is the same on every process. ``cut``
makes pieces of documents that are too long, by a policy that the caller names. Then either ``pack_rows`` packs the
pieces tightly into rows of one length, or ``group_in_order`` groups them, in their order, under a budget of tokens.
Every piece lands in exactly one bin.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike

from dynajax.errors import DataError
from dynajax.types import Ints

WINDOW = 4096
"""Pieces that are packed together: bounds the work, and lets the seed decide which pieces meet."""

_RESERVED = (1, 2, 3, 4, 6, 8, 12)  # short pieces per bin to try, see _fill_bins


class Overlong(Enum):
    """What happens to a document that is longer than allowed."""

    ERROR = "error"
    """It is refused."""
    TRUNCATE = "truncate"
    """Its first tokens are kept; the rest is dropped, and counted."""
    SPLIT = "split"
    """It becomes several pieces, each a segment of its own with positions from 0. No token is dropped."""


@dataclass(frozen=True, eq=False)
class DocumentPieces:
    """Documents after the cut: piece i is ``length[i]`` tokens of ``document[i]`` from ``start[i]``.

    Pieces are in the order of the documents and, inside one, of the text. Empty documents have none.

    Attributes:
        document: int64 (pieces,), number of the document.
        start: int64 (pieces,), first token, counted in the document.
        length: int64 (pieces,), tokens, at least 1.
        targets: int64 (pieces,), tokens that have a next one to predict. A token's target is the next
            token of its document, also across a split; the last token of a document has none, and a
            truncated document ends where it was cut.
        dropped_tokens: tokens that are in no piece.
        cut_documents: documents that were truncated or split.
        empty_documents: documents without a token.
    """

    document: Ints
    start: Ints
    length: Ints
    targets: Ints
    dropped_tokens: int
    cut_documents: int
    empty_documents: int

    def __len__(self) -> int:
        return len(self.length)


def cut(lengths: ArrayLike, longest: int, overlong: Overlong) -> DocumentPieces:
    """Pieces of at most ``longest`` tokens out of documents of ``lengths`` tokens.

    Raises:
        DataError: ``longest`` is below 1, or a document is longer and the policy is ``ERROR``.
    """
    sizes = np.asarray(lengths, np.int64).reshape(-1)
    if longest < 1:
        raise DataError(f"the longest piece is {longest} tokens: give 1 or more")
    over = np.flatnonzero(sizes > longest)
    if over.size and overlong is Overlong.ERROR:
        raise DataError(
            f"document {over[0]} has {sizes[over[0]]} tokens and the limit is {longest} "
            f"({over.size} of {sizes.size} documents are over, the longest has {sizes.max()}): "
            "choose truncate or split, or raise the limit"
        )
    kept = sizes if overlong is Overlong.SPLIT else np.minimum(sizes, longest)
    counts = -(-kept // longest)
    document = np.repeat(np.arange(sizes.size), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(document.size) - first) * longest
    length = np.minimum(longest, kept[document] - start)
    is_last = start + length == kept[document]
    return DocumentPieces(
        document,
        start,
        length,
        length - is_last,
        dropped_tokens=int((sizes - kept).sum()),
        cut_documents=int(over.size),
        empty_documents=int((sizes == 0).sum()),
    )


@dataclass(frozen=True, eq=False)
class Bins:
    """A partition of pieces: bin b holds ``members[starts[b]:starts[b + 1]]``, in increasing order if packed.

    Attributes:
        members: int64 (pieces,), piece numbers, each once.
        starts: int64 (bins + 1,).
    """

    members: Ints
    starts: Ints

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Ints:
        if not 0 <= index < len(self):
            raise IndexError(f"bin {index} of {len(self)}")
        return self.members[self.starts[index] : self.starts[index + 1]]


def pack_rows(lengths: ArrayLike, capacity: int, max_segments: int, *, seed: int = 0, window: int = WINDOW) -> Bins:
    """Few bins of ``capacity`` tokens and at most ``max_segments`` pieces that hold every piece once.

    Pieces are shuffled by ``seed`` and packed window by window, longest first (first-fit decreasing, hence
    at most 11/9 of the fewest possible bins, plus one, where ``max_segments`` does not bind).

    Raises:
        DataError: a piece is longer than ``capacity`` or shorter than 1, a limit is below 1, or the seed below 0.
    """
    sizes = _checked(lengths, capacity)
    if max_segments < 1 or window < 1:
        raise DataError(f"max_segments={max_segments}, window={window}: both must be 1 or more")
    alone = (sizes == capacity) if max_segments > 1 else np.ones(sizes.size, bool)
    bin_of = np.empty(sizes.size, np.int64)
    bin_of[alone] = np.arange(alone.sum())
    bins = int(alone.sum())
    shared = shuffled(np.flatnonzero(~alone), seed)
    for at in range(0, shared.size, window):
        pieces = shared[at : at + window]
        placed = _fewest_bins(sizes[pieces].tolist(), capacity, max_segments)
        bin_of[pieces] = bins + np.array(placed, np.int64)
        bins += max(placed) + 1
    counts = np.bincount(bin_of, minlength=bins)
    return Bins(np.argsort(bin_of, kind="stable"), np.concatenate([[0], np.cumsum(counts)]))


def group_in_order(lengths: ArrayLike, budget: int, *, alignment: int = 1) -> Bins:
    """Consecutive pieces, in the order given, in groups of at most ``budget`` tokens.

    A piece counts with its length rounded up to ``alignment``. Groups are closed when the next piece does
    not fit, so there may be more of them than total / budget.

    Raises:
        DataError: a piece, rounded up, is longer than ``budget`` or shorter than 1, or a limit is below 1.
    """
    if alignment < 1:
        raise DataError(f"alignment={alignment}: give 1 or more")
    sizes = -(-np.asarray(lengths, np.int64).reshape(-1) // alignment) * alignment
    ends = np.cumsum(_checked(sizes, budget))
    starts = [0]
    while starts[-1] < sizes.size:
        taken = ends[starts[-1] - 1] if starts[-1] else 0
        starts.append(int(np.searchsorted(ends, taken + budget, side="right")))
    return Bins(np.arange(sizes.size), np.array(starts, np.int64))


def shuffled(items: Ints, seed: int) -> Ints:
    """``items`` in an order that depends on ``seed`` alone.

    Raises:
        DataError: the seed is negative.
    """
    if seed < 0:
        raise DataError(f"seed {seed} is negative: give 0 or more")
    return np.random.Generator(np.random.PCG64(seed)).permutation(items)


def _checked(lengths: ArrayLike, capacity: int) -> Ints:
    sizes = np.asarray(lengths, np.int64).reshape(-1)
    if capacity < 1:
        raise DataError(f"a capacity of {capacity} tokens holds nothing: give 1 or more")
    if sizes.size and sizes.min() < 1:
        raise DataError(f"piece {sizes.argmin()} has {sizes.min()} tokens: leave out empty pieces")
    if sizes.size and sizes.max() > capacity:
        raise DataError(
            f"piece {sizes.argmax()} has {sizes.max()} tokens and a bin holds {capacity}: "
            "truncate or split it first, or raise the capacity"
        )
    return sizes


def _fewest_bins(lengths: Sequence[int], capacity: int, max_segments: int) -> list[int]:
    """The bin of each length, with the best of a few numbers of short pieces reserved for each bin."""
    bound = max(-(-sum(lengths) // capacity), -(-len(lengths) // max_segments))
    best = _fill_bins(lengths, capacity, max_segments, reserved=0)
    if np.bincount(best).max() < max_segments:
        return best
    for reserved in _RESERVED:
        if max(best) + 1 == bound or reserved >= max_segments:
            break
        best = min(best, _fill_bins(lengths, capacity, max_segments, reserved), key=max)
    return best


def _fill_bins(lengths: Sequence[int], capacity: int, max_segments: int, reserved: int) -> list[int]:
    """The bin of each length. A bin gets the longest piece left, ``reserved`` short ones, then what fits best.

    With none reserved this is first-fit decreasing. That leaves the short pieces to the end, where the bound
    on segments closes bins half empty; to spread them over all bins is what ``reserved`` is for.
    """
    base = len(lengths)
    left = sorted(length * base + piece for piece, length in enumerate(lengths))
    placed, low, bins = [0] * base, 0, 0  # left[:low] is used up from the short end
    while low < len(left):
        length, piece = divmod(left.pop(), base)
        space, slots = capacity - length, max_segments - 1
        placed[piece] = bins
        while slots and low < len(left):
            if slots >= max_segments - reserved and left[low] < (space + 1) * base:
                at, low = low, low + 1
                length, piece = divmod(left[at], base)
            else:
                at = bisect_left(left, (space + 1) * base, low)
                if at == low:
                    break
                length, piece = divmod(left.pop(at - 1), base)
            placed[piece] = bins
            space, slots = space - length, slots - 1
        bins += 1
    return placed
