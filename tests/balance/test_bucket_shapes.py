"""Rows of a few lengths: padding, alignment, how many programs a job compiles, segments of a row."""

import numpy as np
import pytest
from balance.price_lists import KINDS, RING, SMALL, price
from hypothesis import given
from hypothesis import strategies as st

from dynajax.balance.iteration import IterationOptions, Planner
from dynajax.balance.microbatching import MicrobatchOptions
from dynajax.balance.shapes import Shapes
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy


@given(st.sampled_from(KINDS), st.integers(1, 9), st.sampled_from([1, 3, 100, 128, 5_000]), st.data())
def test_rows_are_few_aligned_and_the_smallest_that_hold(cost, buckets, align, data):
    shapes = Shapes(buckets, 4, align)
    rows = shapes.rows(cost)
    assert len(rows) <= buckets
    assert list(rows) == sorted(set(rows))
    parts = cost.pipeline.size("tp") * cost.pipeline.size("cp")
    assert all(0 < row <= cost.max_len and row % align == 0 and row % parts == 0 for row in rows)
    limited = shapes.limit([cost])
    if not rows:
        assert not limited
        return
    assert limited[0].max_len == rows[-1]
    assert shapes.rows(limited[0]) == rows
    tokens = data.draw(st.integers(1, rows[-1]))
    assert shapes.padded(tokens, cost) == min(row for row in rows if row >= tokens)


def test_a_ring_gets_equal_parts_of_every_row():
    odd = price("cp3", 1e-6, 0.1, 1, 100)
    shapes = Shapes(buckets=8, max_segments=4, align=1)
    assert [shapes.padded(tokens, odd) % 3 for tokens in (1, 2, 10)] == [0, 0, 0]
    assert shapes.padded(10, odd) >= 10


def test_a_padded_row_is_within_max_len():
    twenty = price("tp1", 1e-6, 0.1, 1, 20)
    assert Shapes(4, 4, align=4).padded(20, twenty) == 20
    with pytest.raises(BalanceError, match=r"21 tokens do not fit into a row of tp1, which has 8, 12, 16, 20"):
        Shapes(4, 4, align=4).padded(21, twenty)
    with pytest.raises(BalanceError, match=r"20 tokens do not fit .* which has 16 tokens of 20 aligned to 16"):
        Shapes(1, 4, align=16).padded(20, twenty)


def test_a_thousand_batches_compile_at_most_buckets_times_kinds_of_pipelines():
    shapes = Shapes(buckets=6, max_segments=16)
    candidates = [Strategy.parse("tp2|2*tp1"), Strategy.parse("2*tp2")]
    planner = Planner(candidates, KINDS, IterationOptions(MicrobatchOptions(shapes)))
    rng = np.random.default_rng(0)
    compiled: set[tuple[str, int, int]] = set()
    warm = 0
    for step in range(1_000):
        plan = planner.plan(rng.integers(1, 4_097, rng.integers(3, 5)))
        for p in plan.pipelines:
            compiled |= {(str(p.pipeline), mb.padded, shapes.max_segments) for mb in p.microbatches}
        warm = len(compiled) if step == 500 else warm
    assert len(compiled) <= 6 * 2
    assert len(compiled) == warm


def test_rows_have_a_bounded_number_of_segments():
    shapes = Shapes(buckets=1, max_segments=8, align=64)
    row = price("tp1", 1e-6, 0.1, 1, 64)
    planner = Planner([Strategy.parse("tp1")], [row], IterationOptions(MicrobatchOptions(shapes)))
    lengths = np.random.default_rng(0).integers(1, 3, 40)
    microbatches = planner.plan(lengths).pipelines[0].microbatches
    assert sorted(i for mb in microbatches for i in mb.sequences) == list(range(40))
    assert max(len(mb.sequences) for mb in microbatches) <= 8
    assert {mb.padded for mb in microbatches} == {64}


def test_padding_is_paid_for_and_kept_small():
    """Most rows are full: what a plan loses to padding is about half a bucket a pipeline, not a micro-batch."""
    rng = np.random.default_rng(1)
    shapes = Shapes(buckets=6, max_segments=64)
    strategy = [Strategy.parse("4*tp1")]
    lost = []
    for _ in range(5):
        lengths = rng.lognormal(6, 0.8, 80).astype(int).clip(1, 2_500)
        bounded = Planner(strategy, KINDS, IterationOptions(MicrobatchOptions(shapes))).plan(lengths)
        free = Planner(strategy, KINDS).plan(lengths)
        assert bounded.ms >= free.ms * (1 - 1e-3)
        lost.append(bounded.ms / free.ms - 1)
    assert np.mean(lost) < 0.06


def test_impossible_shapes_are_refused():
    with pytest.raises(BalanceError, match="buckets=0"):
        Shapes(0, 1)
    with pytest.raises(BalanceError, match="tp1 is not in the profile, or does not fit in memory or in the buckets"):
        Planner([Strategy.parse("tp1")], [SMALL, RING], IterationOptions(MicrobatchOptions(Shapes(2, 4, align=4_096))))
