"""Unlike pipelines side by side on documents of any length: as on one device that knows nothing of pipelines."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from train.document_runs import (
    LONGEST,
    MODEL,
    addresses,
    alone,
    assert_alike,
    assert_least_is_moved,
    balancing,
    documents,
    job_and_place,
    on,
    optimizer,
    reference,
    reference_losses,
    take,
    trainer,
    written,
)
from train.small_runs import bits, largest_difference
from train.test_trainer import compilations

from dynajax import models
from dynajax.data import DocumentSteps, MemoryDocuments
from dynajax.errors import BalanceError, StrategyError
from dynajax.models import MoeConfig
from dynajax.runtime.pipeline_runner import PipelineRunner
from dynajax.train import Trainer
from dynajax.train.balancing import Balancing
from dynajax.train.candidates import Candidates
from dynajax.train.elementwise import require_elementwise
from dynajax.train.plan_ahead import PlanAhead, TakenPlan

EIGHT = [
    *("tp4|tp2|tp2", "pp2.tp2|tp4", "cp4|tp2|dp1|dp1", "pp3|tp3|tp2", "pp2.cp2|tp3|dp1", "tp5|cp3"),
    *("pp2|tp2|cp2|2*dp1", "cp2.tp2|pp2|tp2", "tp6|pp2"),
    *("8*dp1", "dp2.tp4"),
]
"""Strategies of eight devices: nine of unlike pipelines, some with sizes that do not divide, two of like ones."""


def unpack(running: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each document has a row of its own, in the programs that rows of several go through."""
    (job, place), packed = job_and_place(running), PlanAhead.take
    unpacked = replace(job, balancing=balancing(max_segments=1)).planner(place)

    def taken(self: PlanAhead, number: int) -> TakenPlan:
        return replace(packed(self, number), plan=unpacked.plan(job.data.lengths(running.next_step)))

    monkeypatch.setattr(PlanAhead, "take", taken)


@pytest.mark.parametrize("strategy", EIGHT)
def test_a_step_is_that_of_one_device(strategy: str, monkeypatch: pytest.MonkeyPatch):
    """Loss, gradient and parameters, with rows packed in the first step and one document a row in the second."""
    running = on(strategy)
    for number, packed in enumerate((True, False)):
        if not packed:
            unpack(running, monkeypatch)
        (step, report), wanted, batch = take(running), reference()[number], documents()[number]
        assert_alike(step, wanted)
        assert sum(share.sequences for share in report.pipelines) == report.samples == batch.samples
        assert sum(share.tokens for share in report.pipelines) == batch.num_tokens
        assert (sum(share.microbatches for share in report.pipelines) < report.samples) == packed
        assert report.idle_share is not None
        assert 0 < report.idle_share < 1


def test_fifty_steps_under_changing_strategies_move_and_compile_nothing():
    """Each step takes another strategy: losses of one device, no compiling, and the optimizer's arrays stay put."""
    running = on(EIGHT[0])
    places = itertools.cycle(EIGHT[:6])
    for strategy in EIGHT[:6]:
        running.prepare(strategy).wait()
    for strategy in EIGHT[:6]:  # warm up what is compiled on first use
        on(strategy).step()
    running.step()
    losses, seen_strategies, lies = [running.step().loss], set(), addresses(running.state)
    with compilations() as seen:
        for _ in range(48):
            strategy = next(places)
            if strategy != str(running.placement):
                report = running.switch(strategy)
                assert report.bytes_moved == 0
                assert report.compile_s == 0
            step = running.step()
            assert addresses(running.state) == lies
            losses.append(step.loss)
            seen_strategies.add(step.strategy)
    assert seen == []
    assert len(seen_strategies) == 6
    assert largest_difference(losses, reference_losses(50)[1:]) < 1e-5


def test_links_move_what_the_planner_proves_to_be_least():
    running = on("pp2.cp2|tp3|dp1")
    assert_least_is_moved(running, running.step())


def test_sections_pull_and_push_while_others_compute():
    """In the order of dispatch: a section is begun before the next is pulled, and pushed from the last to the first."""
    running = on("tp4|pp2.tp2")
    running.step()
    running.step()
    when = {(event.what, event.pipeline, event.section): event for event in running.trace}
    sections = {0: range(2), 1: range(1)}  # a pipeline with stages is one section
    moved = {(kind, p, k) for kind in ("pull", "dispatch", "push") for p in (0, 1) for k in sections[p]}
    assert set(when) == moved | {("compute", 0, None), ("compute", 1, None), ("update", None, None)}
    first, second = sorted((0, 1), key=lambda p: when["pull", p, 0].begin_s)
    order = [(kind, p, k) for p in (first, second) for k in sections[p] for kind in ("pull", "dispatch")]
    order += [("push", p, k) for p in (second, first) for k in reversed(sections[p])]  # who takes less pushes first
    assert sorted(moved, key=lambda key: when[key].begin_s) == order
    for before, after in itertools.pairwise(order):
        assert when[before].end_s <= when[after].begin_s
    for p in (0, 1):
        assert when["dispatch", p, 0].begin_s <= when["compute", p, None].begin_s
        assert when["compute", p, None].end_s <= when["update", None, None].begin_s
    assert max(e.end_s for e in running.trace) == when["update", None, None].end_s


