"""Dispatch against trying everything, HiGHS and the linear programme; MaxLen, work for everyone, worked examples."""

from collections import Counter

import numpy as np
import pytest
from balance.dispatch_bounds import lp_dispatch_ms, lp_staged_ms
from balance.price_lists import DEEP, DEEPEST, KINDS, LARGE, LENGTHS, MIDDLE, SMALL, long_tailed, price
from balance.referee import exact_dispatch, milp_dispatch
from hypothesis import given
from hypothesis import strategies as st

from dynajax.balance.bound import any_strategy_ms, candidate_bound
from dynajax.balance.compare import setting
from dynajax.balance.cost import costs_of
from dynajax.balance.dispatch import assign, dispatch
from dynajax.balance.estimate import PUBLISHED
from dynajax.balance.lengths import LengthBatches, shipped_lengths
from dynajax.balance.profiles import load_profile
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy

SHARED = setting(load_profile("32b"), 64, 32_768)


@given(LENGTHS, st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), st.booleans())
def test_every_sequence_goes_once_to_a_pipeline_that_holds_it(lengths, costs, may_idle):
    tokens = np.array(lengths, np.int64)
    kinds = tuple(dict.fromkeys(costs))
    kind = np.array([kinds.index(cost) for cost in costs])
    if tokens.size and tokens.max() > max(cost.max_len for cost in costs):
        with pytest.raises(BalanceError, match=f"{tokens.max()} tokens"):
            assign(tokens, kinds, kind)
        return
    found = assign(tokens, kinds, kind, may_idle=may_idle)
    assert found.bins.shape == tokens.shape
    assert all(size <= costs[bin].max_len for size, bin in zip(lengths, found.bins, strict=True))
    assert np.isfinite(found.done).all()
    again = assign(tokens, kinds, kind, may_idle=may_idle)
    assert np.array_equal(found.bins, again.bins)


@given(
    st.lists(st.integers(1, 3_000), min_size=6, max_size=30), st.lists(st.sampled_from(KINDS), min_size=1, max_size=6)
)
def test_no_pipeline_is_without_work(lengths, costs):
    assert set(dispatch(lengths, costs).pipeline.tolist()) == set(range(len(costs)))


def test_work_for_everyone_may_take_a_chain_of_hands():
    """The empty pipeline holds only the sequence that another needs, which can take one from a third."""
    a, b, c = (price("tp1", 1e-6, 0.1, 1, room) for room in (100, 500, 1000))
    for costs in ((a, b, c), (c, a, b), (b, c, a)):
        assert sorted(dispatch([90, 450, 900], costs).pipeline.tolist()) == [0, 1, 2]


def test_with_fewer_sequences_than_pipelines_some_are_idle():
    found = dispatch([100, 50], [SMALL] * 4)
    assert Counter(found.pipeline.tolist()).most_common(1)[0][1] == 1
    assert sorted(found.ms.tolist())[:2] == [0, 0]


def test_small_and_large_pipelines_get_short_and_long_sequences():
    """A, B, C, D of 100, 120, 500, 520 tokens: A and B on the small P1, C and D on the large P2."""
    p1, p2 = price("tp1", 1e-5, 1.0, 0, 1_000), price("tp4", 2e-6, 0.21, 0, 4_000)
    assert dispatch([100, 120, 500, 520], [p1, p2]).pipeline.tolist() == [0, 0, 1, 1]
    assert dispatch([1_200, 120], [p1, p2]).pipeline.tolist() == [1, 0]  # P1 does not hold 1,200
    with pytest.raises(BalanceError, match=r"1200 tokens and the roomiest pipeline holds 1000"):
        dispatch([1_200], [p1])


def test_any_pairing_is_possible_not_only_neighbours():
    found = dispatch([1, 2, 1000, 1001], [SMALL, SMALL]).pipeline
    assert found[0] == found[3] != found[1] == found[2]


@pytest.mark.parametrize("deep", [False, True])
def test_dispatch_is_near_the_exact_one_on_small_cases(deep):
    rng = np.random.default_rng(7 + deep)
    kinds = [kind for kind in KINDS if deep or kind.pp == 1]
    gaps, closer = [], 0
    while len(gaps) < 150:
        costs = [kinds[i] for i in rng.integers(len(kinds), size=rng.integers(2, 4))]
        tokens = long_tailed(rng, int(rng.integers(3, 8 if len(costs) == 3 else 11)), max(c.max_len for c in costs))
        exact = exact_dispatch(tokens, costs).ms
        found = dispatch(tokens, costs, estimate=PUBLISHED).ms.max()
        gaps.append(found / exact - 1)
        bounds = lp_dispatch_ms(tokens, costs), lp_staged_ms(tokens, costs, 2 * exact)  # free to be wrong
        assert bounds[0] <= bounds[1] <= exact * (1 + 1e-9)
        closer += bounds[1] > 1.02 * bounds[0]
    assert closer > 50 if deep else not closer
    assert min(gaps) > -1e-9
    assert np.mean(gaps) < 0.003
    assert max(gaps) < 0.1


