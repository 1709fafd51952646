"""Plans of iterations against trying everything; caps, determinism and edges as properties; the published case."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from balance.price_lists import DEEP, KINDS, LARGE, LENGTHS, MIDDLE, SMALL, price
from hypothesis import given, settings
from hypothesis import strategies as st

from dynajax.balance.compare import baselines, setting
from dynajax.balance.iteration import IterationOptions, IterationPlan, Planner
from dynajax.balance.lengths import LengthBatches, shipped_lengths
from dynajax.balance.microbatching import MicrobatchOptions, Packing, form_microbatches, microbatches_ms
from dynajax.balance.profiles import load_profile, published_candidates
from dynajax.balance.shapes import Shapes
from dynajax.balance.simulate import published_ms, simulated_ms
from dynajax.errors import BalanceError
from dynajax.meshes import Pipeline, Strategy

CANDIDATES = [Strategy.parse(text) for text in ("tp8", "4*tp1|tp4.pp3", "4*tp2", "2*tp2.pp2|cp2.tp2", "8*tp1")]
PLAIN = MicrobatchOptions()


def check(plan: IterationPlan, lengths: list[int], options: IterationOptions) -> None:
    """Every sequence once, caps held, prices as the cost model has them, nothing that is not a number."""
    shapes = options.microbatching.shapes
    held = [i for p in plan.pipelines for mb in p.microbatches for i in mb.sequences]
    assert sorted(held) == list(range(len(lengths)))
    costs = {cost.pipeline: cost for cost in KINDS}
    for p in plan.pipelines:
        cost = costs[p.pipeline]
        for mb in p.microbatches:
            sizes = [lengths[i] for i in mb.sequences]
            assert sizes  # an empty micro-batch is never planned
            assert sum(sizes) == mb.tokens <= mb.padded <= cost.max_len
            assert mb.ms == pytest.approx(cost.microbatch_ms(sizes, mb.padded))
            if shapes:
                assert mb.padded in shapes.rows(cost)
                assert len(sizes) <= shapes.max_segments
        times = [mb.ms for mb in p.microbatches]
        assert p.ms == pytest.approx(simulated_ms(times, cost.pp))
        assert p.published_ms == pytest.approx(published_ms(times, cost.pp))
    assert plan.ms == max(p.ms for p in plan.pipelines)
    assert plan.published_ms >= plan.ms * (1 - 1e-9)
    assert 0 <= plan.idle_share < 1
    assert [p.pipeline for p in plan.pipelines] == list(plan.strategy.pipelines)
    assert all(c.bound_ms <= c.ms * (1 + 1e-9) for c in plan.considered)
    if len(lengths) >= len(plan.pipelines) and not options.may_idle and max(lengths) <= 3_000:
        assert all(p.microbatches for p in plan.pipelines)


OPTIONS = st.builds(
    IterationOptions,
    st.builds(
        MicrobatchOptions, st.none() | st.builds(Shapes, st.integers(1, 6), st.integers(1, 9)), st.sampled_from(Packing)
    ),
    st.booleans(),
)


@settings(max_examples=60)
@given(LENGTHS, OPTIONS)
def test_plans_hold_what_they_promise(lengths, options):
    planner = Planner(CANDIDATES[:4], KINDS, options)
    room = max(candidate.room for candidate in planner.candidates)
    if max(lengths, default=0) > room:
        with pytest.raises(BalanceError, match=f"roomiest candidate holds {room}"):
            planner.plan(lengths)
        return
    plan = planner.plan(lengths)
    check(plan, lengths, options)
    assert Planner(CANDIDATES[:4], KINDS, options).plan(lengths) == plan
    assert planner.plan(np.array(lengths)).digest == plan.digest


@pytest.mark.parametrize("lengths", [[], [1], [30_000], [7] * 3])
def test_few_sequences_give_numbers(lengths):
    plan = Planner(CANDIDATES, KINDS).plan(lengths)
    check(plan, lengths, IterationOptions())
    assert np.isfinite([plan.ms, plan.published_ms, plan.idle_share]).all()


def test_the_digest_tells_plans_apart():
    planner = Planner([Strategy.parse("2*tp1")], KINDS)
    digests = {planner.plan(lengths).digest for lengths in ([5, 6, 7], [7, 6, 5], [5, 6, 700], [5, 6])}
    assert len(digests) >= 3


def best_by_trying(lengths: list[int], strategy: Strategy) -> float:
    """The earliest end over all assignments, all packings of each pipeline and all orders of its micro-batches."""
    costs = {cost.pipeline: cost for cost in KINDS}

    def packings(items: list[int]):
        if not items:
            yield []
            return
        for rest in packings(items[1:]):
            yield [[items[0]], *rest]
            for at in range(len(rest)):
                yield [*rest[:at], [items[0], *rest[at]], *rest[at + 1 :]]

    def alone(items: list[int], pipeline: Pipeline) -> float:
        cost = costs[pipeline]
        best = np.inf
        for packs in packings(items):
            if all(sum(pack) <= cost.max_len for pack in packs):
                times = [cost.microbatch_ms(pack) for pack in packs]
                best = min(
                    [best, *(simulated_ms(p, cost.pp) for p in (permutations(times) if cost.pp > 1 else [times]))]
                )
        return best

    ends = np.inf
    for code in range(len(strategy.pipelines) ** len(lengths)):
        shares: list[list[int]] = [[] for _ in strategy.pipelines]
        for size in lengths:
            code, at = divmod(code, len(shares))
            shares[at].append(size)
        if all(shares):
            ends = min(ends, max(alone(s, p) for s, p in zip(shares, strategy.pipelines, strict=True)))
    return ends


def test_plans_are_near_the_best_of_all_on_small_cases():
    rng = np.random.default_rng(11)
    gaps = []
    for text in ("tp1|tp2", "tp2.pp2|tp2", "2*tp2.pp2", "tp4.pp3|tp1"):
        strategy = Strategy.parse(text)
        for _ in range(6):
            lengths = rng.lognormal(6, 1, 5).astype(int).clip(1, 3_000).tolist()
            gaps.append(Planner([strategy], KINDS).plan(lengths).ms / best_by_trying(lengths, strategy) - 1)
    assert min(gaps) > -1e-9
    assert np.mean(gaps) < 0.02
    assert max(gaps) < 0.12


def test_a_candidate_is_left_out_only_if_it_cannot_win():
    batches = LengthBatches(shipped_lengths("wikipedia"), 30_000, 8_000, seed=4)
    planner = Planner(CANDIDATES, KINDS)
    for iteration in range(6):
        tokens = batches.batch(iteration).tokens
        alone = [
            planner.plan(tokens, only=i).ms if tokens.max() <= planner.candidates[i].room else np.inf for i in range(5)
        ]
        assert planner.plan(tokens).ms <= min(alone) * 1.001


def test_the_number_of_micro_batches_weighs_bubbles_against_constants():
    """Six sequences of 10 ms on four stages: V = 2, 3, 6 take (3 + V)·(60 / V + c)."""
    for constant, best in ((0.0, 6), (15.0, 3), (40.0, 2)):
        cost = price("pp4", 0.0, 0.1, constant, 10_000)
        ends = {
            v: form_microbatches(range(6), [100] * 6, cost, MicrobatchOptions(microbatches=v)).published_ms
            for v in (1, 2, 3, 6)
        }
        assert ends[2] == pytest.approx(5 * (30 + constant))
        assert ends[3] == pytest.approx(6 * (20 + constant))
        chosen = form_microbatches(range(6), [100] * 6, cost, PLAIN)
        assert best == min(ends, key=ends.__getitem__)
        assert chosen.ms <= ends[best] * (1 + 1e-9)  # four unequal ones are better still with 15 ms
        assert abs(len(chosen.microbatches) - best) <= 1


def test_one_stage_wants_few_micro_batches():
    formed = form_microbatches(range(6), [100] * 6, SMALL, PLAIN)
    assert len(formed.microbatches) == 1
    assert microbatches_ms([100] * 6, SMALL, PLAIN) == pytest.approx(formed.ms)


def test_as_many_micro_batches_as_asked_for():
    lengths = np.random.default_rng(0).integers(1, 300, 400).tolist()
    options = IterationOptions(MicrobatchOptions(microbatches=100))
    plan = Planner([Strategy.parse("tp2.pp2")], KINDS, options).plan(lengths)
    assert len(plan.pipelines[0].microbatches) == 100
    check(plan, lengths, options)
    with pytest.raises(BalanceError, match=r"no candidate can make 100 micro-batches .* 3 sequences of 6 tokens"):
        Planner([Strategy.parse("tp2.pp2")], KINDS, options).plan([1, 2, 3])
    with pytest.raises(BalanceError, match=r"3 sequences of 6 tokens do not make 100 micro-batches"):
        form_microbatches(range(3), [1, 2, 3], DEEP, options.microbatching)


def test_all_pipelines_can_have_as_many_micro_batches_and_the_empty_ones_are_marked():
    """Two ranks of a budget of 100 tokens: one has five rows of 95, the other could do with one of 5 times 20."""
    hundred = price("tp1", 1e-6, 0.1, 1, 100)
    lengths = [95] * 5 + [20] * 5
    uneven = Planner([Strategy.parse("dp2.tp1")], [hundred]).plan(lengths)
    even = Planner([Strategy.parse("dp2.tp1")], [hundred], IterationOptions(even=True)).plan(lengths)
    counts = [len(p.microbatches) for p in even.pipelines]
    assert len(set(counts)) == 1
    assert counts[0] == max(len(p.microbatches) for p in uneven.pipelines)
    assert sorted(i for p in even.pipelines for mb in p.microbatches for i in mb.sequences) == list(range(10))
    empty = [mb for p in even.pipelines for mb in p.microbatches if not mb.sequences]
    assert len(empty) == sum(counts) - sum(len(p.microbatches) for p in uneven.pipelines)
    assert all(mb.tokens == 0 < mb.padded for mb in empty)
    idle = Planner([Strategy.parse("2*tp8")], KINDS, IterationOptions(even=True)).plan([10])
    assert [len(p.microbatches) for p in idle.pipelines] == [1, 1]


def test_idle_pipelines_are_a_choice():
    lengths, slow = [3000, 2000, 10], replace(SMALL, b=100.0)
    costs = (slow, LARGE)
    forced = Planner([Strategy.parse("tp8|tp1")], costs).plan(lengths)
    free = Planner([Strategy.parse("tp8|tp1")], costs, IterationOptions(may_idle=True)).plan(lengths)
    assert all(p.microbatches for p in forced.pipelines)
    assert not free.pipelines[1].microbatches
    assert free.ms < forced.ms


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Planner([], KINDS), "no candidate strategies"),
        (lambda: Planner([Strategy.parse("tp16")], KINDS), "tp16 is not in the profile"),
        (lambda: Planner(CANDIDATES, KINDS).plan([5, 0]), "sequence 1 has 0 tokens"),
        (lambda: MicrobatchOptions(microbatches=0), "microbatches=0"),
        (lambda: Planner(CANDIDATES, KINDS).plan([20_000], only=2), "the roomiest candidate holds 8000"),
    ],
)
def test_bad_input_is_refused(make, said):
    with pytest.raises(BalanceError, match=said):
        make()


def test_published_candidates_beat_fixed_packing_by_half():
    shared = setting(load_profile("32b"), 64, 32_768)
    planner = Planner(published_candidates(64, shared.costs), shared.costs)
    batches = LengthBatches(shipped_lengths("wikipedia"), 200_000, 32_768)
    drawn = [batches.batch(i).tokens for i in range(16)]
    plans, rivals = [planner.plan(tokens) for tokens in drawn], [baselines(tokens, shared) for tokens in drawn]
    best = np.mean([plan.ms for plan in plans])
    assert np.mean([r.fixed for r in rivals]) / best >= 1.5
    assert (
        np.mean([r.padding for r in rivals])
        > np.mean([r.fixed for r in rivals])
        > np.mean([r.balanced for r in rivals])
    )
    assert all(r.bound <= plan.ms for r, plan in zip(rivals, plans, strict=True))
    assert len({plan.candidate for plan in plans}) > 1


def test_published_candidates_beat_fixed_packing_on_1024_devices():
    shared = setting(load_profile("32b"), 1024, 32_768)
    planner = Planner(published_candidates(1024, shared.costs), shared.costs)
    batches = LengthBatches(shipped_lengths("wikipedia"), 3_200_000, 32_768)
    drawn = [batches.batch(i).tokens for i in range(2)]
    best = np.mean([planner.plan(tokens).ms for tokens in drawn])
    assert np.mean([shared.homogeneous.fixed_ms(tokens, 32_768) for tokens in drawn]) / best >= 1.6


def test_middle_and_deep_are_priced_alike_by_planner_and_microbatches():
    for cost in (MIDDLE, DEEP):
        lengths = [900, 800, 50, 40, 30]
        plan = Planner([Strategy((cost.pipeline,))], KINDS).plan(lengths)
        assert plan.ms == pytest.approx(form_microbatches(range(5), lengths, cost, PLAIN).ms)