def test_a_step_that_fails_half_way_can_be_taken_again(monkeypatch: pytest.MonkeyPatch):
    """Nothing is given up before all gradients are there: not the state, and not its place in the documents."""
    running, push = on("tp4|pp2.tp2"), PipelineRunner.push
    before, pushed = bits(running.whole_state()), []

    def fails_at_second(self: PipelineRunner, sums: Any, section: int) -> Any:
        pushed.append(self)
        if len(pushed) == 2:
            raise RuntimeError("the link is down")
        return push(self, sums, section)

    monkeypatch.setattr(PipelineRunner, "push", fails_at_second)
    with pytest.raises(RuntimeError, match="the link is down"):
        running.step()
    assert bits(running.whole_state()) == before
    assert largest_difference([running.step().loss for _ in range(2)], reference_losses(2)) < 1e-5


def test_a_plan_that_is_late_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    running, take = on("tp4|pp2.tp2"), PlanAhead.take

    def late(self: PlanAhead, number: int) -> TakenPlan:
        return replace(take(self, number), late=True, note="the plan was late: strategy 0 was used again")

    monkeypatch.setattr(PlanAhead, "take", late)
    with caplog.at_level("WARNING"):
        assert largest_difference([running.step().loss], reference_losses(1)) < 1e-5
    assert [record.getMessage() for record in caplog.records if record.name.startswith("dynajax")] == [
        "step 0: the plan was late: strategy 0 was used again"
    ]


