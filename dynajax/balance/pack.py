"""Packing: which sequences of a pipeline share a micro-batch.

``fewest`` makes as few micro-batches as it can, ``balanced`` makes a given number of like price; both
keep every micro-batch within a number of tokens and of sequences. ``neighbours`` does the same with packs of
neighbours in length only. ``order`` says in which order unequal micro-batches enter a pipeline.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

import numpy as np

from dynajax.balance.local_search import NEVER, Assignment, SearchProblem
from dynajax.errors import BalanceError
from dynajax.types import Floats, Ints

Packs = list[list[int]]
"""Micro-batches, each a list of positions in the lengths that were given."""

_STEPS_PER_PACK = 8


def fewest(tokens: Sequence[int], room: int, max_segments: int) -> Packs:
    """Few packs of at most ``room`` tokens and ``max_segments`` sequences (best fit, longest first).

    Raises:
        BalanceError: a sequence is longer than ``room``.
    """
    packs: Packs = []
    open_packs: list[tuple[int, int]] = []  # (room left, pack), sorted
    for item in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        size = tokens[item]
        if size > room:
            raise BalanceError(f"a sequence of {size} tokens cannot go into micro-batches of at most {room}")
        at = bisect_left(open_packs, (size, -1))
        if at == len(open_packs):
            left, pack = room, len(packs)
            packs.append([])
        else:
            left, pack = open_packs.pop(at)
        packs[pack].append(item)
        if len(packs[pack]) < max_segments:
            insort(open_packs, (left - size, pack))
    return packs


def balanced(
    times: Sequence[float], tokens: Sequence[int], count: int, room: int, max_segments: int, *, search: bool = True
) -> Packs | None:
    """``count`` packs of like time within ``room`` and ``max_segments``, or None if none were found.

    Each sequence, the most expensive first, goes to the cheapest pack that has room; then local search.

    Args:
        times: ms of each sequence.
        tokens: length of each sequence.
        count: packs, none of them empty: at most the number of sequences.
        room: most tokens of a pack.
        max_segments: most sequences of a pack.
        search: whether to search after the first assignment.
    """
    if count > len(tokens):
        return None
    packs = _cheapest_first(times, tokens, count, room, max_segments)
    if packs is None:
        packs = _spread(fewest(tokens, room, max_segments), count)
    if packs is None or not search or count < 2:
        return packs
    bins = np.empty(len(tokens), np.int64)
    for index, pack in enumerate(packs):
        bins[pack] = index

    def finish(_: Ints, load: Floats, longest: Floats, held: Ints, items: Ints) -> Floats:
        return np.where((held <= room) & (items <= max_segments), load, NEVER)

    kind = np.zeros(count, np.int64)
    problem = SearchProblem(np.asarray(times, np.float64)[None], kind, np.asarray(tokens, np.int64), finish)
    found = Assignment(problem, bins)
    found.improve(_STEPS_PER_PACK * count)
    return [np.flatnonzero(found.bins == index).tolist() for index in range(count)]


def order(times: Sequence[float]) -> list[int]:
    """Positions of micro-batches so that the cheap ones are at both ends and the expensive in the middle.

    The first forwards and the last backwards have the bubbles, which are as long as they are.
    """
    ranked = sorted(range(len(times)), key=lambda i: (times[i], i))
    return ranked[::2] + ranked[1::2][::-1]


def neighbours(times: Sequence[float], tokens: Sequence[int], count: int, room: int, max_segments: int) -> Packs | None:
    """``balanced`` with packs of neighbours in length only; the best of those, by dynamic programme."""
    ranked = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    sums, held = (np.concatenate([[0], np.cumsum([values[i] for i in ranked])]) for values in (times, tokens))
    items = np.arange(len(tokens) + 1)
    wide = items[None, :] - items[:, None]
    fits = (wide > 0) & (wide <= max_segments) & (held[None, :] - held[:, None] <= room)
    pack = np.where(fits, sums[None, :] - sums[:, None], np.inf)  # (start, stop)
    heaviest, cuts = np.append(0.0, np.full(len(tokens), np.inf)), []
    for _ in range(count):
        ends = np.maximum(heaviest[:, None], pack)
        cuts.append(ends.argmin(axis=0))
        heaviest = ends.min(axis=0)
    if not np.isfinite(heaviest[-1]):
        return None
    packs: Packs = []
    stop = len(tokens)
    for came_from in reversed(cuts):
        packs.insert(0, ranked[came_from[stop] : stop])
        stop = int(came_from[stop])
    return packs


def _cheapest_first(
    times: Sequence[float], tokens: Sequence[int], count: int, room: int, max_segments: int
) -> Packs | None:
    """The most expensive sequence first, each to the cheapest pack that has room; None if it gets stuck."""
    packs: Packs = [[] for _ in range(count)]
    held = [0] * count
    cheapest = [(0.0, pack) for pack in range(count)]
    for item in sorted(range(len(tokens)), key=lambda i: (-times[i], i)):
        size = tokens[item]
        passed: list[tuple[float, int]] = []
        while cheapest and (held[cheapest[0][1]] + size > room or len(packs[cheapest[0][1]]) >= max_segments):
            passed.append(heappop(cheapest))
        if not cheapest:
            return None
        load, pack = cheapest[0]
        heapreplace(cheapest, (load + times[item], pack))
        packs[pack].append(item)
        held[pack] += size
        for entry in passed:
            heappush(cheapest, entry)
    return packs


def _spread(packs: Packs, count: int) -> Packs | None:
    """Single sequences out of the fullest packs until there are ``count``; None if there are more already."""
    while len(packs) < count:
        fullest = max(packs, key=len)
        packs = [*packs, [fullest.pop()]]
    return packs if len(packs) == count else None
