"""Proposed strategies: the programme against trying everything, exact numbers of devices, and the gain on the data."""

import numpy as np
import pytest
from balance.price_lists import DEEP, KINDS, LARGE, MIDDLE, SMALL
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.balance.compare import baselines, setting
from dynajax.balance.compose import Groups, compose, length_groups, prefixes
from dynajax.balance.cost import short_text
from dynajax.balance.iteration import IterationOptions, Planner
from dynajax.balance.lengths import LengthBatches, shipped_lengths
from dynajax.balance.microbatching import MicrobatchOptions
from dynajax.balance.profiles import load_profile
from dynajax.balance.propose import propose
from dynajax.balance.shapes import Shapes
from dynajax.errors import BalanceError
from dynajax.meshes import Strategy


def end(cost, copies: int, tokens: float, squares: float, longest: int) -> float:
    """When ``copies`` of a pipeline are done with fluid work, written out once more."""
    work = (cost.a * squares + cost.b * tokens + cost.c * tokens / cost.max_len) / copies
    slowest = cost.a * longest**2 + cost.b * longest
    mean = (cost.c * work / (cost.pp - 1)) ** 0.5 if cost.pp > 1 else 0.0
    bubble = (cost.pp - 1) * ((max(slowest, mean) + mean) / 2 + cost.c)
    return max(work + bubble, cost.pp * (slowest + cost.c))


def best_by_trying(groups: Groups, kinds, devices: int) -> float:
    """All cuts into intervals, all kinds and copies of each; what is left over must be fillable."""
    sizes = [kind.devices for kind in kinds]
    fillable = {0}
    for _ in range(devices):
        fillable |= {n + size for n in fillable for size in sizes if n + size <= devices}

    def best(stop: int, left: int) -> float:
        if stop == 0:
            return 0.0 if left in fillable else np.inf
        found = np.inf
        for start in range(stop):
            tokens, squares = groups.tokens[start:stop].sum(), groups.squares[start:stop].sum()
            for kind in (kind for kind in kinds if kind.max_len >= groups.longest[stop - 1]):
                for copies in range(1, left // kind.devices + 1):
                    mine = end(kind, copies, tokens, squares, int(groups.longest[stop - 1]))
                    if mine < found:
                        found = min(found, max(mine, best(start, left - copies * kind.devices)))
        return found

    return best(groups.longest.size, devices)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 30_000), min_size=1, max_size=12),
    st.lists(st.sampled_from([SMALL, MIDDLE, DEEP, LARGE]), min_size=1, max_size=3, unique=True),
    st.integers(1, 12),
)
def test_the_programme_finds_the_best_mix(lengths, kinds, devices):
    groups = length_groups(np.array(lengths, np.int64), 3, [kind.max_len for kind in kinds])
    best = best_by_trying(groups, kinds, devices)
    if not np.isfinite(best):
        with pytest.raises(BalanceError, match=f"{devices} devices cannot be filled"):
            compose(groups, kinds, devices)
        return
    mix = compose(groups, kinds, devices)
    assert mix.ms == pytest.approx(best)
    assert sum(n * kind.devices for n, kind in zip(mix.copies, kinds, strict=True)) == devices


@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=60), st.integers(1, 20))
def test_groups_hold_every_sequence_once(lengths, count):
    tokens = np.array(lengths, np.int64)
    groups = length_groups(tokens, count, [3_000, 8_000])
    assert groups.tokens.sum() == tokens.sum()
    assert groups.squares.sum() == pytest.approx(float((tokens.astype(float) ** 2).sum()))
    assert groups.longest[-1] == tokens.max()
    assert np.all(np.diff(groups.longest) >= 0)
    for room in (3_000, 8_000):  # no group has sequences that a pipeline holds and others that it does not
        assert sum(groups.tokens[groups.longest <= room]) == tokens[tokens <= room].sum()


