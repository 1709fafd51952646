"""Packing against trying everything, HiGHS and lower bounds; caps and segments as properties."""

import itertools

import numpy as np
import pytest
from balance.price_lists import LARGE, SMALL, long_tailed
from balance.referee import exact_packing, lightest_ms, milp_packing
from hypothesis import given
from hypothesis import strategies as st

from dynajax.balance.lengths import LengthBatches, shipped_lengths
from dynajax.balance.pack import balanced, fewest, neighbours, order
from dynajax.errors import BalanceError

MANY = 10**9
TOKENS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def heaviest(packs: list[list[int]], times: np.ndarray) -> float:
    return max(float(times[pack].sum()) for pack in packs)


def assert_partition(packs: list[list[int]], tokens: list[int], room: int, segments: int) -> None:
    assert sorted(i for pack in packs for i in pack) == list(range(len(tokens)))
    assert all(1 <= len(pack) <= segments and sum(tokens[i] for i in pack) <= room for pack in packs)


@given(TOKENS, st.integers(60, 200), st.integers(1, 8))
def test_fewest_keeps_room_and_segments(tokens, room, segments):
    packs = fewest(tokens, room, segments)
    assert_partition(packs, tokens, room, segments)
    least = max(-(-sum(tokens) // room), -(-len(tokens) // segments))
    assert len(packs) <= 2 * least + 1


@given(TOKENS, st.integers(60, 200), st.integers(1, 8), st.data())
def test_balanced_makes_the_number_asked_for_within_the_caps(tokens, room, segments, data):
    few = len(fewest(tokens, room, segments))
    count = data.draw(st.integers(few, len(tokens)))
    packs = balanced([float(t) for t in tokens], tokens, count, room, segments)
    assert packs is not None  # ``fewest`` shows that it can be done
    assert len(packs) == count
    assert_partition(packs, tokens, room, segments)


def test_ceil_of_the_sum_is_only_a_lower_bound():
    packs = fewest([7] * 8, 8, MANY)
    assert len(packs) == 8
    assert balanced([1.0] * 8, [7] * 8, 7, 8, MANY) is None
    assert fewest([20], 20, MANY) == [[0]]
    with pytest.raises(BalanceError, match=r"21 tokens cannot go into micro-batches of at most 20"):
        fewest([21], 20, MANY)


def test_segments_of_a_row_are_bounded():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 3, 40).tolist()
    assert_partition(fewest(tokens, 64, 8), tokens, 64, 8)
    assert len(fewest(tokens, 64, 8)) == 5


def test_long_goes_with_short():
    tokens = [1, 2, 1000, 1001]
    packs = balanced(SMALL.times(tokens).tolist(), tokens, 2, 3000, MANY)
    assert packs is not None
    assert sorted(sorted(tokens[i] for i in pack) for pack in packs) == [[1, 1001], [2, 1000]]


def test_packing_is_near_the_exact_one_on_small_cases():
    rng = np.random.default_rng(1)
    gaps = []
    for _ in range(240):
        count = int(rng.integers(2, 4))
        tokens = long_tailed(rng, int(rng.integers(count, 8 if count == 3 else 11)), 30_000)
        room = int(max(tokens.max(), tokens.sum() / count * rng.uniform(1.05, 2)))
        times = LARGE.a * tokens**2 + LARGE.b * tokens
        exact = exact_packing(times, tokens, count, room).ms
        packs = balanced(times.tolist(), tokens.tolist(), count, room, MANY)
        assert (packs is None) == np.isinf(exact)
        if packs is None:
            continue
        gaps.append(heaviest(packs, times) / exact - 1)
        assert lightest_ms(times, count) <= exact * (1 + 1e-12)
    assert len(gaps) > 200
    assert min(gaps) > -1e-9
    assert np.mean(gaps) < 0.003
    assert max(gaps) < 0.05


@pytest.mark.parametrize("count", [25, 100, 400])
def test_packing_is_at_the_lower_bound_on_wikipedia_lengths(count):
    tokens = LengthBatches(shipped_lengths("wikipedia"), 1100 * count, 16_384, seed=count).batch(0).tokens[:count]
    times = LARGE.times(tokens)
    packs_wanted = max(2, -(-int(tokens.sum()) // 28_000))
    packs = balanced(times.tolist(), tokens.tolist(), packs_wanted, LARGE.max_len, MANY)
    assert packs is not None
    assert heaviest(packs, times) <= 1.005 * lightest_ms(times, packs_wanted)


def test_packing_is_as_good_as_highs():
    tokens = long_tailed(np.random.default_rng(5), 24, 8_000)
    times = LARGE.times(tokens)
    referee = milp_packing(times, tokens, 4, 30_000, seconds=2.0)
    packs = balanced(times.tolist(), tokens.tolist(), 4, 30_000, MANY)
    assert packs is not None
    assert heaviest(packs, times) <= 1.005 * referee.ms
    assert heaviest(packs, times) >= referee.bound * (1 - 1e-6)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_neighbours_are_the_best_cut_into_intervals(tokens, count):
    from itertools import combinations

    ranked = sorted(tokens, reverse=True)
    cuts = ([0, *c, len(ranked)] for c in combinations(range(1, len(ranked)), count - 1))
    sums = ([sum(ranked[i:j]) for i, j in itertools.pairwise(cut)] for cut in cuts)
    best = min((max(s) for s in sums if max(s) <= 120), default=None)
    packs = neighbours([float(t) for t in tokens], tokens, count, 120, MANY)
    if best is None:
        assert packs is None
        return
    assert packs is not None
    assert_partition(packs, tokens, 120, MANY)
    assert max(sum(tokens[i] for i in pack) for pack in packs) == best


@given(st.lists(st.floats(0, 10), max_size=9))
def test_order_is_a_permutation_that_rises_and_falls(times):
    at = order(times)
    assert sorted(at) == list(range(len(times)))
    ordered = [times[i] for i in at]
    peak = max(range(len(at)), key=ordered.__getitem__, default=0)
    assert ordered[: peak + 1] == sorted(ordered[: peak + 1])
    assert ordered[peak:] == sorted(ordered[peak:], reverse=True)
