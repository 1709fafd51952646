"""Cutting, packing and grouping: plain-Python references, brute force on small cases, properties on the rest."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.data.packing import Bins, Overlong, cut, group_in_order, pack_rows
from dynajax.errors import DataError

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def contents(bins: Bins) -> list[list[int]]:
    return [bins[i].tolist() for i in range(len(bins))]


def reference_cut(lengths: list[int], longest: int, overlong: Overlong) -> list[tuple[int, int, int, int]]:
    pieces = []
    for document, length in enumerate(lengths):
        kept = min(length, longest) if overlong is Overlong.TRUNCATE else length
        for start in range(0, kept, longest):
            stop = min(start + longest, kept)
            pieces.append((document, start, stop - start, min(stop, kept - 1) - start))
    return pieces


def fewest_bins(lengths: list[int], capacity: int, max_segments: int) -> int:
    """By trying every assignment: the longest first, each into any open bin or one new one."""

    def search(at: int, bins: tuple[tuple[int, int], ...], best: int) -> int:
        if len(bins) >= best:
            return best
        if at == len(lengths):
            return len(bins)
        length = lengths[at]
        for space, slots in set(bins):
            if space >= length and slots:
                rest = list(bins)
                rest.remove((space, slots))
                best = search(at + 1, tuple(sorted([*rest, (space - length, slots - 1)])), best)
        return search(at + 1, tuple(sorted([*bins, (capacity - length, max_segments - 1)])), best)

    return search(0, (), len(lengths) + 1)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 30), max_size=20), st.integers(1, 12), st.sampled_from([Overlong.SPLIT, Overlong.TRUNCATE])
)
def test_cut_equals_the_loop(lengths: list[int], longest: int, overlong: Overlong):
    pieces = cut(lengths, longest, overlong)
    columns = (pieces.document, pieces.start, pieces.length, pieces.targets)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert found == reference_cut(lengths, longest, overlong)
    assert pieces.dropped_tokens == sum(lengths) - pieces.length.sum()
    assert pieces.dropped_tokens == 0 or overlong is Overlong.TRUNCATE
    assert pieces.cut_documents == sum(length > longest for length in lengths)
    assert pieces.empty_documents == lengths.count(0)


def test_every_target_of_a_split_document_is_predicted():
    pieces = cut([10], 4, Overlong.SPLIT)
    assert pieces.length.tolist() == [4, 4, 2]
    assert pieces.targets.tolist() == [4, 4, 1]
    assert cut([10], 4, Overlong.TRUNCATE).targets.tolist() == [3]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(LENGTHS, st.integers(40, 70), st.integers(1, 9), st.integers(0, 3), st.integers(1, 30))
def test_pack_places_every_piece_once_within_both_limits(lengths, capacity, max_segments, seed, window):
    bins = pack_rows(lengths, capacity, max_segments, seed=seed, window=window)
    assert sorted(bins.members.tolist()) == list(range(len(lengths)))
    for members in contents(bins):
        assert 1 <= len(members) <= max_segments
        assert sum(lengths[i] for i in members) <= capacity
        assert members == sorted(members)
    again = pack_rows(np.array(lengths), capacity, max_segments, seed=seed, window=window)
    assert contents(again) == contents(bins)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(20, 30))
def test_pack_is_close_to_the_fewest_bins(lengths: list[int], capacity: int):
    fewest = fewest_bins(sorted(lengths, reverse=True), capacity, len(lengths))
    assert fewest <= len(pack_rows(lengths, capacity, len(lengths))) <= 11 / 9 * fewest + 6 / 9


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(20, 30), st.integers(2, 3))
def test_pack_is_close_to_the_fewest_bins_when_segments_bind(lengths: list[int], capacity: int, max_segments: int):
    fewest = fewest_bins(sorted(lengths, reverse=True), capacity, max_segments)
    assert fewest <= len(pack_rows(lengths, capacity, max_segments)) <= fewest + 1


@pytest.mark.parametrize(("max_segments", "excess"), [(8, 0.025), (16, 0.01), (1000, 0.005)])
def test_packing_of_a_long_tail_stays_near_the_bound(max_segments: int, excess: float):
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.3, 20_000), 1, 4096).astype(int)
    bound = max(lengths.sum() / 4096, len(lengths) / max_segments)
    assert len(pack_rows(lengths, 4096, max_segments)) <= (1 + excess) * bound


def test_the_seed_decides_which_pieces_meet():
    lengths = np.random.default_rng(0).integers(1, 100, 3000)
    packed = [contents(pack_rows(lengths, 128, 8, seed=seed, window=256)) for seed in (0, 1)]
    assert packed[0] != packed[1]


def test_a_hundred_thousand_pieces():
    lengths = np.random.default_rng(0).integers(1, 4097, 100_000)
    bins = pack_rows(lengths, 4096, 16)
    sums = np.add.reduceat(lengths[bins.members], bins.starts[:-1])
    assert sums.max() <= 4096
    assert sums.mean() > 0.98 * 4096
    assert np.array_equal(np.sort(bins.members), np.arange(100_000))


def reference_group(lengths: list[int], budget: int, alignment: int) -> list[list[int]]:
    groups: list[list[int]] = []
    used = budget
    for i, length in enumerate(lengths):
        size = length
        while size % alignment:
            size += 1
        if used + size > budget:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += size
    return groups


@settings(derandomize=True, deadline=None, max_examples=200)
@given(LENGTHS, st.integers(48, 120), st.sampled_from([1, 3, 16]))
def test_group_equals_the_loop(lengths: list[int], budget: int, alignment: int):
    assert contents(group_in_order(lengths, budget, alignment=alignment)) == reference_group(lengths, budget, alignment)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cut([3, 9, 7], 4, Overlong.ERROR), ["document 1", "9", "4", "2 of 3", "truncate or split"]),
        (lambda: cut([1], 0, Overlong.SPLIT), ["0", "1 or more"]),
        (lambda: pack_rows([3, 21], 20, 4), ["piece 1", "21", "20"]),
        (lambda: pack_rows([3, 0], 20, 4), ["piece 1", "0 tokens"]),
        (lambda: pack_rows([3], 0, 4), ["capacity of 0"]),
        (lambda: pack_rows([3], 20, 0), ["max_segments=0"]),
        (lambda: pack_rows([3], 20, 2, seed=-1), ["seed -1"]),
        (lambda: group_in_order([17], 31, alignment=16), ["32", "31"]),
        (lambda: group_in_order([17], 31, alignment=0), ["alignment=0"]),
    ],
)
def test_what_cannot_be_packed_is_refused_with_its_numbers(call, words: list[str]):
    with pytest.raises(DataError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_nothing_packs_into_no_bins():
    assert len(pack_rows([], 8, 2)) == len(group_in_order([], 8)) == len(cut([], 8, Overlong.SPLIT)) == 0
    with pytest.raises(IndexError):
        pack_rows([3], 8, 2)[1]