def test_dispatch_is_as_good_as_highs():
    tokens = long_tailed(np.random.default_rng(3), 24, 8_000)
    for costs in ([SMALL, MIDDLE, LARGE], [DEEP, DEEP, LARGE], [DEEPEST, MIDDLE, MIDDLE]):
        referee = milp_dispatch(tokens, costs, seconds=1.0)
        found = dispatch(tokens, costs, estimate=PUBLISHED).ms.max()
        assert referee.bound * (1 - 1e-6) <= found <= 1.01 * referee.ms
        times = np.stack([cost.times(tokens) for cost in costs])
        ends = [
            times[j, referee.bins == j].sum() + (cost.pp - 1) * times[j, referee.bins == j].max(initial=0)
            for j, cost in enumerate(costs)
        ]
        assert referee.ms == pytest.approx(max(ends))  # the referee's own solution is worth what it says


@pytest.mark.parametrize("text", ["4*tp16", "tp16|6*tp8", "tp16|12*tp4", "tp8|14*tp4"])
def test_dispatch_is_near_the_linear_programme_on_published_strategies(text):
    costs = costs_of(Strategy.parse(text), SHARED.costs)
    batches = LengthBatches(shipped_lengths("wikipedia"), 200_000, max(cost.max_len for cost in costs), seed=3)
    gaps = []
    for iteration in range(4):
        tokens = np.minimum(batches.batch(iteration).tokens, 32_768)
        gaps.append(dispatch(tokens, costs, estimate=PUBLISHED).ms.max() / lp_dispatch_ms(tokens, costs) - 1)
    assert min(gaps) > -1e-9
    assert np.mean(gaps) < 0.02


def test_bubbles_are_not_cut():
    """Four equal sequences on two pipelines of two stages: T is 2 without bubbles, 3 with them."""
    half = price("pp2", 0, 0.01, 0, 1_000)
    tokens = np.full(4, 100)
    assert lp_dispatch_ms(tokens, [half, half]) == pytest.approx(2)
    assert lp_staged_ms(tokens, [half, half], 9.0) == pytest.approx(3, rel=2e-3)
    assert lp_staged_ms(tokens, [half, half], 2.5) == pytest.approx(2.5, rel=2e-3)
    # A long one and forty short ones: its bubble is on one of the pipelines alone, the other does more.
    tokens = np.array([200, *[20] * 40])
    assert lp_staged_ms(tokens, [half, half], 99.0) == pytest.approx((2 + 8 + 2 + 0.2) / 2, rel=2e-3)


@pytest.mark.parametrize(("text", "first"), [("tp8.pp3|10*tp4", 4), ("8*tp4.pp2", 4), ("tp16|2*tp8.pp3", 3)])
def test_dispatch_is_near_the_linear_programme_with_bubbles(text, first):
    costs = costs_of(Strategy.parse(text), SHARED.costs)[:first]
    room = max(cost.max_len for cost in costs)
    gaps = []
    for seed in range(3):
        tokens = LengthBatches(shipped_lengths("wikipedia"), 40_000, room, seed=seed).batch(0).tokens
        found = dispatch(tokens, costs, estimate=PUBLISHED).ms.max()
        gaps.append(found / lp_staged_ms(tokens, costs, found) - 1)
    assert min(gaps) > -1e-9
    assert np.mean(gaps) < 0.02


@given(LENGTHS, st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
def test_bounds_are_below_what_is_found(lengths, costs):
    tokens = -np.sort(-np.array(lengths, np.int64))
    kinds = tuple(dict.fromkeys(costs))
    bound = candidate_bound(tokens, kinds, np.array([costs.count(kind) for kind in kinds]))
    if tokens.size and tokens.max() > max(cost.max_len for cost in costs):
        assert bound.ms == np.inf
        return
    free = any_strategy_ms(tokens, kinds, sum(cost.devices for cost in costs))
    assert bound.work_ms <= bound.ms
    if tokens.size:
        assert lp_dispatch_ms(tokens, costs) >= free * (1 - 1e-9)
        plain = [price(str(c.pipeline), c.a, c.b, 0, c.max_len) for c in costs]  # without constants both agree
        without = tuple(dict.fromkeys(plain))
        dual = candidate_bound(tokens, without, np.array([plain.count(kind) for kind in without]))
        assert dual.work_ms <= lp_dispatch_ms(tokens, plain) * (1 + 1e-9)