@pytest.mark.parametrize("devices", [8, 12, 20, 96])
def test_prefixes_fill_the_devices(devices):
    tokens = np.random.default_rng(0).lognormal(6.5, 1.2, 300).astype(int).clip(1, 30_000)
    kinds = [MIDDLE, DEEP, LARGE]
    found = prefixes(length_groups(tokens, 12, [kind.max_len for kind in kinds]), kinds, devices)
    assert len(found) > 1
    assert len({mix.copies for mix in found}) == len(found)
    for mix in found:
        assert sum(n * kind.devices for n, kind in zip(mix.copies, kinds, strict=True)) == devices


def test_proposals_fill_the_devices_and_hold_the_longest():
    rng = np.random.default_rng(2)
    samples = [rng.lognormal(6, 1, 60).astype(int).clip(1, 4_000) for _ in range(8)]
    found = propose(samples, KINDS, 20, 25_000, most=4)
    assert 1 <= len(found.candidates) <= 4
    assert {s.num_devices for s in found.candidates} == {20}
    assert any("tp8" in short_text(s) or "pp3" in short_text(s) for s in found.candidates)
    assert found == propose(samples, KINDS, 20, 25_000, most=4)
    more = propose(samples, KINDS, 20, 25_000, most=1)
    assert len(more.candidates) == 1
    assert found.sample_ms <= more.sample_ms


def test_the_homogeneous_layout_is_among_the_candidates():
    """Samples have short sequences only; a batch of nothing but long ones is still no worse than homogeneous."""
    samples = [np.random.default_rng(i).integers(1, 500, 80) for i in range(6)]
    found = propose(samples, KINDS, 16, 25_000, most=3)
    assert "2*tp8" in [short_text(s) for s in found.candidates]
    longest = [25_000] * 6
    alone = Planner([Strategy.parse("2*tp8")], KINDS).plan(longest)
    assert Planner(found.candidates, KINDS).plan(longest).ms <= alone.ms * (1 + 1e-9)


def test_proposals_respect_the_shapes():
    samples = [np.array([100, 300, 900, 2_500])] * 3
    options = IterationOptions(MicrobatchOptions(Shapes(buckets=2, max_segments=4, align=4_096)))
    found = propose(samples, KINDS, 8, 4_096, options=options)  # the small pipeline holds no row
    assert all("tp1" not in short_text(s) for s in found.candidates)
    assert Planner(found.candidates, KINDS, options).plan(samples[0]).ms > 0


@pytest.mark.parametrize(
    ("samples", "devices", "longest", "said"),
    [
        ([], 8, 100, "0 sample batches"),
        ([np.array([5])], 8, 50_000, "no pipeline of at most 8 devices holds 50000 tokens"),
        ([np.array([5])], 1, 5_000, "no pipeline of at most 1 devices holds 5000 tokens; the roomiest holds 3000"),
    ],
)
def test_impossible_proposals_are_refused(samples, devices, longest, said):
    with pytest.raises(BalanceError, match=said):
        propose(samples, KINDS, devices, longest)


def test_own_candidates_beat_fixed_packing_on_64_devices():
    """On batches that were not among the samples."""
    shared = setting(load_profile("32b"), 64, 32_768)
    batches = LengthBatches(shipped_lengths("wikipedia"), 200_000, 32_768)
    samples = [batches.batch(1000 + i).tokens for i in range(48)]
    planner = Planner(propose(samples, shared.costs, 64, 32_768).candidates, shared.costs)
    drawn = [batches.batch(i).tokens for i in range(16)]
    best = np.mean([planner.plan(tokens).ms for tokens in drawn])
    rivals = [baselines(tokens, shared) for tokens in drawn]
    assert np.mean([r.fixed for r in rivals]) / best >= 1.6
    assert np.mean([r.bound for r in rivals]) <= best


def test_strategies_may_differ_in_every_axis():
    kinds = [SMALL, MIDDLE, DEEP, KINDS[3], LARGE]  # tp1, tp2, tp2.pp2, tp2.cp2, tp8
    tokens = np.array([12_000] * 2 + [7_000] * 4 + [2_000] * 40)
    mix = compose(length_groups(tokens, 12, [kind.max_len for kind in kinds]), kinds, 16)
    assert sum(n > 0 for n in mix.copies) >= 2
    assert Strategy.parse("tp2.pp2|tp2.cp2|tp8").num_devices == 16