def test_a_pipeline_without_work_adds_nothing():
    few = DocumentSteps(MemoryDocuments((b"abcdefgh", b"xyz")), token_budget=16, longest=LONGEST // 4)
    losses = {}
    for strategy in ("4*tp2", "tp2@0-1"):
        running = trainer(strategy, data=few)
        steps = [running.step() for _ in range(2)]
        losses[strategy] = [step.loss for step in steps]
        idle = [share for share in steps[0].pipelines if not share.sequences]
        assert len(idle) == (2 if strategy == "4*tp2" else 0)
        assert all((share.busy_s, share.bytes_pulled, share.bytes_pushed) == (0, 0, 0) for share in idle)
    assert largest_difference(losses["4*tp2"], losses["tp2@0-1"]) < 1e-5


def test_documents_with_nothing_to_predict_add_nothing():
    """One of one token has no target: all that a pipeline with only such computes is masked."""
    data = DocumentSteps(MemoryDocuments((b"abcdefgh", *[b"a"] * 24)), token_budget=16, longest=LONGEST // 4, seed=5)
    running = trainer("2*tp2", data=data)
    step, report = take(running)
    assert sorted(share.tokens - share.sequences for share in report.pipelines) == [0, 7]
    assert all(share.sequences for share in report.pipelines)
    assert_alike(step, alone(data, 1, optimizer())[0])
    assert data.lengths(1).max() == 1
    step, report = take(running)
    assert all(share.sequences for share in report.pipelines)
    assert step.loss == 0
    assert all(np.all(x == 0) for x in jax.tree.leaves(step.gradient))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(step.params))


def test_other_devices_are_a_switch_like_any_other():
    running = on("tp4|pp2.tp2")
    losses = [running.step().loss]
    before = bits(running.whole_state())
    report = running.switch("tp2|tp3@9-5")
    assert bits(running.whole_state()) == before
    assert report.bytes_moved == report.bytes_lower_bound > 0
    losses += [running.step().loss]
    assert {d.id for x in jax.tree.leaves(running.state.params) for d in x.sharding.device_set} == {5, 6, 7, 8, 9}
    assert largest_difference(losses, reference_losses(2)) < 1e-5


def test_auto_takes_what_suits_the_documents_of_a_step_and_compiles_nothing_for_it():
    """Steps with a document that only four devices hold, and steps with none: the strategy changes again and again."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(17, LONGEST + 1, 20), LONGEST, *rng.integers(2, 17, 60)]
    data = written(lengths, token_budget=100)
    running = trainer("auto", data=data, devices=4, balancing=balancing(device_tokens=16, candidates=2))
    _, place = job_and_place(running)
    assert (place.name, [strategy.num_devices for strategy in place.strategies]) == ("auto", [4, 4])
    running.prepare("auto").wait()
    steps, lies = [running.step()], addresses(running.state)
    with compilations() as seen:  # the first step under the other strategy is among these
        for _ in range(20):
            steps.append(running.step())
            assert addresses(running.state) == lies
    assert seen == []
    names = [step.strategy for step in steps]
    assert set(names) == {"cp2.tp2", "tp2|2*dp1"}
    assert sum(before != after for before, after in itertools.pairwise(names)) > 6
    for number, name in enumerate(names):  # what does not fit two devices goes to four
        assert name == "cp2.tp2" or data.lengths(number).max() <= 32
    assert largest_difference([s.loss for s in steps], [s.loss for s in alone(data, len(steps), optimizer())]) < 1e-5


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (optax.adafactor(1e-3, min_dim_size_to_factor=2), "keeps .*, which has no parameter's shape"),
        (optax.chain(optax.scale_by_param_block_rms(), optax.sgd(1.0)), "updates tensors by their shapes"),
        (
            optax.adamw(1e-2, weight_decay=0.5, mask=by_rank),
            "updates tensors by their shapes",
        ),
        (optax.adamw(optax.linear_schedule(0.0, 3e-4, 2000), mask=by_rank), "updates tensors by their shapes"),
        (
            optax.MultiSteps(optax.adamw(1e-3, mask=by_rank), 5).gradient_transformation(),
            "updates tensors by their shapes",
        ),
    ],
)
def test_an_optimizer_that_sees_shapes_is_refused(made: optax.GradientTransformation, said: str):
    with pytest.raises(StrategyError, match=f"the optimizer {said}.*take one that treats each element alike"):
        Trainer(MODEL, made, "4*dp1", documents())


@pytest.mark.parametrize(
    "made",
    [
        optax.lamb(1e-3),
        optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        optax.adamw(
            1e-3, mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "norm" in str(path), params)
        ),
        optax.lion(1e-3),
    ],
)
def test_an_optimizer_that_treats_elements_alike_may_be_flat(made: optax.GradientTransformation):
    shapes = jax.eval_shape(lambda: models.init(MODEL, jax.random.key(0)))
    require_elementwise(made, shapes)


def test_what_cannot_be_trained_by_pipelines_side_by_side_is_refused():
    moe = MoeConfig(layers=2, hidden=8, ffn=8, heads=2, kv_heads=2, head_dim=4, vocab=256, experts=4, top_k=2)
    with pytest.raises(StrategyError, match=r"losses of the routers .* take balance_weight=0 and z_weight=0"):
        Trainer(moe, optimizer(), "2*dp1", documents())
    with pytest.raises(StrategyError, match=r"which documents share a row, .* take capacity_factor=None"):
        Trainer(replace(moe, balance_weight=0.0, capacity_factor=1.0), optimizer(), "2*dp1", documents())
    with pytest.raises(BalanceError, match="has 40 tokens and the roomiest candidate holds"):
        Trainer(MODEL, optimizer(), "2*dp1", documents(), balancing=Balancing(16))
    with pytest.raises(StrategyError, match="uses device 16, but there are 16"):
        trainer("tp8|tp8|dp1")
    with pytest.raises(StrategyError, match=r"keep parameters and moments cut over all devices .* drop fsdp"):
        trainer("fsdp2|tp2")


def test_experts_over_their_own_axis_lose_what_they_lose_together():
    moe = MoeConfig(
        layers=2, hidden=8, ffn=8, heads=2, kv_heads=2, head_dim=4, vocab=256, experts=3, top_k=2, balance_weight=0.0
    )
    losses = {}
    for strategy in ("ep2|pp2|tp2", "dp1"):
        balancing = Balancing(LONGEST, buckets=1, max_segments=8, align=8)
        running = Trainer(moe, optimizer(), strategy, documents(), devices=jax.devices()[:8], balancing=balancing)
        losses[strategy] = [running.step().loss for _ in range(3)]
    assert largest_difference(losses["ep2|pp2|tp2"], losses["dp1"]) < 1e-5


def test_each_device_holds_the_longest_document_unless_told_otherwise():
    """Also where rows are not as long as documents may be, but a multiple of something longer."""
    running = Trainer(MODEL, optimizer(), "2*dp1", documents())
    assert isinstance(running.placement, Candidates)
    assert {p.num_devices for strategy in running.placement.strategies for p in strategy.pipelines} == {1}
