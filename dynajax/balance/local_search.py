"""Local search: relieve the bin that finishes last, by moving one item out of it or swapping two.

Dispatch (sequences to pipelines) and packing (sequences to micro-batches) are the same search: bins
that need not be alike, items whose time depends on the kind of bin, and a price of a filled bin. In
every step all moves and swaps of the last bin with the others are priced at once, and the one is made
after which the later of its two bins finishes earliest. The search stops when no step helps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dynajax.types import Floats, Ints

NEVER = 1e15
"""Time in ms of an item on a bin that cannot take it: finite, so that sums and quotients stay numbers."""
_NOISE = 1e-5  # relative gain below which a step is not worth its time
_ITEMS = 20  # of a fuller bin, only so many items are tried, of all sizes
_ALL_PARTNERS = 24  # with more bins than this, only some of each kind are tried as partners
_PARTNERS = 6

Finish = Callable[[Ints, Floats, Floats, Ints, Ints], Floats]
"""``finish(bins, load, longest, tokens, items)``: ms at which bins so filled are done.

``load`` is the sum and ``longest`` the largest of the items' times in ms, ``tokens`` the sum of their
lengths, ``items`` how many there are. All arguments broadcast.
"""


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """What is to be shared out.

    Attributes:
        times: float64 (kinds, items), ms of an item on a kind of bin; ``NEVER`` if it does not fit.
        kind: int64 (bins,), the kind of each bin.
        tokens: int64 (items,), length of each item.
        finish: the price of a filled bin.
        may_empty: whether a bin may lose its last item.
    """

    times: Floats
    kind: Ints
    tokens: Ints
    finish: Finish
    may_empty: bool = False


@dataclass(frozen=True)
class Swap:
    """Item ``give`` goes from bin ``source`` to bin ``target``, item ``take`` the other way (-1: none, a move)."""

    source: int
    target: int
    give: int
    take: int


def apply_swap(bins: Ints, swap: Swap) -> None:
    """Make ``swap`` in ``bins``, the bin of each item."""
    bins[swap.give] = swap.target
    if swap.take >= 0:
        bins[swap.take] = swap.source


class Assignment:
    """Which bin holds each item, with the sums that pricing needs.

    Attributes:
        bins: int64 (items,), the bin of each item.
        done: float64 (bins,), ms at which each bin is done.
    """

    def __init__(self, problem: SearchProblem, bins: Ints) -> None:
        count = problem.kind.size
        self.bins = bins.copy()
        self.done = np.zeros(count)
        self._problem = problem
        self._load, self._longest, self._second = np.zeros(count), np.zeros(count), np.zeros(count)
        self._tokens, self._items = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._recount(np.arange(count))

    def members(self) -> list[Ints]:
        """The items of each bin."""
        ranked = np.argsort(self.bins, kind="stable")
        return np.split(ranked, np.bincount(self.bins, minlength=self.done.size).cumsum()[:-1])

    def improve(self, steps: int) -> None:
        """Make the best swap, at most ``steps`` times, as long as there is one that helps."""
        for _ in range(steps):
            source = int(self.done.argmax())
            found = self.swaps(source, 1, self.done[source] * (1 - _NOISE))
            if not found:
                return
            self.apply(found[0])

    def apply(self, swap: Swap) -> None:
        """Make ``swap``."""
        apply_swap(self.bins, swap)
        self._recount(np.array([swap.source, swap.target]))

    def swaps(self, source: int, count: int, limit: float = NEVER) -> list[Swap]:
        """At most ``count`` swaps after which ``source`` and its partner are done before ``limit``, best first."""
        partners = self._partners(source)
        near = np.zeros(self.done.size, bool)
        near[partners] = True
        mine = self._sample(np.flatnonzero(self.bins == source), _ITEMS)
        theirs = self._sample(np.flatnonzero(near[self.bins]), _ITEMS * partners.size)
        owners = np.concatenate([self.bins[theirs], partners])  # swaps first, then plain moves
        if not mine.size or not owners.size:
            return []
        later = self._later(source, mine, theirs, owners)
        order = [later.argmin()] if count == 1 else np.argsort(later, axis=None, kind="stable")[:count]
        found: list[Swap] = []
        for row, column in (divmod(int(flat), owners.size) for flat in order):
            if later[row, column] >= limit:
                break
            take = int(theirs[column]) if column < theirs.size else -1
            found.append(Swap(source, int(owners[column]), int(mine[row]), take))
        return found

    def _later(self, source: int, mine: Ints, theirs: Ints, owners: Ints) -> Floats:
        """When the later of the two bins is done, (items of source, swaps and moves)."""
        times, kind, tokens, finish = (
            self._problem.times,
            self._problem.kind,
            self._problem.tokens,
            self._problem.finish,
        )
        moves = owners.size - theirs.size
        mine_here, theirs_here = times[kind[source], mine], np.append(times[kind[source], theirs], np.zeros(moves))
        theirs_there = np.append(times[kind[owners[: theirs.size]], theirs], np.zeros(moves))
        mine_there = times[kind[owners], mine[:, None]]
        more_tokens = np.append(tokens[theirs], np.zeros(moves, np.int64)) - tokens[mine][:, None]
        more_items = np.append(np.zeros(theirs.size, np.int64), np.full(moves, -1))
        source_done = finish(
            np.array(source),
            self._load[source] - mine_here[:, None] + theirs_here,
            np.maximum(self._longest_without(source, mine_here)[:, None], theirs_here),
            self._tokens[source] + more_tokens,
            self._items[source] + more_items,
        )
        owner_done = finish(
            owners,
            self._load[owners] - theirs_there + mine_there,
            np.maximum(self._longest_without(owners, theirs_there), mine_there),
            self._tokens[owners] - more_tokens,
            self._items[owners] - more_items,
        )
        later = np.maximum(source_done, owner_done)
        if self._items[source] == 1 and not self._problem.may_empty:
            later[:, theirs.size :] = NEVER
        return later

    def _sample(self, items: Ints, count: int) -> Ints:
        """At most ``count`` of ``items``, evenly over their lengths."""
        if items.size <= count:
            return items
        ranked = items[np.argsort(self._problem.tokens[items], kind="stable")]
        return ranked[np.linspace(0, items.size - 1, count).round().astype(np.int64)]

    def _longest_without(self, bins: Ints | int, leaving: Floats) -> Floats:
        return np.where(leaving == self._longest[bins], self._second[bins], self._longest[bins])

    def _partners(self, source: int) -> Ints:
        """The bins to trade with: all others if they are few, else the earliest of each kind."""
        kind = self._problem.kind
        others = np.flatnonzero(np.arange(kind.size) != source)
        if others.size <= _ALL_PARTNERS:
            return others
        early = others[np.argsort(self.done[others], kind="stable")]
        first = [early[kind[early] == k][:_PARTNERS] for k in range(self._problem.times.shape[0])]
        return np.sort(np.concatenate(first))

    def _recount(self, bins: Ints) -> None:
        """Sums and ends of ``bins`` after their items changed."""
        problem = self._problem
        slot_of = np.full(self.done.size, -1)
        slot_of[bins] = np.arange(bins.size)
        items = np.flatnonzero(slot_of[self.bins] >= 0)
        slots, times = slot_of[self.bins[items]], problem.times[problem.kind[self.bins[items]], items]
        ranked = np.concatenate([[0.0, 0.0], times[np.lexsort((times, slots))]])
        held = np.bincount(slots, minlength=bins.size)
        last = held.cumsum() + 1  # in ranked
        self._items[bins] = held
        self._load[bins] = np.bincount(slots, times, bins.size)
        self._tokens[bins] = np.bincount(slots, problem.tokens[items], bins.size)
        self._longest[bins] = np.where(held > 0, ranked[last], 0.0)
        self._second[bins] = np.where(held > 1, ranked[last - 1], 0.0)
        self.done[bins] = problem.finish(
            bins, self._load[bins], self._longest[bins], self._tokens[bins], self._items[bins]
        )
